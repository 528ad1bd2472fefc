"""One look at the folders for all pages that are open, and none while none is. In one event loop; looking itself has a thread."""

import asyncio
import json
import secrets
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import suppress

from stagerun.drawing.picture import Unit
from stagerun.tools.view import before as planned
from stagerun.tools.view import page
from stagerun.tools.view.inotify import Inotify
from stagerun.tools.view.looking import Looker
from stagerun.tools.view.sheet import refusal

LOOKS_S = 2.0  # between two looks at a run, and at files that the kernel may say nothing of
SETTLED_S = 0.03  # an editor may empty a file, fill it and rename it
RESTLESS = 5  # times that much is waited for quiet: a log in the same folder may be written to all the time
SHARE = 0.004  # of a core, that whole looks at runs take at most, and glances too
FIRST_S = 0.25  # for which logs are read before the page is shown; the rest follows
LATER_S = 5.0  # for which they are read at each of the looks that follow: rendering a hundred runs takes one
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
        self._pages = self._narrow = 0
        self._watcher: asyncio.Task[None] | None = None
        self._looked = self._glanced = 0.0  # when, by the clock that only rises
        self._cost = {True: 0.0, False: 0.0}  # seconds of processor time of the last whole look, and of the last glance

    @property
    def version(self) -> str:
        return f"{self._boot}-{self._version}"

    @property
    def sections(self) -> dict[str, str]:
        return {id: html for id, (_, html) in self._sections.items()}

    async def look(self, whole: bool = True) -> None:
        """Reads what has changed, and renders it; else only what costs little. Who asked may go away meanwhile: the thread can't be
        stopped, and until it is done no other may look."""
        await asyncio.shield(self._look(whole))

    async def _look(self, whole: bool) -> None:
        async with self._turn:
            found, self._cost[whole] = await asyncio.to_thread(self._rendered, whole)
        changed = {id: html for id, html in found.items() if self._sections.get(id, (0, None))[1] != html}
        if changed:
            self._version += 1
            self._sections |= {id: (self._version, html) for id, html in changed.items()}
            self._tell()

    def _tell(self) -> None:
        for news in self._news:
            news.set()

    def _rendered(self, whole: bool) -> tuple[dict[str, str], float]:
        """And the seconds of processor time that it took."""
        first, began, now = not self._sections, time.thread_time(), time.time()
        try:
            if whole:
                self.looker.look(LATER_S if self._sections else FIRST_S)
                found = page.sections(self.looker, self.unit, now, bool(self._narrow))
            else:
                self.looker.glance()
                found = page.at_a_glance(self.looker, now)
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
        found = planned.meant(before, stage) if before is not None else None
        if before is None or found is None:
            return None
        refused = refusal(self.looker.asked, before, found[1])
        return planned.detail(*found) + planned.images(found[1], refused)

    # -- pages

    async def events(self, since: str, narrow: bool = False) -> AsyncIterator[bytes]:
        """Server-sent events: all sections that have changed after the version `since`, as they change. `narrow`: for a narrow page."""
        boot, _, number = since.partition("-")
        seen = int(number) if boot == self._boot and number.isascii() and number.isdigit() else -1
        self._pages += 1
        self._narrow += narrow
        self._news.add(news := asyncio.Event())
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        try:
            yield b"retry: 2000\n\n"
            if narrow and page.NARROW_PICTURE not in self._sections:
                await self.look()
            while not self.closed:
                news.clear()
                new = self._after(seen, narrow)
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
            self._narrow -= narrow
            if not self._narrow:
                self._sections.pop(page.NARROW_PICTURE, None)  # which no one draws any more
            if not self._pages and self._watcher is not None:
                self._watcher.cancel()
                self._watcher = None

    def _after(self, version: int, narrow: bool) -> dict[str, str]:
        new = {id: html for id, (at, html) in self._sections.items() if at > version}
        own = new.pop(page.NARROW_PICTURE, None)
        if narrow:
            new.pop("picture", None)
        return new | {"picture": own} if narrow and own is not None else new

    async def close(self) -> None:
        self.closed = True
        if self._watcher is not None:
            self._watcher.cancel()
        self._tell()

    # -- watching

    async def _watch(self) -> None:
        """Looks again when a schedule was saved, or a run has gone on."""
        heard, kernel, loop = asyncio.Event(), Inotify(), asyncio.get_running_loop()

        def hears() -> None:
            kernel.drain()
            heard.set()

        if kernel.fileno() >= 0:
            loop.add_reader(kernel.fileno(), hears)
        try:
            await self._watch_for(heard, kernel)
        finally:
            if kernel.fileno() >= 0:
                loop.remove_reader(kernel.fileno())
            kernel.close()

    async def _watch_for(self, heard: asyncio.Event, kernel: Inotify) -> None:
        self._looked = self._glanced = time.monotonic()
        while True:
            try:
                for folder in self.looker.watched:
                    kernel.add(folder)
                if not self.looker.behind:
                    with suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(heard.wait(), LOOKS_S)
                for _ in range(RESTLESS):
                    if not heard.is_set():
                        break
                    heard.clear()
                    await asyncio.sleep(SETTLED_S)
                await self._look_where_due()
            except Exception:  # the next look may succeed, and a page that nothing follows would not say so
                traceback.print_exc()
                await asyncio.sleep(LOOKS_S)

    async def _look_where_due(self) -> None:
        now, alive = time.monotonic(), self.looker.alive
        # What changes in the folder of a run that doesn't go on is rare, and worth a look: it may be starting.
        due = now - self._looked >= (max(LOOKS_S, self._cost[True] / SHARE) if alive else LOOKS_S)
        if self.looker.behind or self.looker.edited() or (due and self.looker.moved()):
            await self._look_whole()
        elif now - self._glanced >= (max(LOOKS_S, self._cost[False] / SHARE) if alive else AGES_S):
            await self.look(whole=False)
            self._glanced = time.monotonic()
            if alive and not self.looker.alive:  # it has ended, and has results
                await self._look_whole()

    async def _look_whole(self) -> None:
        await self.look()
        self._looked = self._glanced = time.monotonic()
