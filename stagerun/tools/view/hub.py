"""One look at the folders for all pages that are open, and none while none is. In one event loop; looking itself has a thread."""

import asyncio
import json
import secrets
import time
import traceback
from collections.abc import AsyncIterator

from stagerun.drawing.picture import Unit
from stagerun.tools.view import before as planned
from stagerun.tools.view import page
from stagerun.tools.view.looking import Looker

POLL_S = 0.1  # between two looks at whether a schedule was saved
SETTLED_S = 0.03  # an editor may empty a file, fill it and rename it
LOOKS_S = 2.0  # between two looks at a run
SHARE = 0.008  # of a core, that looks at runs take at most
ALIVE_S = 30.0  # between two lines that only keep a connection open
AGES_S = 60.0  # between two looks at the clock, for `3 min ago`


class Hub:
    """`sections` are as of `version`, each with the version in which it last changed."""

    def __init__(self, looker: Looker, unit: Unit) -> None:
        self.looker, self.unit = looker, unit
        self.closed = False
        self._sections: dict[str, tuple[int, str]] = {}
        self._version, self._boot = 0, secrets.token_hex(4)
        # One of each open page. A Condition would not do: who waits for it may be cancelled twice, and then its lock is another's.
        self._news: set[asyncio.Event] = set()
        self._turn = asyncio.Lock()  # one look at a time
        self._pages = 0
        self._watcher: asyncio.Task[None] | None = None
        self._cost = 0.0  # seconds of processor time of the last look

    @property
    def version(self) -> str:
        return f"{self._boot}-{self._version}"

    @property
    def sections(self) -> dict[str, str]:
        return {id: html for id, (_, html) in self._sections.items()}

    async def look(self) -> None:
        """Reads what has changed, and renders it. Who asked may go away meanwhile: the thread can't be stopped, and until it is done no
        other may look."""
        await asyncio.shield(self._look())

    async def _look(self) -> None:
        async with self._turn:
            found, self._cost = await asyncio.to_thread(self._rendered)
        changed = {id: html for id, html in found.items() if self._sections.get(id, (0, None))[1] != html}
        if changed:
            self._version += 1
            self._sections |= {id: (self._version, html) for id, html in changed.items()}
            self._tell()

    def _tell(self) -> None:
        for news in self._news:
            news.set()

    def _rendered(self) -> tuple[dict[str, str], float]:
        """And the seconds of processor time that it took."""
        first, began = not self._sections, time.thread_time()
        try:
            self.looker.look()
            found = page.sections(self.looker, self.unit, time.time())
        except Exception as error:  # the page goes on, and says it
            traceback.print_exc()
            found = {"mistakes": page.bug(error)}
        # The first look reads all that there is, and imports what it needs: no later one costs as much.
        return found, 0.0 if first else time.thread_time() - began

    async def seen(self) -> Looker:
        """Once it has looked."""
        if not self._sections:
            await self.look()
        return self.looker

    def detail(self, stage: str) -> str | None:
        """None where there is no such stage."""
        before = self.looker.before
        return planned.detail(before, stage) if before is not None and stage in before.stages else None

    # -- pages

    async def events(self, since: str) -> AsyncIterator[bytes]:
        """Server-sent events: all sections that have changed after the version `since`, as they change."""
        boot, _, number = since.partition("-")
        seen = int(number) if boot == self._boot and number.isascii() and number.isdigit() else -1
        self._pages += 1
        self._news.add(news := asyncio.Event())
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        try:
            yield b"retry: 2000\n\n"
            while not self.closed:
                news.clear()
                new = {id: html for id, (at, html) in self._sections.items() if at > seen}
                seen = self._version
                if new:
                    yield f"event: sections\nid: {self.version}\ndata: {json.dumps(new)}\n\n".encode()
                    continue
                try:
                    await asyncio.wait_for(news.wait(), ALIVE_S)
                except asyncio.TimeoutError:
                    yield b":\n\n"
        finally:
            self._news.discard(news)
            self._pages -= 1
            if not self._pages and self._watcher is not None:
                self._watcher.cancel()
                self._watcher = None

    async def close(self) -> None:
        self.closed = True
        if self._watcher is not None:
            self._watcher.cancel()
        self._tell()

    # -- watching

    async def _watch(self) -> None:
        """Looks again when a schedule was saved, or a run has gone on."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            try:
                waited = time.monotonic() - looked
                due = waited >= max(LOOKS_S, self._cost / SHARE)
                if edited := await asyncio.to_thread(self.looker.edited):
                    await asyncio.sleep(SETTLED_S)
                if edited or (due and (waited > AGES_S or await asyncio.to_thread(self.looker.moved))):
                    await self.look()
                    looked = time.monotonic()
            except Exception:  # the next look may succeed, and a page that nothing follows would not say so
                traceback.print_exc()
                await asyncio.sleep(LOOKS_S)
