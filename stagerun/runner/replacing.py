"""Bad training records that are replaced (`on_bad_record`): each rank meets its own, and all are counted together.

The ranks tell each other at every snapshot, where they stop, and before a stage's end is saved. A snapshot knows all that was met
up to it, so that the count goes on where the next process does.
"""

import json
from collections.abc import Callable, Iterable, Iterator

from stagerun.comm import Comm
from stagerun.data.bad_records import Bad, BadRecords, allowed, check, listed
from stagerun.events import Note
from stagerun.recipe import Data, OnBadRecord
from stagerun.runner.together import everyone


class Replacing:
    """On one rank, for one life of a run. Where a bad record stops the run, `met` is None, and there is never anything to tell."""

    def __init__(self, data: Data) -> None:
        self._most = allowed(data.train.images)
        self.met = BadRecords(data.train.images) if data.on_bad_record is OnBadRecord.REPLACE else None

    def too_many(self) -> bool:
        """Whether this rank alone knows of more than there may be: all must stop, and `news_of_all` then raises."""
        return self.met is not None and self.met.too_many()

    def recall(self, comm: Comm, told: Iterable[Iterable[int | str]], is_bad: Callable[[int], bool]) -> None:
        """Counts those that a snapshot knows of and that still are bad: an LMDB can be mended. Collective.

        `told` is rank 0's, as `known` gave it. DataError when they are too many.
        """
        met = self.met
        if met is None:
            return

        def count() -> None:
            found = [Bad(int(index), int(position), str(text)) for index, position, text in told]
            met.learn([bad for bad in found if is_bad(bad.index)])
            check(met.all(), self._most)

        everyone(comm, count)

    def known(self) -> list[tuple[int, int, str]]:
        """[index, position, text] of each bad record, for a snapshot."""
        return [(bad.index, bad.position, bad.text) for bad in self.met.all()] if self.met is not None else []

    def news(self) -> Iterator[Note]:
        """A warning for each bad record that this rank has met and replaced since the last call.

        When they are too many the error that follows names them, and no one reads thousands.
        """
        if self.met is not None and not self.met.too_many():
            yield from map(_note, self.met.fresh())

    def news_of_all(self, comm: Comm) -> Iterator[Note]:
        """The same of all ranks, which from then on know of the same ones. Collective. DataError when they are too many, though
        no rank alone has met as many."""
        if self.met is None:
            return
        rows = [json.loads(told) for told in comm.gather_bytes(json.dumps(self.known()).encode())]
        all_met: dict[int, Bad] = {}
        for index, position, text in (row for rank in rows for row in rank):
            all_met.setdefault(index, Bad(index, position, text))
        new = self.met.learn(all_met.values())
        # Not what this rank knows by now: its threads read ahead, and all are to say the same.
        everyone(comm, lambda: check(list(all_met.values()), self._most))
        yield from map(_note, [*self.met.fresh(), *new])

    def summary(self) -> Note | None:
        """All of them, up to now."""
        if self.met is None or not (known := self.met.all()):
            return None
        return Note(text=f"bad training records replaced so far: {len(known)}\n  {listed(known)}", warning=True)


def _note(bad: Bad) -> Note:
    return Note(text=f"another record is taken in the place of a bad one: {bad.text}", warning=True)
