"""Goal: what comes late, twice, from others or out of order changes nothing; LIMBO has a bound."""

import msgspec
import numpy as np
import pytest

from kvstore.handoff import messages, receiving, rooms
from kvstore.handoff.effects import EndLink, SendTo
from kvstore.handoff.job_queues import JOBS_MAX
from kvstore.handoff.messages import (
    RANGES_MAX,
    Abort,
    Announce,
    Done,
    Drained,
    Failed,
    HandoffPing,
    RangesHead,
    RenewRoom,
    encode_message,
    read_from_decode,
    read_from_prefill,
)
from kvstore.handoff.places import (
    AUX_PLANE,
    RANGE_BYTES,
    PushRange,
    joined,
    pack_numbers,
)
from kvstore.handoff.receiving import ABORTS_MAX, LIMBO_S_MAX, Receivers
from kvstore.handoff.sending import Senders
from kvstore.handoff.shape import PoolShape
from kvstore.handoff.states import FailureCode, HandoffFailure, HandoffSide, Layer, Patience, State
from kvstore.protocol.errors import CapacityError, InvalidArgument, ProtocolError

SECOND = 1_000_000_000
SHAPE = PoolShape(4, 2, 64, 16, 40)
FAILURE = HandoffFailure(FailureCode.ABORTED, HandoffSide.DECODE, 0, Layer.PROTOCOL, "for a test")
NONE = []
EMPTY = np.zeros(0, dtype=np.uint64)
GENERATIONS = np.full(1, 5, dtype=np.uint64)


def announce(room: int, blocks: list[int], tokens: int | None = None) -> Announce:
    return Announce(room, tokens or 16 * len(blocks), 0, pack_numbers(blocks), 0)


def head(room: int, *ranges: PushRange) -> RangesHead:
    packed = pack_numbers([number for one in ranges for number in one])
    return RangesHead(room, packed, bytes(16 * len(ranges)))


def senders() -> Senders:
    core = Senders(SHAPE, Patience())
    core.open(1, 48, 0)
    return core


def receivers(slots: int = 8) -> Receivers:
    core = Receivers(SHAPE, slots, 64, Patience())
    core.linked("p", b"L", 0)
    core.open(1, "p", 48, 0)
    core.announce(1, 0, [3, 4, 5], 0)
    return core


def test_neighbours_on_both_sides_are_one_range():
    assert joined(range(5, 9), [1, 2, 3, 4], [7, 8, 9, 10], 99) == [(5, 4)]
    assert joined(range(5, 9), [1, 2, 3, 4], [7, 8, 1, 2], 99) == [(5, 2), (7, 2)]
    assert joined(range(5, 9), [1, 2, 9, 10], [7, 8, 9, 10], 99) == [(5, 2), (7, 2)]
    assert joined(range(5, 9), [1, 2, 3, 4], [7, 8, 9, 10], 3) == [(5, 3), (8, 1)]


def test_a_repeated_foreign_or_late_message_changes_nothing_at_prefill():
    core = senders()
    progress = core._rooms[1].progress
    core.received(b"L", announce(1, [7, 8, 9]), 0)
    assert progress.state == State.WAITING_FOR_INPUT
    assert core.received(b"L", announce(1, [1, 2, 3]), 0) == NONE
    assert core.received(b"M", Abort(1, FAILURE), 0) == [SendTo(b"M", Drained(1))]
    assert core.received(b"M", Done(1), 0) == NONE
    assert progress.state == State.WAITING_FOR_INPUT
    assert core._rooms[1].legs[b"L"].there == [7, 8, 9]
    assert core.received(b"L", Abort(1, FAILURE), 0) == [SendTo(b"L", Drained(1))]
    assert core.received(b"L", Abort(1, FAILURE), 0) == [SendTo(b"L", Drained(1))]
    core.close(1, 0)
    assert core.received(b"L", Abort(1, FAILURE), 0) == [SendTo(b"L", Drained(1))]
    assert [type(one.message) for one in core.received(b"L", RenewRoom(1), 0)] == [Failed, Drained]
    assert core.received(b"L", Done(1), 0) == NONE
    assert core.counts["repeated_messages"] == 1
    assert core.counts["foreign_messages"] == 2
    with pytest.raises(InvalidArgument, match="used before"):
        core.open(1, 48, 0)
    core.check()


@pytest.mark.parametrize(
    "wrong",
    [
        announce(1, [7, 8]),
        announce(1, [7, 8, 8]),
        announce(1, [7, 8, 9], 47 - 16),
        Announce(1, 48, 49, b"", 0),
        Announce(1, 48, 0, b"abc", 0),
        Announce(1, 48, -1, pack_numbers([1, 2, 3]), 0),
        Announce(1, 48, 0, pack_numbers([1, 2, 3]), -1),
        Done(1),
    ],
)
def test_a_wrong_message_ends_its_own_handoff_only_and_decode_is_told(wrong):
    core = senders()
    core.open(2, 16, 0)
    effects = core.received(b"L", wrong, 0)

    assert [type(one.message) for one in effects] == [Failed, Drained]
    assert core._rooms[1].progress.state == State.FAILED
    assert core._rooms[2].progress.state == State.BOOTSTRAPPING
    core.check()


def test_prefill_submits_few_jobs_at_a_time_and_drained_waits_for_them():
    core = senders()
    core.received(b"L", announce(1, [7, 9, 11]), 0)
    submitted = []
    for layer in (0, 1):
        for position in range(3):
            positions = range(position, position + 1)
            effects = core.push(1, range(layer, layer + 1), positions, [position], EMPTY, 0)
            submitted += [one.job for one in effects]
    assert len(submitted) == JOBS_MAX
    assert core.received(b"L", Abort(1, FAILURE), 0) == NONE
    assert core.holds_blocks(1)
    for job in submitted[:-1]:
        assert core.completed(job.number, None, 0) == NONE
    assert core.completed(submitted[-1].number, None, 0) == [SendTo(b"L", Drained(1))]
    assert not core.holds_blocks(1)
    core.check()


@pytest.mark.parametrize(("block_bytes", "ranges"), [(64, [4]), (200 * 1024, [2, 2])])
def test_layers_that_wait_for_the_link_are_joined_until_they_are_large(
    block_bytes: int, ranges: list[int]
) -> None:
    core = Senders(PoolShape(4, 2, block_bytes, 16, 40), Patience())
    core.open(1, 48, 0)
    core.received(b"L", announce(1, [7, 9, 11]), 0)
    submitted = []
    for layer in (0, 1):
        for position in range(3):
            positions = range(position, position + 1)
            effects = core.push(1, range(layer, layer + 1), positions, [position], GENERATIONS, 0)
            submitted += [one.job for one in effects]
    effects = core.finish(1, b"aux", 0)
    for job in submitted:
        effects += core.completed(job.number, None, 0)
    *joined_jobs, aux = [one.job for one in effects]

    assert [len(job.ranges) for job in submitted] == [2] * JOBS_MAX
    assert [len(job.ranges) for job in joined_jobs] == ranges
    places = [place for job in joined_jobs for place in job.ranges]
    assert places == [PushRange(plane, at, 1) for at in (1, 2) for plane in (2, 3)]
    assert [at for job in joined_jobs for at in job.sources] == [1, 1, 2, 2]
    assert [at for job in joined_jobs for at in job.blocks] == [1, 2]
    assert [at for job in joined_jobs for at in job.generations] == [5, 5]
    assert aux.aux == b"aux"
    core.check()


def test_an_abort_before_the_request_came_to_prefill_fails_it_when_it_comes():
    core = Senders(SHAPE, Patience())
    assert core.received(b"L", Abort(5, FAILURE), 0) == [SendTo(b"L", Drained(5))]
    progress, effects = core.open(5, 48, 0)

    assert progress.state == State.FAILED
    assert effects == NONE


def test_what_prefill_must_not_send_ends_that_handoff_and_is_not_written():
    for wrong in [
        head(1, PushRange(4, 0, 1)),
        head(1, PushRange(0, 3, 1)),
        head(1, PushRange(0, 0, 1), PushRange(0, 0, 1)),
        head(1, PushRange(AUX_PLANE, 3, 8)),
        head(1, PushRange(AUX_PLANE, 7, 65)),
    ]:
        core = receivers()
        landing, _, effects = core.arriving(b"L", wrong, 0)
        assert landing is None
        assert [type(one.message) for one in effects] == [Abort]
        assert core._rooms[1].progress.failure.code == FailureCode.PROTOCOL
        core.check()


def test_a_range_across_blocks_that_are_no_neighbours_at_decode_is_not_written():
    core = receivers()
    core.open(2, "p", 64, 0)
    core.announce(2, 0, [10, 11, 20, 21], 0)
    landing, _, _ = core.arriving(b"L", head(2, PushRange(0, 2, 2), PushRange(1, 0, 2)), 0)
    assert landing.targets == [20, 10]
    core.landed(landing, None, "", 0)
    landing, _, effects = core.arriving(b"L", head(2, PushRange(2, 1, 2)), 0)

    assert landing is None
    assert [type(one.message) for one in effects] == [Abort]


def test_ranges_of_other_links_and_of_ended_rooms_are_not_written():
    core = receivers()
    assert core.arriving(b"M", head(1, PushRange(0, 0, 1)), 0) == (None, 64, [])
    assert core.arriving(b"L", head(8, PushRange(0, 0, 2)), 0) == (None, 128, [])
    core.abort(1, 0)
    assert core.arriving(b"L", head(1, PushRange(0, 0, 1)), 0) == (None, 64, [])
    assert core.counts["late_ranges"] == 3
    with pytest.raises(ProtocolError):
        core.arriving(b"L", head(1, PushRange(0, 0, 1 << 20)), 0)
    with pytest.raises(ProtocolError):
        core.arriving(b"L", RangesHead(1, b"abc", b""), 0)


def test_blocks_stay_in_limbo_until_prefill_has_drained_and_nothing_lands():
    core = receivers()
    landing, _, _ = core.arriving(b"L", head(1, PushRange(0, 0, 1)), 0)
    core.abort(1, 0)
    core.received(b"L", Drained(1), 0)
    assert core.holds_blocks(1)
    core.open(2, "p", 16, 0)
    with pytest.raises(InvalidArgument, match="another handoff"):
        core.announce(2, 0, [4], 0)
    core.landed(landing, None, "", 0)
    assert not core.holds_blocks(1)
    core.announce(2, 0, [4], 0)
    core.check()


def test_an_abort_is_sent_again_and_then_the_link_is_closed_unless_another_handoff_lives_on_it():
    core = receivers()
    core.open(2, "p", 16, 0)
    assert [type(one.message) for one in core.abort(1, 0)] == [Abort]
    asked = []
    for second in range(1, 9):
        core.renew(2, second * SECOND)
        asked += core.tick(second * SECOND)
    assert len(asked) == ABORTS_MAX - 1
    core.abort(2, 9 * SECOND)
    assert core.tick(10 * SECOND) == [EndLink(b"L")]
    core.closed(b"L", FailureCode.PEER_CLOSED, "closed", 10 * SECOND)
    assert core.holds_blocks(1)
    core.settled(b"L")
    assert not core.holds_blocks(1)
    core.check()


def test_no_handoff_begins_with_a_peer_for_which_a_tenth_of_the_pool_is_in_limbo():
    core = receivers()
    core.abort(1, 0)
    assert core.limbo_blocks("p") == 3
    core.open(2, "p", 32, 0)
    core.announce(2, 0, [10, 11], 0)
    core.abort(2, 0)
    with pytest.raises(CapacityError) as caught:
        core.open(3, "p", 16, 0)
    assert caught.value.field == "limbo"
    core.open(4, "another", 16, 0)
    core.received(b"L", Drained(1), 0)
    core.open(3, "p", 16, 0)


@pytest.mark.parametrize("read", [read_from_decode, read_from_prefill])
def test_every_wrong_field_of_a_message_is_refused(read):
    for tag in range(10):
        for fields in [[-1], [1 << 63], ["a"], [None], [1, 2], [1, 2, 3, 4, 5], [[]], [1, ["x"]]]:
            with pytest.raises(ProtocolError):
                read(msgspec.msgpack.encode([tag or 99, *fields, {}]) + b"\0")
    for garbage in (
        b"",
        b"\xc1",
        b"\x93\x01",
        b"\xff" * 9,
        b"\x92\x01" + b"\x91" * 60_000 + b"\xc0",
    ):
        with pytest.raises(ProtocolError):
            read(garbage)
    long = HandoffFailure("x", HandoffSide.DECODE, 0, Layer.PROTOCOL, "y" * 201)
    with pytest.raises(ProtocolError, match="too long"):
        read(encode_message(Abort(1, long) if read is read_from_decode else Failed(1, long)))
    assert read(encode_message(HandoffPing())) == HandoffPing()


def test_the_messages_have_numbers_that_do_not_change():
    kinds = [HandoffPing, RenewRoom, Announce, Abort, Done, Failed, Drained, RangesHead]

    assert [kind.__struct_config__.tag for kind in kinds] == list(range(1, 9))
    assert messages.RANGES_BYTES_MAX == 1 << 20


@pytest.mark.parametrize("linked", [True, False])
def test_prefill_is_told_of_what_was_given_up_before_there_was_a_link(linked):
    core = Receivers(SHAPE, 1, 64, Patience())
    for room in (1, 2):  # the aux slot is free again at once
        core.open(room, "p", 48, 0)
        core.close(room, 0)
    assert [one.missing for one in core.describe(0)] == [[0], [0]]
    if linked:
        effects = core.linked("p", b"L", 1)
        assert [(type(one.message), one.message.room) for one in effects] == [
            (Abort, 1),
            (Abort, 2),
        ]
    else:
        assert core.unreachable("p", FailureCode.UNREACHABLE, "nobody", 1) == []

    assert core.describe(1) == []
    core.check()


@pytest.mark.parametrize("message", [announce(1, [7, 8, 9]), RenewRoom(1)])
def test_decode_that_comes_after_the_end_at_prefill_is_told_why_and_fails_at_once(message):
    core = senders()
    core.abort(1, 0)  # decode has not spoken yet, so nobody could be told
    effects = core.received(b"L", message, 0)
    assert [type(one.message) for one in effects] == [Failed, Drained]
    assert effects[0].message.failure.code == FailureCode.ABORTED

    other = receivers()
    for one in effects:
        other.received(b"L", one.message, 0)
    assert other._rooms[1].progress.failure == effects[0].message.failure
    assert not other.holds_blocks(1)
    other.check()


def test_drained_ends_a_handoff_at_decode_also_if_failed_is_lost():
    core = receivers()
    landing, _, _ = core.arriving(b"L", head(1, PushRange(0, 0, 1)), 0)
    assert core.received(b"L", Drained(1), 0) == NONE
    assert core._rooms[1].progress.failure.code == FailureCode.PROTOCOL
    assert core.holds_blocks(1), "some bytes are being written"
    core.landed(landing, None, "", 0)
    assert not core.holds_blocks(1)
    core.check()


def test_a_room_that_is_open_is_not_opened_again_when_it_is_forgotten(monkeypatch):
    monkeypatch.setattr(rooms, "ROOMS_KEPT", 8)
    core = receivers()
    for room in range(11, 20):
        core.open(room, "p", 16, 0)
        core.close(room, 0)
    assert 1 not in core._seen
    with pytest.raises(InvalidArgument, match="used before"):
        core.open(1, "p", 48, 0)
    assert core.holds_blocks(1)
    core.check()


def test_a_peer_that_never_drains_loses_its_link_although_others_live_on_it():
    core = receivers()
    core.open(2, "p", 16, 0)
    core.abort(1, 0)
    ended = []
    for second in range(1, LIMBO_S_MAX + 1):
        core.renew(2, second * SECOND)
        ended += [(second, one) for one in core.tick(second * SECOND) if isinstance(one, EndLink)]

    assert ended == [(LIMBO_S_MAX, EndLink(b"L"))]


def test_layers_of_the_same_blocks_wait_as_one_job_while_the_link_is_busy():
    core = Senders(SHAPE, Patience())
    core.open(1, 16 * 8, 0)
    core.received(b"L", announce(1, list(range(8))), 0)

    def push(layer: int, position: int):
        positions = range(position, position + 1)
        effects = core.push(1, range(layer, layer + 1), positions, [position], EMPTY, 0)
        return [one.job for one in effects]

    submitted = [job for position in range(JOBS_MAX) for job in push(0, position)]
    assert len(submitted) == JOBS_MAX
    assert [push(layer, 7) for layer in (0, 1)] == [[], []]
    core.check()
    (effect,) = core.completed(submitted[0].number, None, 0)
    assert [place.plane for place in effect.job.ranges] == [0, 1, 2, 3]
    assert effect.job.sources == effect.job.targets == [7] * 4
    core.check()


def test_a_head_with_too_many_ranges_is_refused_before_it_is_unpacked(monkeypatch):
    monkeypatch.setattr(receiving, "unpack_ranges", lambda *_: pytest.fail("it was unpacked"))
    receivers = Receivers(SHAPE, 1, 1_024, Patience())
    head = RangesHead(1, bytes(RANGE_BYTES * (RANGES_MAX + 1)), b"")

    with pytest.raises(ProtocolError, match="bytes of ranges"):
        receivers.arriving(b"link", head, 0)
