"""Goal: who only reads the nodes of a store knows them through its failures, and writes nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kvstore.cluster import watched
from kvstore.cluster.records import NodeRecord, write_record
from kvstore.cluster.watched import WatchedMembership
from kvstore.testing.stores import MemoryRecords, MemoryStore
from tests.loops import eventually, in_loop

A, B = (
    NodeRecord(name=name, boot=name.encode() * 16, endpoint=f"10.0.0.{number}:7400")
    for number, name in enumerate("ab", 1)
)
LEASE_S = 0.5


@asynccontextmanager
async def watching(
    records: MemoryRecords, changed: Callable[[], None] = lambda: None
) -> AsyncIterator[WatchedMembership]:
    membership = WatchedMembership(MemoryStore(records), changed)
    running = asyncio.create_task(membership.run())
    try:
        yield membership
    finally:
        running.cancel()
        await asyncio.wait([running])


def store(lease_s: float = 60.0) -> MemoryRecords:
    """The records of ``a`` and ``b`` in a store, which do not end."""
    records = MemoryRecords(lease_s, lambda: 0.0)
    for record in (A, B):
        records.put(record.name, write_record(record))
    return records


@in_loop
async def test_nodes_are_known_as_they_come_and_go_and_nothing_is_written() -> None:
    records, changes = store(), []
    async with watching(records, lambda: changes.append(1)) as membership:
        await eventually(lambda: membership.nodes == {"a": A, "b": B})
        assert membership.standing.state == "current"
        before = dict(records.records())
        records.delete("a")
        await eventually(lambda: membership.nodes == {"b": B})
        records.put("c", b"garbage")
        await eventually(lambda: membership.standing.unreadable == 1)
        assert membership.nodes == {"b": B}
        assert len(changes) == 3
    assert records.common == b"", "no settings"
    assert records.records() == {"b": before["b"], "c": b"garbage"}


@in_loop
async def test_nodes_stay_while_the_store_is_away_and_go_if_they_do_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(watched, "monotonic", lambda: now_s[0])
    records = MemoryRecords(LEASE_S, lambda: 0.0)
    for record in (A, B):
        records.put(record.name, write_record(record))
    async with watching(records) as membership:
        await eventually(lambda: len(membership.nodes) == 2)
        records.away = True
        await eventually(lambda: membership.standing.state == "away")
        assert "away" in membership.standing.why
        records.empty()
        records.put("b", write_record(B))
        records.away = False
        await eventually(lambda: membership.standing.state == "current")
        assert membership.nodes == {"a": A, "b": B}, "a has the time of a lease"
        now_s[0] = LEASE_S
        await eventually(lambda: membership.nodes == {"b": B})


@pytest.mark.parametrize(("refuses", "stopped"), [("login", False), ("", True)])
@in_loop
async def test_a_store_that_refuses_the_login_or_is_stopped_is_away(
    refuses: str, stopped: bool
) -> None:
    records = store(LEASE_S)
    async with watching(records) as membership:
        await eventually(lambda: membership.standing.state == "current")
        records.refuses, records.stopped = refuses, stopped
        await eventually(lambda: membership.standing.state == "away")
        assert (membership.standing.field, len(membership.nodes)) == (refuses, 2)


class SilentStore(MemoryStore):
    """A store whose watch says nothing when it stops, as that of etcd."""

    async def watch(self) -> AsyncIterator[dict[str, bytes]]:  # type: ignore[override]
        yield dict(self._shared.shown())
        await asyncio.Event().wait()


@in_loop
async def test_a_stopped_store_whose_watch_is_silent_is_noticed() -> None:
    records = store(LEASE_S)
    membership = WatchedMembership(SilentStore(records), lambda: None)
    running = asyncio.create_task(membership.run())
    await eventually(lambda: membership.standing.state == "current")
    records.away = True
    await eventually(lambda: membership.standing.state == "away")
    assert len(membership.nodes) == 2
    running.cancel()
    await asyncio.wait([running])
