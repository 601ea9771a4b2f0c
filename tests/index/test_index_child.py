"""Goal: the index process ends without an error when its other end does not read any more."""

import asyncio
import os
import socket
from collections.abc import Callable

from kvstore.index import child
from kvstore.index.control import IndexSettings, SourceBounds, StartIndex
from kvstore.index.framing import framed
from kvstore.index.layout import TableLayout
from kvstore.index.memory import TableMemory
from kvstore.index.writer import SETS_MAX
from tests.loops import WAIT_S, in_loop

SETTINGS = IndexSettings(4096, SourceBounds(replay_s=5.0, verify_s=0.2, foreign_blocks=1000))


class Talker:
    """A companion that has more to tell than anybody reads."""

    def __init__(self) -> None:
        self.is_given_up = False

    async def run(self, tell: Callable[[bytes], None]) -> None:
        tell(bytes(2 * child._UNREAD_BYTES_MAX))  # the socket has room for some of it
        tell(b"which gives the reader up")
        self.is_given_up = True
        await asyncio.Event().wait()

    def hear(self, body: bytes) -> None:
        raise AssertionError(body)


@in_loop
async def test_an_index_that_has_given_its_reader_up_reports_no_more(monkeypatch):
    sleep = asyncio.sleep

    async def two_turns(delay: float) -> None:
        """In the first one the connection is closed, and in the second one the reader wakes."""
        await sleep(delay if delay != child._REPORT_S else 0)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", two_turns)
    memory = TableMemory.create(TableLayout(SETTINGS.entries_max, SETS_MAX).total_bytes)
    given = os.dup(memory.fd)  # the process keeps it until its end
    ours, theirs = socket.socketpair()
    talker = Talker()
    with ours, theirs:
        ours.sendall(framed(StartIndex(SETTINGS)))
        try:
            async with asyncio.timeout(WAIT_S):
                await child._serve(given, theirs, talker)
        finally:
            os.close(given)
            memory.close()

    assert talker.is_given_up
