"""Goal: a node looks at all of its state, and tells what happened to a page that is broken."""

from types import SimpleNamespace

import pytest

from kvstore.node.desk import Desk
from kvstore.node.selfcheck import SelfCheck
from kvstore.node.waiting import WaitingRoom
from kvstore.protocol import wire
from kvstore.protocol.counts import SelfCheckCounts
from kvstore.state.remote.jobs import PeerLimits
from kvstore.state.table.pages import PageTable
from kvstore.state.tree import prefix_tree
from kvstore.testing.simulation import Simulation
from tests.node.test_protocol import KEYS, Wire


@pytest.fixture
def world() -> Wire:
    """A node that has stored pages for one engine, which reads the first of them."""
    made = Wire()
    made.join(1)
    made.store(1, KEYS)
    made.ask(1, wire.Acquire(0, 1, 0, 0, KEYS.packed[:32], 10))
    return made


def desk_of(world: Wire, *, check_every_step: bool) -> Desk:
    memory = SimpleNamespace(replace=lambda replaced: replaced.clear())
    return Desk(
        world.node, memory, lambda _: None, lambda: world.now_ns, check_every_step=check_every_step
    )


def break_first_page(world: Wire) -> None:
    """The first page's lease is counted on another slot."""
    [space] = world.node.pages.spaces
    world.node.pages.slots.unpin([space.nodes[KEYS[0]].slots[0]])
    space.nodes[KEYS[0]].depth = 7


def test_a_round_looks_at_every_page_and_is_counted(world):
    check = SelfCheck(world.node)

    for _ in range(2):
        while not check.step():
            pass

    assert (check.rounds, check.pages) == (2, 2 * len(KEYS))


def test_a_round_goes_on_after_everything_was_looked_at_at_once(world, monkeypatch):
    monkeypatch.setattr(prefix_tree, "STRETCH_WORK", 1)
    check = SelfCheck(world.node)
    while not check.pages:
        check.step()

    check.run()
    assert (check.rounds, check.pages) == (1, 1 + len(KEYS))
    while not check.step():
        pass

    assert check.pages == 2 * len(KEYS)


def test_a_round_that_fails_says_what_happened_to_the_page(world):
    break_first_page(world)

    with pytest.raises(AssertionError) as caught:
        SelfCheck(world.node).run()

    [told] = caught.value.__notes__
    assert f"the last events of page {KEYS[0].hex()[:16]}, 3 of 3" in told
    assert [word in told for word in ("granted", "stored", "leased")] == [True] * 3


@pytest.mark.parametrize("broken", ["waiting", "session", "bytes"])
def test_what_is_wrong_outside_of_the_pages_is_found_too(world, broken):
    [session] = world.node.sessions.values()
    match broken:
        case "waiting":
            world.node.waiting.count = 1
        case "session":
            session.token = b"another"
        case _:
            session.used_bytes += 1

    with pytest.raises(AssertionError):
        SelfCheck(world.node).run()


def test_in_debug_mode_every_step_looks_at_everything(world):
    desk = desk_of(world, check_every_step=True)
    desk.receive(1, wire.Ping(7))
    assert desk.self_check.rounds == 1
    break_first_page(world)

    with pytest.raises(AssertionError):
        desk.receive(1, wire.Ping(8))


def test_otherwise_no_step_looks_at_anything(world):
    desk = desk_of(world, check_every_step=False)
    break_first_page(world)

    desk.receive(1, wire.Ping(8))

    assert desk.stats().self_check == SelfCheckCounts(rounds=0, pages=0)


@pytest.mark.parametrize("call", ["receive", "advance", "disconnect", "process_ended", "operate"])
def test_a_mistake_in_any_call_of_the_node_tells_its_story(world, call, monkeypatch):
    def fail(self: PageTable | WaitingRoom, *_arguments: object, **_options: object) -> None:
        raise AssertionError("a mistake")

    monkeypatch.setattr(PageTable, "release", fail)
    monkeypatch.setattr(PageTable, "expire", fail)
    desk = desk_of(world, check_every_step=False)
    calls = {
        "receive": lambda: desk.receive(1, wire.Release(1)),
        "advance": desk.advance,
        "disconnect": lambda: desk.disconnect(1, ended=True),
        "process_ended": lambda: desk.process_ended(world.node.processes[1].peer.identity),
        "operate": lambda: desk.operate(lambda table: table.expire(5)),
    }

    with pytest.raises(AssertionError, match="a mistake") as caught:
        calls[call]()

    assert "the last events of any page, 3 of 3" in caught.value.__notes__[0]


def test_a_simulation_that_fails_tells_its_story():
    simulation = Simulation(1)
    simulation.run(0.05)
    simulation.node.pages.slots.extents[0].pinned += 1

    with pytest.raises(AssertionError) as caught:
        simulation.run(0.05)

    assert "the last events of" in caught.value.__notes__[0]


def test_what_is_read_from_other_nodes_is_looked_at_too(world):
    world.node.join(PeerLimits(in_flight_bytes_max=1 << 20))
    remote = world.node.remote
    assert remote is not None
    check = SelfCheck(world.node)
    check.run()
    remote._by_key[0, 0] = {}

    with pytest.raises(AssertionError, match="nothing is on its way"):
        check.run()
