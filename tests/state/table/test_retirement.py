"""Goal: memory that a process may touch for ever is nobody's page again, and is not lost either."""

from dataclasses import dataclass

import pytest

from kvstore.state.table import deadlines
from kvstore.state.table.deadlines import AGAIN_NS, VACATE_PAGES, Retirement
from kvstore.state.table.invariants import check
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.sessions import Peer, Process, Session
from kvstore.state.tree.slots import Replacement
from tests.state.world import PAGE, World, key

AFTER_NS = 1000


@dataclass
class Scene:
    """An engine that is watched, and one that nobody can watch, on extents of four pages."""

    world: World
    engine: Process
    hidden: Process
    retirement: Retirement
    ended: list[Process]

    def advance(self, now_ns: int) -> None:
        self.ended += self.retirement.advance(now_ns)

    def lose(self, now_ns: int = 0) -> None:
        """The connection of the hidden process breaks."""
        self.world.table.lose(self.hidden)
        self.retirement.add(self.hidden, now_ns)


@pytest.fixture
def scene() -> Scene:
    world = World(extents=2)
    engine = world.process()
    session = world.sessions.setdefault("hidden", Session(b"hidden", "hidden", 1 << 40))
    hidden = Process(99, Peer(-1, watched=False), session)
    session.processes[99] = hidden
    return Scene(world, engine, hidden, Retirement(world.table.residents, AFTER_NS), [])


def test_the_extents_of_a_lost_writer_get_new_memory_when_its_time_is_up(scene: Scene):
    world = scene.world
    space = world.space(scene.hidden)
    world.begin(scene.hidden, space, "abcd")
    scene.lose(now_ns=10)
    assert world.slots.stats().limbo_bytes == 4 * PAGE
    assert scene.retirement.next_deadline_ns() == 10 + AFTER_NS

    scene.advance(10 + AFTER_NS - 1)
    assert world.slots.replaced == []
    scene.advance(10 + AFTER_NS)

    assert world.slots.replaced == [Replacement(0, 2, in_use=True)]
    assert world.slots.stats().limbo_bytes == 0
    assert world.slots.stats().free_bytes == 8 * PAGE
    assert scene.ended == [scene.hidden]
    assert scene.hidden.session.used_bytes == 0
    assert scene.retirement.next_deadline_ns() == 0
    check(world.table)


def test_pages_beside_what_a_lost_reader_may_read_leave_memory(scene: Scene):
    world = scene.world
    space = world.space(scene.engine)
    world.space(scene.hidden)
    world.store(scene.engine, space, "abcdefgh")
    world.acquire(scene.hidden, space, "a", until_ns=50)
    world.table.expire(50)
    scene.lose()
    world.removed()

    scene.advance(AFTER_NS)

    assert world.lookup(space, "abcdefgh") == (0, 0)
    assert key("a") in world.removed("retired")
    assert world.slots.replaced == [Replacement(0, 2, in_use=True)]
    assert world.slots.stats().free_bytes == 8 * PAGE
    assert scene.ended == [scene.hidden]
    check(world.table)


def test_an_extent_waits_for_those_who_still_read_or_write_there(scene: Scene):
    world = scene.world
    space = world.space(scene.engine)
    world.space(scene.hidden)
    world.store(scene.engine, space, "a")
    world.begin(scene.hidden, space, "b")
    lease, _ = world.acquire(scene.engine, space, "a")
    put, _, _ = world.begin(scene.engine, space, "c")
    scene.lose()

    scene.advance(AFTER_NS)
    assert world.slots.replaced == []
    assert world.slots.stats().retiring_bytes == 4 * PAGE
    assert world.lookup(space, "a") == (0, 0), "nobody else gets it any more"
    statuses = world.store(scene.engine, space, "defgh")
    assert statuses[:4] == [PageStatus.GRANTED] * 4, "the other extent serves meanwhile"
    assert statuses[4] is PageStatus.NO_ROOM

    world.table.release(scene.engine, lease)
    world.commit(scene.engine, put)
    scene.advance(AFTER_NS + 1)
    assert world.slots.replaced == [], "it does not look again at once"
    scene.advance(AFTER_NS + AGAIN_NS)

    assert world.slots.replaced == [Replacement(0, 2, in_use=True)]
    assert world.slots.stats().retiring_bytes == 0
    assert world.store(scene.engine, space, "xyz") == [PageStatus.GRANTED] * 3
    check(world.table)


def test_a_lease_that_has_not_run_out_keeps_its_extent(scene: Scene):
    world = scene.world
    space = world.space(scene.engine)
    world.space(scene.hidden)
    world.store(scene.engine, space, "a")
    world.acquire(scene.hidden, space, "a", until_ns=10 * AGAIN_NS)
    scene.lose()

    scene.advance(AFTER_NS)
    assert world.slots.replaced == []
    assert world.lookup(space, "a") == (1, 0)

    world.table.expire(10 * AGAIN_NS)
    scene.advance(10 * AGAIN_NS)
    assert world.slots.replaced == [Replacement(0, 2, in_use=True)]


def test_two_lost_processes_in_one_extent_are_waited_for_both(scene: Scene):
    world = scene.world
    space = world.space(scene.hidden)
    session = scene.hidden.session
    other = session.processes[98] = Process(98, Peer(-2, watched=False), session)
    world.begin(scene.hidden, space, "a")
    world.begin(other, space, "b")
    scene.lose(now_ns=0)
    world.table.lose(other)
    scene.retirement.add(other, 5 * AGAIN_NS)

    scene.advance(AFTER_NS)
    assert world.slots.replaced == []
    scene.advance(5 * AGAIN_NS + AFTER_NS)

    assert world.slots.replaced == [Replacement(0, 2, in_use=True)]
    assert scene.ended == [scene.hidden, other]


def test_an_extent_comes_back_although_who_it_retired_for_has_ended_meanwhile(scene: Scene):
    world = scene.world
    space = world.space(scene.engine)
    world.space(scene.hidden)
    world.begin(scene.hidden, space, "a")
    put, _, _ = world.begin(scene.engine, space, "b")
    scene.lose()
    scene.advance(AFTER_NS)
    assert world.slots.stats().retiring_bytes == 4 * PAGE

    scene.retirement.remove(scene.hidden)
    world.end(scene.hidden)
    world.table.abort_put(scene.engine, put)
    assert scene.retirement.next_deadline_ns() > 0
    scene.advance(scene.retirement.next_deadline_ns())

    assert world.slots.stats().retiring_bytes == 0
    assert world.slots.stats().free_bytes == 8 * PAGE
    assert scene.retirement.next_deadline_ns() == 0
    check(world.table)


def test_a_process_that_settles_after_all_keeps_no_extent(scene: Scene):
    world = scene.world
    space = world.space(scene.hidden)
    world.begin(scene.hidden, space, "a")
    scene.lose()

    scene.retirement.remove(scene.hidden)
    world.end(scene.hidden)
    scene.advance(AFTER_NS)

    assert world.slots.replaced == []
    assert world.slots.stats().free_bytes == 8 * PAGE


def test_one_turn_evicts_few_pages_of_however_many_extents():
    world = World(extents=40, slots_each=64)
    engine = world.process()
    session = world.sessions.setdefault("hidden", Session(b"hidden", "hidden", 1 << 40))
    hidden = Process(99, Peer(-1, watched=False), session)
    session.processes[99] = hidden
    space = world.space(engine)
    world.space(hidden)
    prompts = [chr(0x4E00 + number) + "a" * 31 for number in range(60)]
    for prompt in prompts:
        world.store(engine, space, prompt)
        world.acquire(hidden, space, prompt[:1], until_ns=50)
    for _ in prompts:
        world.table.expire(50)
    scene = Scene(world, engine, hidden, Retirement(world.table.residents, AFTER_NS), [])
    scene.lose()
    world.removed()

    now_ns, left = AFTER_NS, []
    while not scene.ended:
        scene.advance(now_ns)
        left.append(len(world.removed("retired")))
        assert scene.ended or scene.retirement.next_deadline_ns() == now_ns
        check(world.table)
    assert sum(left) == 60 * 32
    assert max(left) <= VACATE_PAGES + 128
    assert len(world.slots.replaced) == 30
    assert scene.retirement.next_deadline_ns() == 0


def test_one_turn_looks_at_the_slots_of_few_extents(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deadlines, "LOOKS_MAX", 1)
    world = World(extents=8, slots_each=2)
    engine = world.process()
    space = world.space(engine)
    world.begin(engine, space, "abcdefghij")
    engine.peer = Peer(-1, watched=False)
    scene = Scene(world, engine, engine, Retirement(world.table.residents, AFTER_NS), [])
    scene.lose()

    for turn in range(1, 6):
        assert not scene.ended
        scene.advance(AFTER_NS)
        assert len(world.slots.replaced) == turn
    assert scene.ended == [engine]
    check(world.table)
