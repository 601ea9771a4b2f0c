"""A power cut can leave a segment's file shorter than it was made."""

from kvstore.state.disk.log import SegmentLog, SegmentState
from kvstore.state.tree.places import footer_bytes
from tests.state.world import hold

SEGMENT_BYTES = 256 << 10


def test_a_found_segment_without_room_for_its_footer_is_not_sealed_but_can_be_reclaimed():
    log = SegmentLog(4, SEGMENT_BYTES)

    log.adopt(1, 0, 0, 0, sealed=False)
    log.adopt(2, SEGMENT_BYTES, 8192, 1, sealed=False)
    log.adopt(3, 8192 + footer_bytes(1) - 1, 8192, 1, sealed=False)

    assert [segment.number for segment in log.full] == [2], "only this one gets a footer"
    assert log.segments[1].state is log.segments[3].state is SegmentState.SEALED
    victim = log.victim()
    assert victim is not None
    assert victim.number == 1
    hold(log.checks())


def test_a_failed_segment_costs_no_healthy_one():
    log = SegmentLog(16, SEGMENT_BYTES)
    log.adopt(1, SEGMENT_BYTES, 8192, 1, sealed=True)
    log.adopt(2, SEGMENT_BYTES, 8192, 1, sealed=False)
    assert log.victim() is None, "there is room enough"

    log.fail(2)
    assert log.wants_reclaim
    assert log.victim() is None, "its footer is on its way, and no other is in its stead"

    log.sealed(2)
    victim = log.victim()
    assert victim is not None
    assert victim.number == 2
