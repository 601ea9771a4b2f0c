"""Goal: Python's cyclic collector never walks over what a node keeps, and nodes make no cycles."""

import gc
from collections.abc import Callable, Iterator

import pytest

from kvstore.process.collector import SELDOM, YOUNG, YOUNG_ROUNDS, look_seldom, spare_the_old
from kvstore.protocol import wire
from kvstore.protocol.page import page_keys
from kvstore.state.disk.jobs import DiskWrite
from kvstore.state.tree.slots import SLOT_ALIGNMENT, SlotTable
from tests.collected import references
from tests.node.test_protocol import KEYS, MS, Wire
from tests.state.disk.disk_world import IO_ERROR, DiskWorld, flood
from tests.state.world import FULL, STATE, World, chain, drop_below


@pytest.fixture
def spared() -> Iterator[Callable[[], None]]:
    before = gc.get_threshold()
    gc.collect()
    end = spare_the_old()
    yield end
    end()
    assert gc.get_threshold() == before


class Ring:
    """Only the collector can free it."""

    alive = 0

    def __init__(self) -> None:
        self.me = self
        Ring.alive += 1

    def __del__(self) -> None:
        Ring.alive -= 1


@pytest.mark.usefixtures("spared")
def test_only_young_objects_are_looked_at_however_many_are_kept():
    looked: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            looked.append(info["generation"])

    gc.callbacks.append(note)
    try:
        kept = [[] for _ in range(100 * YOUNG * YOUNG_ROUNDS)]
    finally:
        gc.callbacks.remove(note)

    assert len(kept) > 0
    assert set(looked) == {0, 1}


@pytest.mark.usefixtures("spared")
def test_what_is_young_and_in_a_cycle_is_freed():
    Ring()
    kept = [[] for _ in range(2 * YOUNG)]

    assert len(kept) > 0
    assert Ring.alive == 0


def test_who_looks_seldom_frees_cycles_of_every_age() -> None:
    gc.unfreeze()  # what was made before the first test
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.collect()
    end = look_seldom()
    try:
        old = Ring()
        kept = [[] for _ in range(SELDOM)]
        assert Ring.alive == 1
        del old
        gc.collect()
        assert Ring.alive == 0
        Ring()
        kept = [*kept, *([] for _ in range(SELDOM))]
        assert Ring.alive == 0
    finally:
        end()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, frozen)


def test_what_a_page_table_does_leaves_nothing_for_the_collector():
    world = World(extents=3, slots_each=64)
    gc.collect()
    gc.disable()
    try:
        _use(world)
        found = gc.collect()
    finally:
        gc.enable()

    assert found == 0


def test_what_the_disk_side_does_leaves_nothing_for_the_collector():
    world = DiskWorld("back", segments=6, segment_bytes=120 << 10)
    gc.collect()
    gc.disable()
    try:
        _use_disk(world)
        found = gc.collect()
    finally:
        gc.enable()

    assert found == 0


def test_what_a_node_answers_leaves_nothing_for_the_collector():
    node = Wire()
    node.join(1)
    gc.collect()
    gc.disable()
    try:
        _ask(node)
        found = gc.collect()
    finally:
        gc.enable()

    assert found == 0


def test_slots_are_no_objects_that_the_collector_visits():
    few, many = SlotTable(1 << 20, 1), SlotTable(1 << 20, 1)
    few.allocate(1, "tenant", 1 << 20)
    many.allocate(1, "tenant", SLOT_ALIGNMENT)

    assert many.extents[0].count == 256
    assert references(many.extents[0]) == references(few.extents[0])


def test_keys_of_the_pages_in_slots_are_no_objects_that_the_collector_visits():
    world = World(extents=1, slots_each=256)
    process = world.process()
    space = world.space(process)
    before = references(*world.table.residents.owners._keys.values())
    for number in range(200):
        world.store(process, space, chr(1000 + number))

    assert sum(map(len, world.table.residents.owners._keys.values())) == 256
    assert references(*world.table.residents.owners._keys.values()) < before + 10


def _use(world: World) -> None:
    """Put, read, evict, drain, drop, expire and end."""
    engine, other = world.process("engine"), world.process("other", pid=2)
    space, theirs = world.space(engine, [FULL, STATE]), world.space(other, tenant="blue")
    for letter in "abcdefgh":
        world.store(engine, space, letter * 30)
        world.store(engine, space, letter * 4, shard=1)
    number, _ = world.acquire(engine, space, "h" * 30)
    for letter in "stuvw":
        world.store(other, theirs, letter * 40)
        while world.table.residents.unfinished:
            world.table.residents.drop_orphans(64)
            world.table.room.drain(64)
    world.table.release(engine, number)
    world.acquire(engine, space, "h" * 4, until_ns=1)
    world.table.expire(2)
    for top in list(theirs.root.children.values()):
        drop_below(world.table, top, "evicted")
    world.begin(engine, space, "xyz")
    world.end(engine)
    world.end(other)
    world.table.actions.clear()


def _ask(node: Wire) -> None:
    """Put, read, wait in vain, ask for what is refused, and leave with pages that are written."""
    node.join(2)
    node.store(2, KEYS)
    assert node.lookup(1, KEYS) == (len(KEYS), 0)
    written = page_keys(range(100, 110), 2)
    node.begin(2, written)
    assert node.lookup(1, written, wait_ms=100) is None
    node.now_ns += 101 * MS
    node.node.advance(node.now_ns)
    assert node.found(1) == [(0, len(written))]
    assert isinstance(node.ask(1, wire.Lookup(0, 7, [0], KEYS.packed)), wire.Failure)
    node.node.disconnected(2, node.now_ns, ended=True)
    node.node.advance(node.now_ns)


def _use_disk(world: DiskWorld) -> None:
    """Write, fail to, evict, load, check, make durable, take out, carry over and give up."""
    world.store(world.me, world.mine, "abcdef")
    world.persist("abcdef")
    world.end_all()
    counts = world.table.counts
    for _ in range(40):
        run = world.table.residents.ready_run(world.mine, 0, b"".join(chain("abcdef")))
        world.lookup(world.mine, "abcdef")
        fetch = world.fetch(run, 0)
        world.end_all()
        world.table.end_fetch(world.me, fetch)
        flood(world, 1)
    assert counts["promoted_pages"]
    assert counts["reclaimed_pages"]
    assert counts["carried_pages"]
    world.store(world.me, world.mine, "uvw")
    world.persist("uvw")
    for number, job in enumerate(world.jobs(DiskWrite)):
        world.end_job(job, IO_ERROR if number == 1 else None)
    world.disk.advance(10_000)
    world.table.tiers.go_on()
    for top in list(world.mine.root.children.values()):
        drop_below(world.table, top, "operator")
    world.end_all()
    assert counts["disk_tier_unavailable"] == 1
    assert not world.mine.index
    world.table.actions.clear()
