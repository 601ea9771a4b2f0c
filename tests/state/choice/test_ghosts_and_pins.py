"""Goal: what left is remembered truly and within bounds; what is pinned or reserved stays."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.protocol.errors import CapacityError, InvalidArgument, NotFound
from kvstore.state.choice import ghosts as module
from kvstore.state.choice.conversations import RELEASE_PAGES
from kvstore.state.choice.ghosts import Ghosts
from kvstore.state.choice.quotas import PINS_MAX, Pins, expiry
from kvstore.state.table.invariants import check
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree
from tests.state.world import PAGE, ROOT, World, identity, key

SECOND = 1_000_000_000


def node_of(space: PrefixTree, path: str) -> PrefixNode:
    return PrefixNode(space, key(path), None)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=60), st.integers(1, 6))
@example([(0, 1), (0, 2), (0, 3), (0, 2)], 3)
def test_the_newest_that_left_are_remembered_and_no_others(events, most):
    spaces = [PrefixTree(number, identity(model=f"m{number}")) for number in range(3)]
    ghosts = Ghosts(most)
    for time, (number, page) in enumerate(events, start=1):
        ghosts.add(node_of(spaces[number], str(page)), 0, "expired", time)

    newest = list(enumerate(events, start=1))[-most:]
    assert len(ghosts) == len(newest)
    model = {event: time for time, event in newest}
    for number in range(3):
        for page in range(10):
            found = ghosts.find(spaces[number], key(str(page)))
            assert (found and found.left_ns) == model.get((number, page))
    assert ghosts.forgotten == len(events) - len(newest)
    assert ghosts.oldest_ns() == (newest[0][0] if len(newest) == most else 0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(5, 12))
def test_of_many_pages_each_part_remembers_its_newest(events, most):
    """Parts of one entry: what has another part pushes nothing out."""
    space = PrefixTree(0, identity())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PART_ENTRIES", 1)
        ghosts = Ghosts(most)
    node = node_of(space, "last")
    ghosts.add(node, 0, "expired", 1, [key(str(page)) for page in events])

    kept: dict[int, int] = {}
    for page in events:
        kept[(key(str(page))[0] << 8 | key(str(page))[1]) % most] = page
    found = [page for page in range(10) if ghosts.find(space, key(str(page))) is not None]
    assert found == sorted(kept.values())
    assert len(ghosts) + ghosts.forgotten == len(events)


def test_a_ghost_tells_when_why_and_for_whom(world_of_two):
    world, process, space, other = world_of_two
    world.table.moment.now_ns = 5 * SECOND
    world.store(process, space, "abcd")
    world.lookup(space, "abcd")
    world.table.moment.now_ns = 7 * SECOND

    world.store(process, other, "wxyz")

    ghost = world.table.residents.ghosts.find(space, key("abcd"))
    assert ghost is not None
    assert (ghost.cause, ghost.policy, ghost.hits) == ("evicted", "lru", 1)
    assert (ghost.stored_ns, ghost.used_ns, ghost.left_ns) == (5 * SECOND, 5 * SECOND, 7 * SECOND)
    assert (ghost.wanted_by, ghost.wanted_bytes) == (other.number, PAGE)
    assert ghost.head == ROOT


@pytest.fixture
def world_of_two() -> tuple[World, object, PrefixTree, PrefixTree]:
    world = World(extents=1, slots_each=4)
    process = world.process()
    space = world.space(process)
    other, _ = world.table.spaces.open(
        process.session, identity(model="other"), [space.shards[0].spec]
    )
    return world, process, space, other


def test_what_went_with_its_head_says_which_head(world_of_two):
    world, process, space, _ = world_of_two
    world.store(process, space, "abc")

    world.table.residents.drop(space.nodes[key("a")], 0, "corrupt")

    assert world.table.residents.ghosts.find(space, key("abc")).head == key("a")
    assert world.table.residents.ghosts.find(space, key("a")).head == ROOT


def test_a_list_of_no_length_remembers_nothing_and_says_so():
    ghosts = Ghosts(0)
    ghosts.add(node_of(PrefixTree(0, identity()), "a"), 0, "expired", 1)

    assert (len(ghosts), ghosts.forgotten, ghosts.oldest_ns()) == (0, 1, 0)


# Pins


def test_a_pinned_prefix_outlives_a_flood(world_of_two):
    world, process, space, other = world_of_two
    world.table.keeping.pins.budget_bytes = 2 * PAGE
    world.store(process, space, "ab")
    world.table.keeping.pins.add(space, key("ab"), 0)

    world.store(process, other, "uvwxyz")
    world.store(process, other, "123456")

    assert world.lookup(space, "ab") == (2, 0)
    check(world.table)


def test_an_ended_pin_lets_its_pages_go(world_of_two):
    world, process, space, other = world_of_two
    world.table.keeping.pins.budget_bytes = 4 * PAGE
    world.store(process, space, "abcd")
    world.table.keeping.pin(space, key("abcd"), 10 * SECOND)
    assert world.store(process, other, "w") == [PageStatus.NO_ROOM]
    assert world.table.next_deadline_ns() == 10 * SECOND

    world.table.expire(10 * SECOND)

    assert world.store(process, other, "w") == [PageStatus.GRANTED]
    assert world.table.keeping.pins.used_bytes == 0
    check(world.table)


def test_pins_keep_their_budget_and_name_what_is_missing(world_of_two):
    world, process, space, _ = world_of_two
    pins = world.table.keeping.pins
    pins.budget_bytes = 3 * PAGE
    world.store(process, space, "abcd")

    with pytest.raises(CapacityError, match=r"admin\.pin_budget_bytes"):
        pins.add(space, key("abcd"), 0)
    pin = pins.add(space, key("abc"), 0)
    with pytest.raises(CapacityError):
        pins.add(space, key("a"), 0)
    with pytest.raises(NotFound):
        pins.add(space, key("q"), 0)
    pins.remove(pin.number)
    with pytest.raises(NotFound):
        pins.remove(pin.number)
    assert [node.key for node in pins.let_go(4)] == [key("abc"), key("ab"), key("a")]

    assert (len(pins), pins.used_bytes) == (0, 0)
    assert all(node.pins == 0 for node in space.nodes.values())


def test_there_are_not_more_pins_than_allowed(world_of_two):
    world, process, space, _ = world_of_two
    world.store(process, space, "a")
    pins = Pins(1 << 60)
    for _ in range(PINS_MAX):
        pins.add(space, key("a"), 0)

    with pytest.raises(CapacityError, match="unpin one first"):
        pins.add(space, key("a"), 0)


def test_a_pinned_page_that_is_corrupt_leaves_all_the_same(world_of_two):
    world, process, space, _ = world_of_two
    world.table.keeping.pins.budget_bytes = 2 * PAGE
    world.store(process, space, "ab")
    pin = world.table.keeping.pins.add(space, key("ab"), 0)

    world.table.residents.drop(space.nodes[key("a")], 0, "corrupt")

    assert world.lookup(space, "ab") == (0, 0)
    world.table.keeping.unpin(pin.number)
    check(world.table)


@pytest.mark.parametrize("ttl_s", [-1.0, 1e12, float("nan")])
def test_a_pin_has_an_end_that_can_be(ttl_s):
    with pytest.raises(InvalidArgument):
        expiry(ttl_s, 0)


# Quotas and reservations


def test_a_put_over_quota_evicts_the_spaces_own_leaves(world_of_two):
    world, process, space, other = world_of_two
    world.store(process, other, "w")
    world.table.quotas.set(space, 2 * PAGE, 0, 4 * PAGE)

    assert world.store(process, space, "ab") == [PageStatus.GRANTED] * 2
    assert world.store(process, space, "c") == [PageStatus.GRANTED]

    assert space.host_bytes == 2 * PAGE
    assert world.lookup(space, "ab") == (1, 0)
    assert world.lookup(other, "w") == (1, 0), "there was free room besides"
    assert world.store(process, space, "xyz") == [PageStatus.GRANTED] * 2 + [PageStatus.NO_ROOM]
    check(world.table)


def test_a_quota_on_a_full_space_shrinks_it(world_of_two):
    world, process, space, _ = world_of_two
    world.store(process, space, "abcd")
    world.table.quotas.set(space, PAGE, 0, 4 * PAGE)
    world.table.eviction.offer_all(space.by_creation.nodes(0), anew=True)

    assert not world.table.room.shrink(space, 2)
    assert world.table.room.shrink(space, 2)

    assert world.lookup(space, "abcd") == (1, 0)
    check(world.table)


def test_a_reservation_is_left_to_its_space_and_what_is_above_is_not(world_of_two):
    world, process, space, other = world_of_two
    world.store(process, space, "abc")
    world.table.quotas.set(space, 0, 2 * PAGE, 4 * PAGE)

    world.store(process, other, "vwxyz")

    assert space.host_bytes == 2 * PAGE
    assert world.lookup(space, "abc") == (2, 0)
    assert other.host_bytes == 2 * PAGE
    world.table.quotas.set(space, 0, 0, 4 * PAGE)
    world.store(process, other, "v1234")
    assert world.lookup(space, "abc") == (0, 0), "without a reservation the oldest go"
    check(world.table)


def test_a_reservation_holds_against_another_class_of_slots():
    world = World(extents=1, slots_each=4)
    process = world.process()
    space = world.space(process)
    wide = space.shards[0].spec.__class__(
        layout=space.shards[0].spec.layout, layers=(0, 2), heads=(0, 1)
    )
    other, _ = world.table.spaces.open(process.session, identity(model="wide"), [wide])
    world.store(process, space, "abc")
    world.table.quotas.set(space, 0, 2 * PAGE, 4 * PAGE)
    for _ in range(3):
        world.lookup(space, "abc")

    assert world.store(process, other, "w") == [PageStatus.NO_ROOM]

    assert world.lookup(space, "abc") == (3, 0)
    check(world.table)


def test_limits_that_cannot_be_are_refused(world_of_two):
    world, _, space, other = world_of_two
    quotas = world.table.quotas
    with pytest.raises(InvalidArgument, match="reserved_bytes"):
        quotas.set(space, 1, 2, 10)
    with pytest.raises(InvalidArgument):
        quotas.set(space, -1, 0, 10)
    quotas.set(space, 0, 6, 10)
    said = "reservations may total 10 bytes; 6 are in use, 5 do not fit"
    with pytest.raises(CapacityError, match=said):
        quotas.set(other, 0, 5, 10)

    assert [one.space for one in quotas.all()] == [space]


@given(st.lists(st.tuples(st.sampled_from("so"), st.text("abc", min_size=1, max_size=5))))
def test_limits_hold_whatever_is_stored(puts):
    world = World(extents=1, slots_each=6)
    process = world.process()
    space = world.space(process)
    other, _ = world.table.spaces.open(
        process.session, identity(model="other"), [space.shards[0].spec]
    )
    world.table.quotas.set(space, 3 * PAGE, 2 * PAGE, 6 * PAGE)
    reached = 0
    for whose, path in puts:
        world.store(process, space if whose == "s" else other, path)
        assert space.host_bytes <= 3 * PAGE
        assert space.host_bytes >= min(reached, 2 * PAGE)
        reached = max(reached, space.host_bytes)
        check(world.table)


def test_pins_that_end_together_end_one_after_the_other(world_of_two):
    world, process, space, _ = world_of_two
    pins = world.table.keeping.pins
    pins.budget_bytes = 100 * PAGE
    world.store(process, space, "abc")
    for _ in range(3):
        pins.add(space, key("abc"), 5 * SECOND)

    pins.expire(6 * SECOND)

    assert (len(pins), len(pins.ending), pins.used_bytes) == (0, 3, 9 * PAGE)
    ends = [(len(pins.let_go(4)), len(pins.ending), pins.used_bytes) for _ in range(4)]
    assert ends == [(4, 2, 6 * PAGE), (4, 1, 3 * PAGE), (1, 0, 0), (0, 0, 0)]


def test_a_long_pin_ends_in_steps_and_its_pages_leave_at_once_if_they_have_to():
    world = World(extents=1, slots_each=1500)
    process = world.process()
    space, pins, keeping = world.space(process), world.table.residents.pins, world.table.keeping
    path = "a" * 1500
    world.store(process, space, path)
    pins.budget_bytes = 1500 * PAGE
    pin = keeping.pin(space, key(path), 0)
    assert world.store(process, space, "b") == [PageStatus.NO_ROOM], "all of it is pinned"

    keeping.unpin(pin.number)

    def pinned() -> int:
        return sum(node.memory_pins > 0 for node in space.nodes.values())

    assert (len(pins), pinned(), pins.used_bytes) == (0, 1500 - RELEASE_PAGES, 1500 * PAGE)
    assert keeping.next_deadline_ns() == 1
    check(world.table)
    assert world.store(process, space, "b" * 300) == [PageStatus.GRANTED] * 300
    assert pinned() < 1500 - RELEASE_PAGES, "more was let go because there was no other room"
    check(world.table)
    with pytest.raises(CapacityError):
        keeping.pin(space, key("b"), 0)
    for _ in range(1500 // RELEASE_PAGES):
        assert world.table.residents.unfinished
        before = pinned()
        world.table.expire(0)
        assert 0 < before - pinned() <= RELEASE_PAGES
        check(world.table)
        if not pinned():
            break
    assert not world.table.residents.unfinished
    assert (pinned(), pins.used_bytes, keeping.is_used) == (0, 0, False)


def test_a_put_that_finds_no_room_lets_go_of_no_long_pin_as_a_whole():
    world = World(extents=1, slots_each=2000)
    process = world.process()
    space, keeping, path = world.space(process), world.table.keeping, "a" * 2000
    world.store(process, space, path)
    keeping.pins.budget_bytes = 2000 * PAGE
    pin = keeping.pin(space, key(path), 0)
    world.acquire(process, space, path)  # so nothing of what is let go is of use
    keeping.unpin(pin.number)

    assert world.store(process, space, "b" * 128) == [PageStatus.NO_ROOM] * 128

    assert len(pin.nodes) > 500
    check(world.table)


def test_no_more_pins_than_allowed_are_there_with_those_that_let_go(world_of_two):
    world, process, space, _ = world_of_two
    world.store(process, space, "a")
    pins = Pins(1 << 60)
    for _ in range(PINS_MAX):
        pins.add(space, key("a"), 0)
    pins.remove(1)

    with pytest.raises(CapacityError, match="unpin one first"):
        pins.add(space, key("a"), 0)
    pins.let_go(1)
    pins.add(space, key("a"), 0)
    pins.check()


def test_a_pin_has_a_length(world_of_two, monkeypatch):
    world, process, space, _ = world_of_two
    world.table.keeping.pins.budget_bytes = 100 * PAGE
    monkeypatch.setattr("kvstore.state.choice.quotas.PIN_KEYS_MAX", 2)
    world.store(process, space, "abc")

    with pytest.raises(CapacityError, match="2 keys at most"):
        world.table.keeping.pin(space, key("abc"), 0)
    assert len(world.table.keeping.pin(space, key("ab"), 0).nodes) == 2
