"""Runs the index in a separate process: starts, watches and restarts it.

The process that needs an index creates the memory of its table and a socket pair, and starts
``python -m kvstore.index.child`` with both, or a program with additional tasks. It reads the table
directly. The index process ends when the socket pair is closed, so it never outlives its parent;
its memory has no name, so nothing is left behind.

If the process ends, or shows no sign of life for :data:`HUNG_S`, another one is started with an
empty table and follows the same sources. The old table is read for :data:`STALE_S` more, or until
the new one has caught up; then nothing is known until it has.
"""

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from kvstore.index.control import (
    Aside,
    Command,
    Expect,
    Follow,
    IndexReport,
    IndexSettings,
    Report,
    Source,
    StartIndex,
    Unexpect,
    Unfollow,
)
from kvstore.index.face import PresentIndex
from kvstore.index.framing import framed, next_report
from kvstore.index.layout import TableLayout
from kvstore.index.memory import TableMemory
from kvstore.index.reading import UnreadableError
from kvstore.index.table import IndexReader
from kvstore.index.writer import SETS_MAX
from kvstore.process.faults import Faults

_log = logging.getLogger(__name__)

STALE_S: Final = 5.0
"""For how long a table is read whose writer shows no sign of life."""
HUNG_S: Final = 10.0
"""Without a sign of life for this long, the process is killed and another one started."""
_LAST_S: Final = 2.0
"""Then one more is waited for: perhaps this process, or the machine, stood still."""
_START_S: Final = 30.0
"""Maximum time from the start of the process to its first report."""
_END_S: Final = 2.0
"""Maximum time for the process to end after its socket was closed, and again after it was killed.
"""
_PAUSE_S_MIN: Final = 0.1
_PAUSE_S_MAX: Final = 5.0
_BACKLOG_BYTES: Final = 16 << 20
"""Commands that the process has not read; further expectations are left out and counted."""


class IndexProcess:
    """An index in a process of its own, and its table.

    Args:
        settings: settings of the index.
        program: the module that the process runs.

    Attributes:
        restarts: how often the process was started again.
        faults: ends of the process, and expectations that were left out.
        began: called after each start of the process, before its first message.
        heard: called with the body of each aside of the process; an unreadable one
            (:class:`UnreadableError`) ends the process.
    """

    def __init__(self, settings: IndexSettings, program: str = "kvstore.index.child") -> None:
        self.restarts = 0
        self.began: Callable[[], None] = lambda: None
        self.heard: Callable[[bytes], None] = lambda _: None
        self._program = program
        self._report = IndexReport(entries_max=settings.entries_max)
        self.faults = Faults(_log, "the index process")
        self._settings = settings
        self._sources: dict[str, Source] = {}
        self._life: _Life | None = None
        self._former: PresentIndex | None = None
        self._to_catch_up: set[str] = set()

    @property
    def fault_counts(self) -> Mapping[str, int]:
        """Ends of the process, and expectations that were left out."""
        return self.faults.counts

    def present(self) -> PresentIndex:
        """The table to read now, and the last report about it."""
        former = self._former
        if former is not None:
            assert former.table is not None, "it was remembered with its table"
            if self._to_catch_up and _is_fresh(former.table):
                return former
            self._forget_former()
        life = self._life
        is_read = life is not None and life.begun and _is_fresh(life.table)
        return PresentIndex(life.table if life is not None and is_read else None, self._report)

    def follow(self, source: Source) -> None:
        """Follow a source, in place of the worker's previous one."""
        if self._sources.get(source.worker) != source:
            self._sources[source.worker] = source
            self._send(Follow(source))

    def unfollow(self, worker: str) -> None:
        """Forget a worker, whether it was followed or only expected to have pages."""
        self._sources.pop(worker, None)
        self._to_catch_up.discard(worker)
        self._send(Unfollow(worker))

    def expect(self, expected: Expect, table: IndexReader) -> None:
        """A worker will probably have some pages, whose chain values are of this table.

        Left out, and counted, while the process starts or does not read.
        """
        life = self._life
        if life is None or life.table is not table or not life.reads:
            self.faults.note("backlog", "it starts or does not read: expected pages are left out")
        else:
            life.send(expected)

    def unexpect(self, expected: Expect) -> None:
        """A worker will not have these pages; left out while the process does not read."""
        life = self._life
        if life is not None and life.reads:
            life.send(Unexpect(expected))

    def aside(self, body: bytes) -> None:
        """Send the process a message that does not concern the index; dropped if it has ended."""
        self._send(Aside(body))

    def _send(self, command: Command) -> None:
        if self._life is not None:
            self._life.send(command)

    async def run(self) -> None:
        """Keep one process running until cancelled."""
        pause_s = _PAUSE_S_MIN
        while True:
            started = time.monotonic()
            try:
                await self._live()
            except (OSError, EOFError, UnreadableError) as error:
                self.faults.note(
                    "ended", f"{str(error) or type(error).__name__}; it is started again"
                )
            if time.monotonic() - started > _START_S:
                pause_s = _PAUSE_S_MIN
            self.restarts += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def _live(self) -> None:
        """Start a process and listen to it until it ends.

        Raises:
            OSError: it cannot be started, or shows no sign of life.
            EOFError: it has ended.
            UnreadableError: it said something else than a report.
        """
        life = await _Life.start(self._program, self._settings, self._sources.values())
        self._life = life
        try:
            self.began()
            while True:
                report = await life.next_report(HUNG_S if life.begun else _START_S)
                if isinstance(report, Aside):
                    self.heard(report.body)
                    continue
                self._report = report
                life.begun = True
                self._to_catch_up -= {one.worker for one in self._report.workers if one.current}
        except TimeoutError:
            raise OSError("no sign of life") from None
        except EOFError:
            raise EOFError("it has ended") from None
        finally:
            self._life = None
            if life.begun:
                self._remember(life.table, self._report)
            await life.end()

    def _remember(self, table: IndexReader, report: IndexReport) -> None:
        """Read the table of a process that has ended for some time more."""
        self._former = PresentIndex(table, report)
        known = {one.worker for one in report.workers if one.current}
        self._to_catch_up = known & self._sources.keys()

    def _forget_former(self) -> None:
        self._former = None
        self._to_catch_up = set()


def _is_fresh(table: IndexReader) -> bool:
    return table.age_ns(time.monotonic_ns()) <= STALE_S * 1e9


class _Life:
    """One run of the process.

    Attributes:
        table: its table.
        begun: its first report has arrived.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        table: IndexReader,
    ) -> None:
        self.table = table
        self.begun = False
        self._process = process
        self._reader, self._writer = streams

    @classmethod
    async def start(
        cls, program: str, settings: IndexSettings, sources: Iterable[Source]
    ) -> "_Life":
        """Start a process that follows these sources.

        Raises:
            OSError: it cannot be started.
        """
        memory = TableMemory.create(TableLayout(settings.entries_max, SETS_MAX).total_bytes)
        ours, theirs = socket.socketpair()
        writer: asyncio.StreamWriter | None = None
        try:
            ours.setblocking(False)  # noqa: FBT003
            reader, writer = await asyncio.open_connection(sock=ours)
            # Last: after it, nothing is waited for that could leave the process behind.
            process = await _spawned(program, memory.fd, theirs.fileno())
        except BaseException:
            (ours if writer is None else writer).close()
            raise
        finally:
            theirs.close()
            memory.close()
        life = cls(process, (reader, writer), IndexReader(memory.buffer))
        life.send(StartIndex(settings))
        for source in sources:
            life.send(Follow(source))
        return life

    @property
    def reads(self) -> bool:
        """Whether the process reads its messages, as far as that is known."""
        if self._writer.is_closing():  # it has ended; :meth:`next_report` says so in a moment
            return False
        return self._writer.transport.get_write_buffer_size() <= _BACKLOG_BYTES

    def send(self, command: Command) -> None:
        """Send a command; nothing if the process has ended."""
        if not self._writer.is_closing():  # a closed transport would raise
            self._writer.write(framed(command))

    async def next_report(self, timeout_s: float) -> Report:
        """Wait for the next report.

        Args:
            timeout_s: for how long; and then once more for :data:`_LAST_S`.

        Raises:
            TimeoutError: none came.
            EOFError: it has ended.
            UnreadableError: it said something else.
        """
        reading = asyncio.ensure_future(next_report(self._reader))
        reading.add_done_callback(lambda one: one.cancelled() or one.exception())
        try:
            for limit_s in (timeout_s, _LAST_S):
                if (await asyncio.wait({reading}, timeout=limit_s))[0]:
                    return reading.result()
        finally:
            reading.cancel()
        raise TimeoutError

    async def end(self) -> None:
        """End the process; one that does not even end when it is killed is left to the kernel."""
        self._writer.close()
        try:
            ended = await _has_ended(self._process)
        except asyncio.CancelledError:
            await _kill(self._process)
            raise
        if not ended:
            await _kill(self._process)


async def _spawned(program: str, *descriptors: int) -> asyncio.subprocess.Process:
    """A process that gets these file descriptors; none is left when this is cancelled.

    Raises:
        OSError: it cannot be started.
    """
    begun = asyncio.create_subprocess_exec(
        sys.executable, "-m", program, *map(str, descriptors), pass_fds=descriptors,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    spawning = asyncio.ensure_future(begun)
    try:
        return await asyncio.shield(spawning)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            await _kill(await spawning)
        raise


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    if not await _has_ended(process):
        _log.warning("the index process %d is still running after it was killed", process.pid)


async def _has_ended(process: asyncio.subprocess.Process) -> bool:
    """Wait for the end of the process, but not for long."""
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        return False
    return True
