"""OUT/tensorboard: the run for TensorBoard, without TensorFlow and without torch's writer.

Each stage is a run of its own, OUT/tensorboard/STAGE, and its steps are the iterations along the path of its ancestors and its own: the
curves of a chain lie end to end, and branches lie beside each other. Tags: train/loss, lr, momentum, weight_decay, epoch and
images_per_second for every iteration, with several workers train/sent_bytes, too; test/top1, top5 (0 to 1), loss and, for images with
several labels, mean_ap for every evaluation; test_ema/... for the averaged weights. An ensemble is a run of its own, too,
OUT/tensorboard/ENSEMBLE, with one point of test/..., where the last of its members ends.

Each process life appends a file. It opens with TensorBoard's mark of a restart, which takes away the points that a kill undid.
"""

import errno
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stagerun.base.errors import UsageError
from stagerun.base.events import EnsembleTested, Event, Iterated, StageStarted, Tested, TestedBeside
from stagerun.logs.settled import figures_of
from stagerun.system.files import writing
from stagerun.system.host import host_name


def _protos() -> tuple[Any, Any]:
    """TensorBoard's messages, and what frames a message with its checksums. UsageError where they can't be imported."""
    try:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise UsageError(
            f"`--log tensorboard` needs the package tensorboard, which can't be imported: {error}",
            "pip install 'stagerun[tensorboard]'",
        ) from error
    return event_pb2, RecordWriter


class _EventFile:
    """A new file of one run: whole records only, so that a full disk or a kill harms nothing that is read before it.

    The name sorts behind those of earlier lives, in whose order TensorBoard reads them. OSError.
    """

    def __init__(self, folder: Path, purge_from: int | None) -> None:
        self.protos, record_writer = _protos()
        folder.mkdir(parents=True, exist_ok=True)
        names = [name.split(".") for name in os.listdir(folder) if name.startswith("events.out.tfevents.")]
        second = max([int(time.time()), *(int(words[3]) + 1 for words in names if words[3].isdigit())])
        self.path = folder / f"events.out.tfevents.{second:010d}.{host_name()}.{os.getpid()}.0"
        self.file = open(self.path, "xb", buffering=0)  # noqa: SIM115 - closed by TensorBoard.__exit__
        self.size = 0
        self.records = record_writer(self)
        try:
            self.add(file_version="brain.Event:2")
            if purge_from is not None:
                self.add(step=purge_from, session_log={"status": self.protos.SessionLog.START})
        except OSError:
            self.file.close()
            with suppress(OSError):
                self.path.unlink()
            raise

    def add(self, **fields: Any) -> None:
        self.records.write(self.protos.Event(wall_time=time.time(), **fields).SerializeToString())

    def write(self, record: bytes) -> None:
        """For the RecordWriter, with one whole record."""
        if self.file.write(record) == len(record):
            self.size += len(record)
            return
        # A disk with room for a part of the record takes that part, and behind it nothing could be read.
        self.file.truncate(self.size)
        self.file.seek(self.size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class TensorBoard:
    """A sink, for rank 0. UsageError without the package; PermissionDenied, StorageError if `folder` can't be made.

    `before`: as `Opened.places` has it. A log that can't be written is not a reason to lose training: `warn` hears of the first failure,
    and later events are still tried.
    """

    def __init__(self, folder: Path, before: Mapping[str, int], warn: Callable[[str], None]) -> None:
        _protos()
        self.folder, self.before, self.warn, self._warned = folder, before, warn, False
        self.files: dict[str, _EventFile] = {}
        self.restarts: dict[str, int] = {}
        with writing(folder, "check the disk, or give another output folder with --out"):
            folder.mkdir(exist_ok=True)

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files.values():
            file.file.close()

    def __call__(self, event: Event) -> None:
        match event:
            case StageStarted():
                self._restart(event.stage, self.before[event.stage] + event.iter + 1)
            case Iterated():
                sent = {"sent_bytes": float(event.sent_bytes)} if event.sent_bytes else {}
                self._write(event.stage, event.iter, "train", figures_of(event) | sent)
            case Tested() | TestedBeside():
                group = "test_ema" if event.ema else "test"
                group += f"_{event.val}" if isinstance(event, TestedBeside) else ""
                self._write(event.stage, event.iter, group, figures_of(event))
            case EnsembleTested():
                self._restart(event.name, 0)  # without the point of an earlier evaluation
                self._write(event.name, 0, "test", figures_of(event))

    def _restart(self, run: str, step: int) -> None:
        """Points of earlier lives are void from `step` on: a new file says so."""
        if run in self.files:
            self.files.pop(run).file.close()
        self.restarts[run] = step

    def _write(self, run: str, iter: int, group: str, values: Mapping[str, float]) -> None:
        try:
            if run not in self.files:
                self.files[run] = _EventFile(self.folder / run, self.restarts.get(run))
            tagged = [{"tag": f"{group}/{name}", "simple_value": value} for name, value in values.items()]
            self.files[run].add(step=self.before[run] + iter, summary={"value": tagged})
        except OSError as error:
            if not self._warned:
                self._warned = True
                why = error.strerror or str(error)
                self.warn(f"warning: {self.folder} can't be written: {why}; training goes on without its new points")
