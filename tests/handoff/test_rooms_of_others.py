"""Goal: who speaks of rooms of others is refused, and costs the others nothing."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.handoff import unopened
from kvstore.handoff.messages import RenewRoom
from kvstore.handoff.receiving import LIMBO_S_MAX, Receivers
from kvstore.handoff.rooms import ROOM_MAX
from kvstore.handoff.sending import Senders
from kvstore.handoff.states import FailureCode, Patience, State
from tests.handoff.test_cores import NONE, SECOND, SHAPE, announce, senders
from tests.handoff.test_mad_peers import SPEAKERS, codes_of, linked_from


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


def test_rooms_that_a_peer_makes_up_let_no_refused_room_of_another_be_forgotten(monkeypatch):
    """Prefill would begin what it has refused: decode has given its blocks to others by then."""
    monkeypatch.setattr(unopened, "MISSED_KEPT", 8)
    monkeypatch.setattr(unopened, "ROOMS_MAX", 1)
    core = Senders(SHAPE, Patience())
    linked_from(core, A="10.0.0.1", C="10.0.0.2", D="10.0.0.2", E="10.0.0.2")
    core.received(b"C", announce(1, [1]), 0)
    refused = [(b"A", 11), (b"A", 12), (b"D", 21), (b"D", 22)]
    for link, room in refused:
        assert codes_of(core.received(link, RenewRoom(room), 0)) == ["refused"]
    for number in range(100):
        core.received(b"E", RenewRoom(ROOM_MAX - number), 0)
    core.open(1, 16, 0)  # there is a place again

    for link, room in refused:
        assert codes_of(core.received(link, announce(room, [1]), 0)) == ["refused"]
    assert core.describe(0)[0].room == 1
    assert core.open(11, 16, 0)[0].failure.message == unopened.WHY_FULL
    assert codes_of(core.received(b"E", announce(ROOM_MAX - 99, [1]), 0)) == ["refused"]
    assert codes_of(core.received(b"E", announce(ROOM_MAX, [1]), 0)) == [], "its own is forgotten"
    core.check()


SPOKEN = st.lists(st.tuples(SPEAKERS, st.booleans()), max_size=40)


@given(SPOKEN)
def test_of_too_many_rooms_the_peer_with_most_forgets_its_oldest(spoken):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unopened, "MISSED_KEPT", 4)
        missed, kept = unopened.MissedRooms(), []
        for room, (peer, comes) in enumerate(spoken):
            missed.refuse(room, 0, peer)
            kept.append((peer, room))
            if len(kept) > 4:
                gone = [one for one in kept if one[1] not in missed]
                assert len(gone) == 1
                of = Counter(one.address for one, _ in kept)
                own = Counter(one for one, _ in kept)
                ((loser, oldest),) = gone
                assert of[loser.address] == max(of.values())
                assert own[loser] == max(own[one] for one in own if one[0] == loser.address)
                assert oldest == min(number for one, number in kept if one == loser)
                kept.remove(gone[0])
            if comes and room in missed:
                assert missed.take(room).message == unopened.WHY_FULL
                kept.remove((peer, room))
        assert all(room in missed for _, room in kept)
        assert missed._of.keys() == {peer for peer, _ in kept}
