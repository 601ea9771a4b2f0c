"""Goal: a durable put waits for room on disk while it is being made, and no longer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.node.awaited import RoomFor
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.node.waiting import Waiter, WaitingRoom
from kvstore.protocol import wire
from kvstore.protocol.errors import TierUnavailable
from kvstore.protocol.page import CanonicalLayout, PrefixKeys, ShardSpec, SpaceIdentity, page_keys
from kvstore.state.choice.admission import Admission
from kvstore.state.disk import persists
from kvstore.state.disk.jobs import (
    DiskDrop,
    DiskJob,
    DiskRules,
    DiskSeal,
    DiskSync,
    DiskWrite,
    Durable,
    SyncPolicy,
    WritePolicy,
)
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.pages import DiskPages
from kvstore.state.table.invariants import check
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.places import record_bytes
from kvstore.state.tree.sessions import Peer
from kvstore.state.tree.slots import SlotTable

MS = 1_000_000
IDENTITY = SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=64)
SHARD = ShardSpec(layout=CanonicalLayout(512), layers=(0, 1), heads=(0, 1))
PAGE_BYTES = SHARD.page_bytes(IDENTITY)
WAIT_MS = 1000


class DurableWorld:
    """A node whose log is nearly full of pages that were evicted long ago."""

    def __init__(self, segments: int = 6, in_flight_pages: int = 1 << 20) -> None:
        tokens = (bytes([number]) * 16 for number in range(1, 9))
        limits = NodeLimits(1 << 30, 1000)
        self.node = Node("n", b"b" * 16, SlotTable(1 << 20, 4), limits, lambda: next(tokens))
        in_flight = in_flight_pages * record_bytes(PAGE_BYTES)
        rules = DiskRules(WritePolicy.BACK, SyncPolicy.ALWAYS, 1, in_flight, retry_ns=1000 * MS)
        self.disk = self.node.pages.residents.disk = DiskPages(
            self.node.pages.residents,
            SegmentLog(segments, 4 * PAGE_BYTES),
            Admission("all", 0, segments * 4 * PAGE_BYTES),
            rules,
        )
        self.now_ns = 1
        self.node.connected(1, Peer(1, 1))
        self.ask(wire.Hello(1, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, "engine"))
        self.ask(wire.OpenSpace(2, IDENTITY, [SHARD]))
        self._puts = 0

    def store(self, prompt: int, pages: int = 1) -> PrefixKeys:
        """Put the pages of a prompt of its own."""
        tokens = np.arange(pages * 64, dtype=np.uint32) + prompt * 1000
        keys = page_keys(tokens, 64)
        self._puts += 1
        self.ask(wire.BeginPut(3, self._puts, 0, 0, keys.packed, keys.parent))
        [committed] = self.ask(wire.CommitPut(4, self._puts, b"d" * 16 * pages))
        assert set(committed.statuses) == {PageStatus.STORED}
        return keys

    def persist(self, keys: PrefixKeys) -> Sequence[wire.Answer]:
        """Answers that came at once."""
        return self.ask(wire.Persist(5, 0, 0, keys.packed, WAIT_MS))

    def writes(self) -> int:
        """Writes that have begun, and not ended."""
        return sum(isinstance(job, DiskWrite) for job in self.disk.jobs)

    def end(self, *kinds: type[DiskJob], error: Exception | None = None) -> list[wire.Answer]:
        """End all jobs of these kinds, and those that they bring about; the answers."""
        while jobs := [job for job in self.disk.jobs if isinstance(job, kinds)]:
            for job in jobs:
                self.disk.jobs.remove(job)
                self.node.disk_completed(job.job, error, self.now_ns)
        check(self.node.pages)
        return self.answers()

    def answers(self) -> list[wire.Answer]:
        found = [answer for _, answer in self.node.outbox]
        self.node.outbox.clear()
        return found

    def fill(self) -> None:
        """Persist prompts until one has to wait for a segment; no segment is sealed meanwhile."""
        for prompt in range(100):
            if self.persist(self.store(prompt, 2)) == [] and not self.end(DiskWrite, DiskSync):
                return
        raise AssertionError("the log never filled")

    def ask(self, message: wire.Request) -> Sequence[wire.Answer]:
        self.node.receive(1, message, self.now_ns)
        return self.answers()


def test_a_durable_put_waits_for_a_segment_that_is_being_reclaimed():
    world = DurableWorld()
    world.fill()

    assert world.end(DiskSeal, DiskSync, DiskDrop) == [], "it is being written"
    assert world.end(DiskWrite) == []
    assert world.end(DiskSync) == [wire.Persisted(5)]


def test_what_waits_for_jobs_goes_on_after_the_last_of_those_that_end_in_one_turn():
    world = DurableWorld()
    first, second = world.store(0), world.store(1)
    assert world.persist(first) == world.persist(second) == []
    writes = list(world.disk.jobs)
    world.disk.jobs.clear()

    world.node.disk_completed(writes[0].job, None, world.now_ns, last=False)
    assert not world.disk.jobs
    world.node.disk_completed(writes[1].job, None, world.now_ns)

    assert [type(job) for job in world.disk.jobs] == [DiskSync], "one for both"
    assert world.end(DiskSync) == [wire.Persisted(5)] * 2


def test_a_durable_put_for_which_no_room_comes_is_refused_when_its_time_is_up():
    world = DurableWorld()
    world.fill()

    world.now_ns += WAIT_MS * MS
    world.node.advance(world.now_ns)
    [answer] = world.answers()
    assert isinstance(answer, wire.Failure)
    assert (answer.id, answer.code) == (5, "capacity")
    assert world.node.pages.counts["refused_capacity"] == 1
    assert not len(world.node.waiting)


def test_a_report_about_a_page_that_has_gone_to_disk_meanwhile_changes_nothing():
    """A lease can run out while its reader digests; then the slot it reports is another's."""
    world = DurableWorld()
    keys = world.store(1)
    world.persist(keys)
    assert world.end(DiskWrite, DiskSync) == [wire.Persisted(5)]
    [space] = world.node.pages.spaces
    assert world.node.pages.residents.release_memory(space.nodes[keys[0]])

    assert world.ask(wire.Corrupt(0, 0, keys[0], 1)) == []

    assert world.ask(wire.Lookup(6, 0, [0], keys.packed, 0)) == [wire.Found(6, 1, 0, 1)]


def test_a_durable_put_that_may_begin_only_when_its_time_is_up_is_not_told_that_it_is_safe():
    """Writing was off for a while, until the very moment at which its caller gives up."""
    world = DurableWorld()
    world.persist(world.store(1))
    world.end(DiskWrite, error=TierUnavailable("the disk hangs"))
    keys = world.store(2)
    assert world.disk.degraded
    assert world.disk.busy, "the failed segment is being given back"
    assert world.persist(keys) == [], "it waits for room"

    world.now_ns += WAIT_MS * MS
    world.node.advance(world.now_ns)

    [answer] = world.answers()
    assert isinstance(answer, wire.Failure)
    assert (answer.id, answer.code) == (5, "capacity")
    assert not any(isinstance(job, DiskWrite) for job in world.disk.jobs), "nobody waits for it"


def test_of_all_that_wait_for_room_one_tries_in_vain_for_each_job_that_ends(monkeypatch):
    """An attempt costs milliseconds, and as many jobs may end a second as the disk has writes."""
    world = DurableWorld()
    world.fill()
    waiting = [world.store(1000 + prompt) for prompt in range(8)]
    assert [world.persist(keys) for keys in waiting] == [[]] * 8
    attempts, ended, answers = 0, 0, list[wire.Answer]()
    make_durable = world.disk.make_durable

    def counted(*arguments: Any) -> Durable:
        nonlocal attempts
        attempts += 1
        return make_durable(*arguments)

    monkeypatch.setattr(world.disk, "make_durable", counted)
    while jobs := list(world.disk.jobs):
        for job in jobs:
            ended += 1
            world.disk.jobs.remove(job)
            world.node.disk_completed(job.job, None, world.now_ns)
        answers += world.answers()
    assert attempts <= ended

    for _ in range(20):  # time goes on when nothing ends any more
        world.node.advance(world.now_ns)
        answers += world.end(DiskJob)
    assert answers == [wire.Persisted(5)] * 9
    assert not len(world.node.waiting)


def test_a_durable_put_of_the_last_page_of_a_long_prompt_is_told_when_all_before_it_are_synced():
    world = DurableWorld(segments=40, in_flight_pages=4)
    keys = world.store(1, 30)
    assert world.persist(keys[-1:]) == []
    assert world.writes() == 2

    assert world.end(DiskWrite, DiskSeal) == []
    assert world.end(DiskJob) == [wire.Persisted(5)]
    [space] = world.node.pages.spaces
    assert all(node.on_disk for node in space.nodes.values())


def test_a_long_durable_put_that_is_not_done_in_time_is_refused_and_goes_no_further():
    world = DurableWorld(segments=40, in_flight_pages=4)
    keys = world.store(1, 30)
    world.persist(keys[-1:])

    world.now_ns += WAIT_MS * MS
    world.node.advance(world.now_ns)
    [answer] = world.answers()
    assert isinstance(answer, wire.Failure)
    assert (answer.id, answer.code) == (5, "transfer_timeout")

    assert world.end(DiskJob) == []
    assert world.node.pages.slots.stats().pinned_bytes == 0
    [space] = world.node.pages.spaces
    assert sum(node.on_disk for node in space.nodes.values()) == 2, "what had begun"


def test_a_long_durable_put_that_had_to_wait_first_goes_no_further_than_its_own_time(monkeypatch):
    monkeypatch.setattr(persists, "DURABLES_MAX", 1)
    world = DurableWorld(segments=40, in_flight_pages=4)
    world.persist(world.store(1))
    assert world.persist(world.store(2, 30)[-1:]) == []
    world.now_ns += WAIT_MS // 2 * MS
    world.node.advance(world.now_ns)
    monkeypatch.setattr(persists, "DURABLES_MAX", 2)
    [write] = world.disk.jobs
    world.disk.jobs.clear()
    world.node.disk_completed(write.job, None, world.now_ns)
    assert world.writes() == 2, "the second one has begun"

    world.now_ns += WAIT_MS // 2 * MS
    world.node.advance(world.now_ns)
    assert all(isinstance(answer, wire.Failure) for answer in world.answers())
    assert world.end(DiskJob) == []
    [space] = world.node.pages.spaces
    assert sum(node.on_disk for node in space.nodes.values()) == 1 + 2


def test_a_long_durable_put_whose_connection_ends_keeps_no_page_in_memory():
    world = DurableWorld(segments=40, in_flight_pages=4)
    world.persist(world.store(1, 30)[-1:])

    world.node.disconnected(1, world.now_ns, ended=True)

    begun = world.writes()
    assert world.end(DiskJob) == []
    assert world.node.pages.slots.stats().pinned_bytes == 0
    assert not world.node.processes
    [space] = world.node.pages.spaces
    assert sum(node.on_disk for node in space.nodes.values()) == begun < 30


def test_many_long_durable_puts_in_one_turn_begin_no_more_pages_than_one_step(monkeypatch):
    monkeypatch.setattr(persists, "PAGES_STEP", 4)
    world = DurableWorld(segments=100)
    prompts = [world.store(prompt, 20) for prompt in range(3)]
    for keys in prompts:
        world.persist(keys[-1:])
    assert world.writes() == 4
    assert world.node.unfinished, "nothing else would wake it"

    answers = list[wire.Answer]()
    for _ in range(100):
        world.node.go_on(world.now_ns)
        world.disk.go_on()
        answers += world.end(DiskJob)
    assert answers == [wire.Persisted(5)] * 3


def test_only_of_what_somebody_waits_for_is_news_looked_for():
    room = WaitingRoom()
    things = RoomFor("put", "red", 1, b"a", 0), "page"
    for_room, for_page = (Waiter(1, b"a", None, 32, 0, 1 << 60, at) for at in things)
    assert not room.awaits_events
    room.add(for_room)
    assert not room.awaits_events
    room.add(for_page)
    assert room.awaits_events

    room.wake("page")
    assert not room.awaits_events, "it is ready, and waits for its turn"
