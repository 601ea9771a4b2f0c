"""Goal: a page that was just stored outlives what others have used, and choosing stays cheap."""

from kvstore.state.choice.eviction import GRACE_NS, GRACELESS_NS
from kvstore.state.table.invariants import check
from tests.state.world import FULL, FULL_2, World, key

SECOND_NS = 1_000_000_000


class Full(World):
    """Memory that is full of one page for each letter of ``abcdefgh``, stored a second ago."""

    def __init__(self) -> None:
        super().__init__(extents=1, slots_each=8)
        self.table.moment.now_ns = SECOND_NS
        self.me = self.process()
        self.mine = self.space(self.me)
        for letter in "abcdefgh":
            self.store(self.me, self.mine, letter)
        self.removed()
        self.later(SECOND_NS)

    def later(self, ns: int) -> None:
        self.table.moment.now_ns += ns

    def use(self, letter: str) -> None:
        lease, _ = self.acquire(self.me, self.mine, letter)
        self.table.release(self.me, lease)

    def evicted_for(self, letter: str) -> str:
        """What leaves when another page is stored."""
        self.store(self.me, self.mine, letter)
        check(self.table)
        (gone,) = self.removed("evicted")
        return next(one for one in "abcdefgh" if key(one) == gone)


def test_a_young_page_that_nobody_has_used_outlives_one_that_was_used():
    full = Full()
    full.use("d")
    assert full.evicted_for("x") == "d"


def test_an_unused_page_goes_first_when_it_is_no_longer_young():
    full = Full()
    full.later(GRACE_NS)
    full.use("d")
    assert full.evicted_for("x") == "a"


def test_young_pages_go_in_their_order_when_there_is_nothing_else():
    full = Full()
    assert [full.evicted_for(letter) for letter in "xyz"] == ["a", "b", "c"]


def test_that_nothing_but_young_pages_was_found_holds_for_a_moment_and_no_longer():
    full = Full()
    assert full.evicted_for("x") == "a", "all are young"
    full.use("g")
    full.later(GRACELESS_NS - 1)
    assert full.evicted_for("y") == "b", "nothing is passed over"
    full.later(1)
    assert full.evicted_for("z") == "g", "the others are looked at again"


def test_leaves_that_are_passed_over_are_not_looked_at_again_by_each_choice():
    full = Full()
    full.use("h")
    full.use("g")
    looks = full.table.eviction._passed
    assert full.evicted_for("x") == "h"
    assert len(looks["red", 4096].leaves) == 6
    full.later(GRACE_NS - 2 * SECOND_NS)  # those are out of their queue still
    assert full.evicted_for("y") == "g"
    full.later(SECOND_NS)
    assert [full.evicted_for(letter) for letter in "zuv"] == ["a", "b", "c"], "young no more"


def test_a_leaf_that_was_passed_over_may_go_once_it_was_used():
    full = Full()
    full.use("h")
    assert full.evicted_for("x") == "h"
    full.use("c")
    full.later(1)
    assert full.evicted_for("y") == "c"


def test_a_leaf_that_was_passed_over_may_leave_by_itself():
    full = Full()
    full.use("h")
    assert full.evicted_for("x") == "h"
    full.table.residents.drop(full.mine.nodes[key("a")], 0, "operator")
    full.store(full.me, full.mine, "y")  # where "a" was
    full.removed()
    full.later(GRACE_NS)
    assert full.evicted_for("z") == "b"


def test_a_leaf_that_was_passed_over_may_get_another_shard_after_the_choice():
    world = World(extents=1, slots_each=4)
    world.table.moment.now_ns = SECOND_NS
    me = world.process()
    mine = world.space(me, (FULL, FULL_2))
    for letter in "abde":
        world.store(me, mine, letter)
    for letter in "de":
        world.table.release(me, world.acquire(me, mine, letter)[0])
    world.table.moment.now_ns += SECOND_NS
    number, _, put = world.begin(me, mine, "a", shard=1)
    assert put.slots, "where the first of those used was; the young ones were passed over"
    world.table.moment.now_ns += SECOND_NS
    world.commit(me, number)
    world.table.release(me, world.acquire(me, mine, "b")[0])
    check(world.table)
