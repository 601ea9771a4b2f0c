"""Goal: a bug that one store brings to light costs the index process nothing else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvstore.cluster import child, sharing
from kvstore.cluster.access import StoreServers
from kvstore.cluster.child import BUG, ClusterCompanion
from kvstore.cluster.messages import (
    BeginCluster,
    ChildSettings,
    DirectoryReport,
    DirectorySettings,
    Join,
    NodesFound,
    StorePlace,
    encode_message,
    message_from_child,
)
from kvstore.cluster.records import SCHEME, NodeRecord
from kvstore.index.credentials import PeerCredentials
from kvstore.testing.stores import MemoryRecords, MemoryStore
from tests.loops import eventually, in_loop

SERVERS = StoreServers(("127.0.0.1:1",))
A = NodeRecord(name="a", boot=b"a" * 16, endpoint="127.0.0.1:7001")

SETTINGS = ChildSettings(
    credentials=PeerCredentials("blue", "a", SCHEME), membership=StorePlace("redis", SERVERS),
    directory=DirectorySettings(servers=SERVERS, boot=b"a" * 16, endpoint=A.endpoint),
)  # fmt: skip


class Heard:
    """What the companion told the node."""

    def __init__(self) -> None:
        self.report = DirectoryReport()
        self.states: list[str] = []

    def tell(self, body: bytes) -> None:
        message = message_from_child(body)
        if isinstance(message, DirectoryReport):
            self.report = message
        elif isinstance(message, NodesFound):
            self.states.append(message.standing.state)


@asynccontextmanager
async def companion(store: MemoryStore) -> AsyncIterator[Heard]:
    heard, made = Heard(), ClusterCompanion(lambda *_: store)
    running = asyncio.create_task(made.run(heard.tell))
    for message in (BeginCluster(SETTINGS), Join(A)):
        made.hear(encode_message(message))
    try:
        yield heard
    finally:
        running.cancel()
        ended = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(ended[0], asyncio.CancelledError)


class Directory:
    """A directory that has a bug in its first life."""

    lives = 0

    def __init__(self, settings: Any, shown: Any, tell: Any) -> None:
        self.tell = tell

    def ask(self, question: Any) -> None:
        pass

    async def run(self) -> None:
        type(self).lives += 1
        if self.lives == 1:
            raise ValueError("not enough values to unpack")
        self.tell(DirectoryReport(current=True, faults={"away": 1}))
        await asyncio.Event().wait()


class WrongStore(MemoryStore):
    """A store that has a bug in its first life."""

    wrong = True

    async def open(self) -> None:
        if self.wrong:
            self.wrong = False
            raise IndexError("list index out of range")
        await super().open()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "AGAIN_S", 0.01)
    monkeypatch.setattr(Directory, "lives", 0)
    monkeypatch.setattr(sharing, "SharedDirectory", Directory)


@in_loop
async def test_a_bug_in_the_directory_is_counted_and_the_membership_goes_on() -> None:
    async with companion(MemoryStore(MemoryRecords(60.0))) as heard:
        await eventually(lambda: heard.report.trouble == BUG)
        assert not heard.report.current
        await eventually(lambda: heard.report.current)
        assert heard.report.faults == {"away": 1, BUG: 1}
        await eventually(lambda: heard.states[-1:] == ["joined"])
        assert "away" not in heard.states


@in_loop
async def test_a_bug_in_the_membership_is_told_and_the_directory_goes_on() -> None:
    async with companion(WrongStore(MemoryRecords(60.0))) as heard:
        await eventually(lambda: "away" in heard.states)
        await eventually(lambda: heard.states[-1] == "joined")
        await eventually(lambda: heard.report.current)
        assert Directory.lives == 2


@in_loop
async def test_an_assertion_that_failed_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(_: Directory) -> None:
        raise AssertionError

    monkeypatch.setattr(Directory, "run", run)
    made = ClusterCompanion(lambda *_: MemoryStore(MemoryRecords(60.0)))
    made.hear(encode_message(BeginCluster(SETTINGS)))
    with pytest.raises(BaseExceptionGroup) as ended:
        async with asyncio.timeout(10):
            await made.run(Heard().tell)
    assert ended.group_contains(AssertionError)
