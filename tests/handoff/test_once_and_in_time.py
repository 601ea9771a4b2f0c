"""Goal: a room is used once at each side, and no handoff lasts longer than all of it may."""

import pytest

from kvstore.handoff.messages import Abort, Drained, Failed, RenewRoom
from kvstore.handoff.receiving import Receivers
from kvstore.handoff.sending import Senders
from kvstore.handoff.states import FailureCode, Patience, State
from kvstore.protocol.errors import InvalidArgument
from tests.handoff.test_cores import FAILURE, SECOND, SHAPE, announce

PATIENCE = Patience(bootstrapping_s=3, waiting_s=5, transferring_s=2, total_s=20)


def decode() -> Receivers:
    core = Receivers(SHAPE, 8, 64, PATIENCE)
    core.linked("p", b"L", 0)
    return core


@pytest.mark.parametrize("ended", [State.FAILED, State.SUCCESS])
def test_decode_refuses_a_room_that_it_has_seen(ended):
    core = decode()
    core.open(1, "p", 48, 0)
    if ended is State.SUCCESS:
        core._rooms[1].progress.advance(ended, 0)
    core.close(1, 0)
    assert core.describe(0) == []

    with pytest.raises(InvalidArgument, match="used before"):
        core.open(1, "p", 48, 0)
    with pytest.raises(InvalidArgument, match="used before"):
        core.open(1, "another", 48, 0)
    assert core.describe(0) == []
    core.open(2, "p", 48, 0)


def test_prefill_refuses_a_room_that_its_engine_has_used():
    core = Senders(SHAPE, PATIENCE)
    core.open(1, 48, 0)
    core.close(1, 0)
    with pytest.raises(InvalidArgument, match="used before"):
        core.open(1, 48, 4 * SECOND)
    told = [one.message for one in core.received(b"M", announce(1, [7, 8, 9]), 4 * SECOND)]
    assert [type(one) for one in told] == [Failed, Drained]
    assert told[0].failure.code == FailureCode.REFUSED
    assert core.describe(4 * SECOND) == []


def test_a_room_that_a_peer_has_ended_before_it_came_fails_with_its_reason():
    core = Senders(SHAPE, PATIENCE)
    core.received(b"L", RenewRoom(2), 0)  # only decode has spoken of it, and it is forgotten
    core.received(b"L", Abort(2, FAILURE), 0)
    core.tick(4 * SECOND)
    assert core.describe(4 * SECOND) == []

    told = [one.message for one in core.received(b"M", announce(2, [7, 8, 9]), 4 * SECOND)]
    assert [type(one) for one in told] == [Failed, Drained]
    assert told[0].failure == FAILURE
    progress, effects = core.open(2, 48, 4 * SECOND)
    assert (progress.state, progress.failure, effects) == (State.FAILED, FAILURE, [])
    core.close(2, 4 * SECOND)
    with pytest.raises(InvalidArgument, match="used before"):
        core.open(2, 48, 4 * SECOND)


@pytest.mark.parametrize("announced", [False, True])
def test_decode_ends_a_handoff_at_its_total_deadline_although_it_goes_on(announced):
    core = decode()
    core.open(1, "p", 48, 0)
    if announced:
        core.announce(1, 0, [3, 4, 5], 0)
    for second in range(1, 20):
        core.renew(1, second * SECOND)
        core.received(b"L", RenewRoom(1), second * SECOND)
        assert core.tick(second * SECOND) == []
    effects = core.tick(20 * SECOND)

    assert core._rooms[1].progress.failure.code == FailureCode.DEADLINE
    assert "not complete after 20.0 s" in core._rooms[1].progress.failure.message
    assert [type(one.message) for one in effects] == [Abort]


@pytest.mark.parametrize("announced", [False, True])
def test_prefill_ends_a_handoff_at_its_total_deadline_although_it_goes_on(announced):
    core = Senders(SHAPE, PATIENCE)
    core.open(1, 48, 0)
    core.received(b"L", announce(1, [7, 8, 9]) if announced else RenewRoom(1), 0)
    for second in range(1, 20):
        core.renew(1, second * SECOND)
        core.received(b"L", RenewRoom(1), second * SECOND)
        assert core.tick(second * SECOND) == []
    effects = core.tick(20 * SECOND)

    assert [type(one.message) for one in effects] == [Failed, Drained]
    assert effects[0].message.failure.code == FailureCode.DEADLINE
    assert not core.holds_blocks(1)
