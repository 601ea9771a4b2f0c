"""Goal: on disk no space exceeds its quota or loses what is reserved, and what is pinned stays."""

from random import Random

import pytest

from kvstore.protocol.errors import CapacityError, InvalidArgument, PageCorrupt, TierUnavailable
from kvstore.state.ask.explain import Explainer
from kvstore.state.disk.jobs import DiskCopy, DiskJob, DiskWrite
from kvstore.state.disk.log import Segment, SegmentLog, SegmentState
from kvstore.state.disk.order import Order
from kvstore.state.disk.plans import parts_of
from kvstore.state.table.invariants import check
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.node import Retention
from kvstore.state.tree.prefix_tree import PrefixTree
from tests.state.disk.disk_world import IO_ERROR, DiskWorld
from tests.state.world import FULL, FULL_2, PAGE, World, ended, identity, key

RECORD = 2 * PAGE
SEGMENT = 1 << 17
"""Room for seven records beside the footer."""


class LimitedWorld(DiskWorld):
    """Two spaces that share a small disk."""

    def __init__(self, write: str = "through", extents: int = 4, segments: int = 12) -> None:
        super().__init__(write, extents=extents, segments=segments, segment_bytes=SEGMENT)
        spec = self.mine.shards[0].spec
        self.other = self.table.spaces.open(self.me.session, identity(model="o"), [spec])[0]
        self.table.keeping.pins.budget_bytes = self.table.keeping.pins.disk_budget_bytes = (
            100 * RECORD
        )

    def limit(self, space: PrefixTree, quota: int = 0, reserved: int = 0) -> None:
        self.disk.limit(space, quota * RECORD, reserved * RECORD)
        for node in space.nodes.values():
            self.table.residents.add_candidate(node)
        if (leaves := self.disk.limits.leaves_of(space)) is not None:
            leaves.all_offered = True
        while not self.table.tiers.shrink(space, 1) and self.disk.limits.quotas.exceeded(space):
            pass

    def put(self, path: str, space: PrefixTree | None = None) -> None:
        """Store the last page of a path, and let the disk end what it has to do."""
        space = space or self.mine
        for _ in range(50):
            statuses = self.store(self.me, space, path, start=len(path) - 1)
            self.end_all()
            if statuses != [PageStatus.NO_ROOM]:
                return
        pytest.fail("there is no room")

    def flood(self, pages: int, space: PrefixTree | None = None) -> None:
        for _ in range(pages):
            self.put(chr(next(self.letters)), space or self.other)

    def there(self, *paths: str) -> list[bool]:
        """Which of these pages are on disk."""
        nodes = [self.mine.nodes.get(key(path)) for path in paths]
        return [node is not None and 0 in node.disk for node in nodes]


@pytest.fixture
def world() -> LimitedWorld:
    return LimitedWorld()


# Quotas


def test_a_space_at_its_quota_gives_its_coldest_leaf_for_a_new_page(world):
    world.limit(world.mine, quota=3)
    for path in ("a", "b", "bc"):
        world.put(path)
    world.acquire(world.me, world.mine, "a")

    world.put("d")

    assert world.there("a", "b", "bc", "d") == [True, True, False, True], "bc was the coldest leaf"
    assert world.mine.disk_bytes == 3 * RECORD
    assert world.table.counts["disk_quota_pages"] == 1


def test_what_is_on_disk_only_leaves_the_index_and_explain_says_why(world):
    for path in ("a", "b"):
        world.put(path)
    world.flood(20)
    assert not world.node("a").slots
    world.removed()
    world.table.moment.now_ns = 1

    world.limit(world.mine, quota=1)

    assert world.removed("quota") == [key("a")]
    told = ended(Explainer(world.table, 2).steps(key("a"), world.mine))
    assert (told.verdict, "quota" in told.text) == ("evicted", True)


def test_a_page_for_which_nothing_can_go_is_not_written_and_is_counted(world):
    world.limit(world.mine, quota=2)
    for path in ("a", "ab", "abc", "abcd"):
        world.put(path)

    assert world.there("a", "ab", "abc", "abcd") == [True, True, False, False]
    assert world.table.counts["disk_refused_quota"] >= 2
    assert world.lookup(world.mine, "abcd") == (4, 0), "memory has it"
    with pytest.raises(CapacityError, match="quota"):
        world.persist("abc")


def test_a_page_larger_than_its_quota_costs_nothing_else(world):
    world.limit(world.mine, quota=2)
    world.put("a")
    world.disk.limit(world.mine, RECORD - 1, 0)

    world.put("b")

    assert world.there("a", "b") == [True, False], "the one that is there goes with the next shrink"


def test_what_is_being_written_counts(world):
    world.limit(world.mine, quota=2)
    for path in "abc":
        world.store(world.me, world.mine, path)

    assert len(world.jobs(DiskWrite)) == 2
    assert world.mine.disk_bytes == 2 * RECORD
    world.end_job(world.write_of("a"), IO_ERROR)
    assert world.mine.disk_bytes == RECORD


def test_pages_that_somebody_needs_do_not_go_for_a_quota(world):
    world.limit(world.mine, quota=2)
    for path in ("a", "b"):
        world.put(path)
    number, _ = world.acquire(world.me, world.mine, "a")
    world.table.keeping.pin(world.mine, key("b"), 0, "ssd")

    world.put("c")
    assert world.there("a", "b", "c") == [True, True, False]

    world.table.release(world.me, number)
    world.put("d")
    assert world.there("a", "b", "d") == [False, True, True]


# Reservations


def test_a_reserved_space_outlives_a_flood_of_another(world):
    for path in ("a", "ab", "c"):
        world.put(path)
    world.limit(world.mine, reserved=3)

    world.flood(200)

    assert world.there("a", "ab", "c") == [True, True, True]
    assert world.table.counts["disk_kept_pages"] > 0
    world = LimitedWorld()
    for path in ("a", "ab", "c"):
        world.put(path)
    world.flood(200)
    assert world.there("ab", "c") == [False, False], "without it the oldest go"


def test_what_is_beyond_a_reservation_goes(world):
    for path in "abcd":
        world.put(path)
    world.limit(world.mine, reserved=2)

    world.flood(200)

    assert world.there(*"abcd").count(True) == 2


@pytest.mark.parametrize("reserved", [0, 2])
def test_the_pages_of_a_segment_are_said_as_what_must_be_kept_has_left_them(world, reserved):
    """Of a reserved space single pages are asked for, and a run is split for them."""
    world.store(world.me, world.mine, "abcd")
    world.end_all()
    world.disk.limit(world.mine, 0, reserved * RECORD)
    (segment,) = world.disk.log.segments.values()

    kept, parts = world.disk.limits.kept(segment)

    assert len(kept) == reserved
    assert parts == list(parts_of(segment.pages))
    assert [part.part.pages for part in parts] == ([1, 1, 1, 1] if reserved else [4])


def test_more_cannot_be_reserved_than_can_be_kept(world):
    capacity = world.disk.log.reservable_bytes
    world.disk.limit(world.mine, 0, capacity)

    with pytest.raises(CapacityError) as refused:
        world.disk.limit(world.other, 0, 1)
    assert refused.value.field == "reserved_bytes"
    with pytest.raises(InvalidArgument, match="reserved_bytes"):
        world.disk.limit(world.other, 1, 2)


# Pins


def test_a_page_pinned_on_disk_only_outlives_a_flood_until_its_time_is_up(world):
    for path in ("a", "ab"):
        world.put(path)
    world.flood(20)
    assert not world.node("ab").slots
    pin = world.table.keeping.pin(world.mine, key("ab"), 1000, "ssd")
    assert (pin.size_bytes, world.table.keeping.pins.disk_used_bytes) == (2 * RECORD, 2 * RECORD)

    world.flood(200)
    assert world.there("a", "ab") == [True, True]

    world.table.expire(1000)
    assert world.table.keeping.pins.disk_used_bytes == 0
    for _ in range(20):  # what is carried gathers in a segment, which is reclaimed once it is full
        path = chr(next(world.letters))
        world.put(path, world.other)
        number, _ = world.acquire(world.me, world.other, path)
        world.table.release(world.me, number)
        world.flood(20)
    assert world.there("a", "ab") == [False, False]


def test_a_pin_on_disk_writes_what_is_in_memory_only_and_lets_memory_go_then():
    world = LimitedWorld("back", extents=1)
    world.put("ab"[:1])
    world.put("ab")
    world.table.keeping.pin(world.mine, key("ab"), 0, "ssd")
    assert len(world.jobs(DiskWrite)) == 2
    world.end_job(world.write_of("a"))
    world.end_job(world.write_of("ab"), IO_ERROR)

    world.disk.advance(999)
    assert not world.jobs(DiskWrite), "the disk rests"
    assert world.node("ab").slots, "it is nowhere else"

    world.disk.advance(10_000)
    assert world.there("a", "ab") == [True, False]
    world.end_job(world.write_of("ab"))
    world.flood(20)
    assert world.there("a", "ab") == [True, True]
    assert not world.node("ab").slots


@pytest.mark.parametrize("written", [True, False])
def test_a_page_pinned_on_disk_that_is_stored_again_is_written_again(written, monkeypatch):
    world = LimitedWorld("back")
    monkeypatch.setattr(world.disk.admission, "admit", lambda *_: 0)
    space = world.space(world.me, shards=[FULL, FULL_2])
    for shard in (0, 1):
        world.store(world.me, space, "a", shard=shard)
    world.table.keeping.pin(space, key("a"), 0, "ssd")
    stale = world.jobs(DiskWrite)[0]
    node = space.nodes[key("a")]
    if written:
        world.end_job(stale)
    world.table.residents.drop(node, 0, "head_lost")
    world.store(world.me, space, "a")
    if not written:
        world.end_job(stale)
    assert 0 not in node.disk
    world.end_all()

    assert set(node.disk) == {0, 1}


def test_a_pin_in_memory_keeps_a_page_that_is_on_disk_only(world):
    world.put("a")
    world.flood(20)
    world.table.keeping.pin(world.mine, key("a"), 0)
    assert world.table.keeping.pins.used_bytes == PAGE, "it may come to memory any time"

    world.flood(200)

    assert world.there("a") == [True]


def test_a_pin_that_the_disk_has_no_room_for_is_refused_and_holds_nothing(world):
    world.put("a")
    world.table.keeping.pins.disk_budget_bytes = RECORD - 1
    with pytest.raises(CapacityError) as refused:
        world.table.keeping.pin(world.mine, key("a"), 0, "ssd")
    assert refused.value.field == "admin.pin_ssd_budget_bytes"

    world.table.keeping.pins.disk_budget_bytes = 10 * RECORD
    world.store(world.me, world.mine, "t", keep=Retention(expires_ns=1 << 50))
    with pytest.raises(CapacityError):
        world.table.keeping.pin(world.mine, key("t"), 0, "ssd")
    assert len(world.table.keeping.pins) == world.table.keeping.pins.disk_used_bytes == 0
    alone = World()
    with pytest.raises(TierUnavailable):
        alone.table.keeping.pin(alone.space(alone.process()), key("a"), 0, "ssd")


def test_when_all_is_pinned_nothing_goes_round_and_new_pages_are_refused(world):
    path, pins = "", list[int]()
    world.table.keeping.pins.disk_budget_bytes = 1000 * RECORD
    while not world.table.counts["disk_full_pages"]:
        path += chr(next(world.letters))
        world.put(path)
        if world.there(path) == [True]:
            pins.append(world.table.keeping.pin(world.mine, key(path), 0, "ssd").number)
            while len(pins) > 1:
                world.table.keeping.unpin(pins.pop(0))
    carried = world.table.counts["carried_pages"]
    kept = len([True for node in world.mine.nodes.values() if node.disk])

    for _ in range(20):
        world.store(world.me, world.other, chr(next(world.letters)))
        world.end_all()
        world.disk.advance(1)

    assert world.table.counts["carried_pages"] == carried
    assert world.table.counts["reclaimed_pages"] == 0
    assert len([True for node in world.mine.nodes.values() if node.disk]) == kept
    world.table.keeping.unpin(pins.pop())
    world.flood(100)
    assert world.table.counts["reclaimed_pages"] > 0, "and it goes on when the pin ends"


# All together


@pytest.mark.parametrize("seed", range(12))
def test_limits_hold_whatever_is_stored_used_pinned_and_lost(seed):
    chance = Random(seed)
    world = LimitedWorld(chance.choice(["through", "back"]), extents=2)
    quota, reserved = chance.randint(6, 12), chance.randint(1, 4)
    world.limit(world.mine, quota=quota, reserved=reserved)
    pins: dict[int, list[str]] = {}
    reached = 0
    for _ in range(400):
        own = world.table.counts["disk_quota_pages"]
        path = "".join(chance.choices("abc", k=chance.randint(1, 4)))
        action = chance.random()
        if action < 0.5:
            space = chance.choice([world.mine, world.other, world.other])
            letter = chr(next(world.letters))
            path = letter + path if space is world.other else path
            world.store(world.me, space, path)
        elif action < 0.6 and path and world.there(path) == [True] and len(pins) < 2:
            pin = world.table.keeping.pin(world.mine, key(path), 0, "ssd")
            pins[pin.number] = [path[:end] for end in range(1, len(path) + 1)]
        elif action < 0.65 and pins:
            number = chance.choice(sorted(pins))
            del pins[number]
            world.table.keeping.unpin(number)
        elif action < 0.75:
            number, _ = world.acquire(world.me, world.mine, path)
            world.table.release(world.me, number)
        else:
            for job in chance.sample(jobs := world.jobs(DiskJob), min(len(jobs), 9)):
                world.end_job(job)
        assert world.mine.disk_bytes <= quota * RECORD
        on_disk = sum(0 in node.disk for node in world.mine.nodes.values())
        if world.table.counts["disk_quota_pages"] == own:
            assert on_disk >= min(reached, reserved), "less than is reserved"
        reached = on_disk
        for paths in pins.values():
            assert all(world.there(*paths)), "a pinned page is gone"
        check(world.table)
    world.end_all()
    assert not world.jobs(DiskCopy)


def test_the_walks_contain_what_they_are_there_for():
    world = LimitedWorld()
    world.limit(world.mine, quota=4, reserved=2)
    for path in ("a", "ab", "b", "bc", "c", "ca"):
        world.put(path)
    world.flood(150)
    counts = world.table.counts
    assert counts["disk_quota_pages"] > 0
    assert counts["disk_kept_pages"] > 0
    assert counts["reclaimed_pages"] > 0


def test_a_segment_whose_pages_are_all_pinned_is_copied_when_tombstones_wait_for_it():
    log = SegmentLog(12, SEGMENT)
    barren, other = Segment(1, SEGMENT, Order(0)), Segment(2, SEGMENT, Order(1))
    for segment in (barren, other):
        segment.state = SegmentState.SEALED
        log.segments[segment.number] = segment
        log.fail(segment.number)

    assert log.victim({1, 2}) is None
    other.order.until = 1
    assert log.victim({1, 2}) is barren, "the tombstones go only after it"


def test_segments_full_of_reserved_pages_are_left_alone_though_a_part_of_a_page_is_free():
    """Three records of two blocks in seven blocks: a copy of such a segment frees nothing."""
    world = DiskWorld(segments=6, segment_bytes=25 * PAGE)
    world.disk.limit(world.mine, 0, 10 * RECORD)
    for letter in "abcdefghij":
        world.store(world.me, world.mine, letter)
        for _ in range(30):
            for job in world.jobs(DiskJob)[:1]:
                world.end_job(job)

    assert world.disk.log.free_segments < 3, "room is wanted"
    assert world.disk.log.stats().carried_bytes == 0


def test_a_page_stays_no_leaf_until_what_was_written_below_it_has_ended(world):
    """The page below left the index meanwhile; it is offered when its write has ended."""
    world.limit(world.mine, quota=9)
    world.space(world.me, (FULL, FULL_2))
    world.put("a")
    world.store(world.me, world.mine, "a", shard=1)
    world.store(world.me, world.mine, "ab", start=1, shard=1)
    world.end_all()
    world.disk.limits.forget(world.node("ab"), 1)  # it stays in memory, so that its node stays
    world.store(world.me, world.mine, "ab", start=1)
    assert not world.disk.limits.shrink(world.mine, 1, 1 << 40), "nothing is a leaf now"

    world.table.residents.drop(world.node("ab"), 0, "corrupt")
    check(world.table)
    world.end_all()
    world.limit(world.mine, quota=1)

    assert world.there("a") == [False]


def test_a_damaged_record_costs_the_segment_that_it_was_to_be_carried_to_nothing(world):
    world.put("a")
    world.flood(3)
    world.table.keeping.pin(world.mine, key("a"), 0, "ssd")
    while not world.jobs(DiskCopy):
        world.store(world.me, world.other, chr(next(world.letters)))
        while world.jobs(DiskJob) and not world.jobs(DiskCopy):
            world.end_job(world.jobs(DiskJob)[0])
    (copy,) = world.jobs(DiskCopy)

    world.end_job(copy, PageCorrupt("other bytes"))

    assert world.there("a") == [False]
    assert not world.disk.log.segments[copy.place.segment].failed
