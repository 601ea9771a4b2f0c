"""Goal: who speaks of rooms of others is refused, and costs the others nothing."""

import pytest

from kvstore.handoff.receiving import LIMBO_S_MAX, Receivers
from kvstore.handoff.states import FailureCode, Patience, State
from tests.handoff.test_cores import NONE, SECOND, SHAPE, announce, senders


@pytest.mark.parametrize("announced", [True, False])
def test_a_decode_engine_with_the_room_of_another_is_refused_and_keeps_its_link(announced):
    """A router has given one room to two. Nobody drained the second one's blocks: after 30 s it
    closed its link, and with it all other handoffs."""
    core, second = senders(), Receivers(SHAPE, 8, 64, Patience())
    core.received(b"L", announce(1, [7, 8, 9]), 0)
    second.linked("p", b"M", 0)
    _, said = second.open(1, "p", 48, 0)
    second.open(2, "p", 16, 0)
    if announced:
        said += second.announce(1, 0, [3, 4, 5], 0)
    answers = [one for told in said for one in core.received(b"M", told.message, 0)]
    assert {one.link for one in answers} == {b"M"}
    for one in answers:
        second.received(b"M", one.message, 0)

    assert second._rooms[1].progress.failure.code == FailureCode.REFUSED
    assert not second.holds_blocks(1)
    for now in range(0, (LIMBO_S_MAX + 2) * SECOND, SECOND):
        second.renew(2, now)
        assert second.tick(now) == NONE
    assert core._rooms[1].progress.state == State.WAITING_FOR_INPUT
    assert core._rooms[1].legs.keys() == {b"L"}
    core.check()
    second.check()
