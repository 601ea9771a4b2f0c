"""Goal: ranks that write to one pool are told places of their own, and all must have ended."""

from kvstore.handoff.effects import EndEngine
from kvstore.handoff.landing_engines import LandingEngines
from kvstore.handoff.messages import Announce, Drained, RangesHead, RangesWritten
from kvstore.handoff.places import PushRange, pack_numbers
from kvstore.handoff.receiving import Receivers
from kvstore.handoff.shape import LinkShare, PoolShape, check_place
from kvstore.handoff.states import Patience
from kvstore.handoff.tables import LinkSource
from tests.handoff.test_landing_engines import BLOCKS, PLACE


def test_memory_for_heads_belongs_to_one_handoff_until_its_writes_have_ended():
    engines = LandingEngines(100)
    engines.up(1, PLACE, range(1_000, 1_100))
    for room in (1, 2, 3):
        engines.enter(room, 1)
    assert [engines.stage(1, 40), engines.stage(2, 30)] == [range(40), range(40, 70)]
    assert engines.stage(1, 20) == range(70, 90)
    assert engines.stage(3, 11) is None
    assert engines.stage(3, 10) == range(90, 100)
    engines.leave(2)
    assert engines.stage(3, 30) == range(40, 70)
    engines.doubt(1)
    engines.leave(1)
    assert engines.stage(3, 1) is None, "bytes may still arrive"
    engines.ended(1)
    engines.up(2, PLACE, range(5_000, 5_100))
    engines.enter(4, 1)
    assert engines.stage(4, 100) == range(100)


HALVES = [LinkShare(range(1), heads, 32, is_staged=True, has_aux=not heads[0])
          for heads in ((0, 1), (1, 2))]  # fmt: skip
TWO_HEADS = PoolShape(1, 1, 64, 1, BLOCKS, heads=(0, 2))


def with_two_ranks(staged: range) -> tuple[Receivers, dict[bytes, Announce]]:
    """A handoff from two ranks of prefill that have one head each; and what they are told."""
    core = Receivers(TWO_HEADS, 8, 64, Patience())
    core.engine_up(1, PLACE, staged)
    links = {b"%d" % rank: LinkSource(rank, HALVES[rank], writes=True) for rank in (0, 1)}
    core.linked("p", links, 0)
    core.open(1, "p", 2, 0)
    effects = core.announce(1, 0, [4, 5], 0)
    return core, {one.link: one.message for one in effects}


def test_each_rank_is_told_a_place_of_its_own_for_its_heads_and_they_are_found_there():
    core, told = with_two_ranks(range(1_000, 1_128))
    places = [told[link].place for link in (b"0", b"1")]
    assert [int.from_bytes(one.planes, "little") for one in places] == [1_000, 1_064]
    for rank, place in enumerate(places):
        check_place(HALVES[rank], place, [4, 5])
    head = RangesWritten(1, pack_numbers(PushRange(0, 1, 1)), bytes(16))
    landing, _, _ = core.arriving(b"1", head, 0)
    assert landing.staged_at == [64 + 32]
    assert [rows.tolist() for rows in landing.rows] == [[5]]


def test_heads_for_which_there_is_no_memory_come_over_the_link():
    core, told = with_two_ranks(range(1_000, 1_064))
    assert told[b"0"].place is not None
    assert told[b"1"].place is None
    head = RangesWritten(1, pack_numbers(PushRange(0, 0, 2)), bytes(16))
    assert core.arriving(b"1", head, 0)[0] is None, "it cannot have written"
    core, told = with_two_ranks(range(1_000, 1_063))
    assert told[b"0"].place is told[b"1"].place is None
    assert core.counts["unstaged_handoffs"] == 1
    core.engine_ended(1, 0)
    assert core.arriving(b"1", RangesHead(1, head.ranges, head.digests), 0)[0] is not None


def test_blocks_are_held_until_no_rank_can_write_to_them_any_more():
    core, _ = with_two_ranks(range(1_000, 1_128))
    core.abort(1, 0)
    core.received(b"0", Drained(1), 0)
    assert core.tick(1) == [], "the other rank may be writing"
    assert core.holds_blocks(1)
    core.received(b"1", Drained(1), 2)
    assert not core.holds_blocks(1)

    core, _ = with_two_ranks(range(1_000, 1_128))
    core.abort(1, 0)
    core.received(b"0", Drained(1), 0)
    core.received(b"1", Drained(1, doubtful=True), 0)
    assert core.holds_blocks(1)
    assert core.tick(1) == [EndEngine(1)]
    core.engine_ended(1, 2)
    assert not core.holds_blocks(1)
