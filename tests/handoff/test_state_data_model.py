"""Goal: whatever comes over the wire, no state data counts that was not sent for its place.

Both cores run without managers: each job that prefill submits is carried out here, whole, changed,
or never.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.handoff.effects import PushJob, SendTo, Submit
from kvstore.handoff.memory import AuxSlots
from kvstore.handoff.messages import (
    Abort,
    Announce,
    Drained,
    Failed,
    LandingPlace,
    RangesHead,
    RangesWritten,
)
from kvstore.handoff.places import AUX_PLANE, PLANES_MAX, STATE_PLANE, pack_numbers
from kvstore.handoff.receiving import Receivers
from kvstore.handoff.sending import Senders
from kvstore.handoff.staging import Staging
from kvstore.handoff.states import FailureCode, Patience, State
from kvstore.mover.memory import memory_at
from kvstore.mover.ranges import Places, digest_ranges
from kvstore.protocol.errors import CapacityError, InvalidArgument, ProtocolError
from tests.handoff.pair import BLOCK_TOKENS
from tests.handoff.stateful import KV, STATES, StatefulMemory, positions_of

SECOND = 1_000_000_000
ROOM = 9
LINK = b"L"


class TwoCores:
    """Prefill and decode with state data, and one link."""

    def __init__(self) -> None:
        self.here, self.there = StatefulMemory(), StatefulMemory()
        shape = self.here.pool.shape
        self.senders = Senders(shape, Patience())
        self.receivers = Receivers(shape, 8, 4_096, Patience())
        self.aux = AuxSlots(8, 4_096)
        self.receivers.linked("p", LINK, 0)
        self.jobs: list[PushJob] = []

    def open(self, count: int, room: int = ROOM) -> None:
        self.take(self.senders.open(room, count * BLOCK_TOKENS, 0)[1])
        self.take(self.receivers.open(room, "p", count * BLOCK_TOKENS, 0)[1])

    def announce(
        self, first: int, blocks: Sequence[int], states: Mapping[str, Sequence[int]], room=ROOM
    ) -> None:
        self.take(self.receivers.announce(room, first * BLOCK_TOKENS, blocks, 0, states))

    def push(self, name: str, positions: range, blocks: list[int], room: int = ROOM) -> None:
        self.here.write(room, name, positions, blocks)
        if name == "kv":
            now = self.here.pool.generations(blocks)
            self.take(self.senders.push(room, range(2), positions, blocks, now, 0))
        else:
            now = self.here.pool.state_generations(name, blocks)
            self.take(self.senders.push_state(room, name, positions, blocks, now, 0))

    def take(self, effects: Sequence[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Submit):
                self.jobs.append(effect.job)
            elif isinstance(effect, SendTo) and isinstance(effect.message, Announce | Abort):
                self.take(self.senders.received(LINK, effect.message, 0))
            elif isinstance(effect, SendTo) and isinstance(effect.message, Drained | Failed):
                self.take(self.receivers.received(LINK, effect.message, 0))

    def carry_out(self, job: PushJob, *, changed: bool = False) -> None:
        """Copy the bytes of a job to where decode wants them, perhaps with one bit changed."""
        reading, writing = Staging(), Staging()
        sources, digests = reading.read(self.here.pool, job)
        head = RangesHead(job.room, pack_numbers(job.ranges), digests)
        landing, size, effects = self.receivers.arriving(LINK, head, 0)
        assert size == sum(length for _, length in sources)
        self.take(effects)

        def receive(places: Places, seeds: bytes) -> bytes:
            for source, target in zip(sources, places, strict=True):
                memory_at(*target)[:] = memory_at(*source)
            if changed:
                memory_at(*places[-1])[-1] ^= 1
            return digest_ranges(places, seeds) if seeds else b""

        if landing is not None:
            right = writing.land(self.there.pool, self.aux, landing, receive)
            code = None if right else FailureCode.DIGEST
            self.take(self.receivers.landed(landing, code, "", 0))
        self.take(self.senders.completed(job.number, None, 0))

    @property
    def state(self) -> State:
        (status,) = self.receivers.describe(0)
        return State[status.state]


@given(st.data())
def test_a_handoff_with_state_data_succeeds_exactly_if_every_job_arrives_unchanged(data):
    cores = TwoCores()
    count = data.draw(st.integers(1, 7))
    first = data.draw(st.integers(0, count))
    sizes = {"kv": KV[1], **{name: shape[1] for name, (_, shape, _) in STATES.items()}}
    places = {name: positions_of(name, count) for name in STATES} | {"kv": range(count)}

    def sample(name: str, number: int) -> list[int]:
        blocks = st.lists(st.integers(0, sizes[name] - 1), unique=True, min_size=number,
                          max_size=number)  # fmt: skip
        return data.draw(blocks)

    here = {name: sample(name, len(positions)) for name, positions in places.items()}
    wanted = {name: positions_of(name, count, first) for name in STATES} | {
        "kv": range(first, count)
    }
    there = {name: sample(name, len(positions)) for name, positions in wanted.items()}
    steps: list[tuple[str, range]] = []
    for name, positions in places.items():
        cuts = sorted(data.draw(st.sets(st.sampled_from(positions), max_size=3)))
        ends = [positions.start, *[one for one in cuts if one > positions.start], positions.stop]
        steps += [(name, range(a, b)) for a, b in itertools.pairwise(ends)]
    steps = data.draw(st.permutations(steps))
    announced = data.draw(st.integers(0, len(steps)))
    wrong = data.draw(st.sampled_from(("nothing", "lost", "changed")))
    cores.open(count)
    done: list[PushJob] = []
    for at, (name, positions) in enumerate([*steps, ("", range(0))]):
        if at == announced:
            states = {key: blocks for key, blocks in there.items() if key != "kv"}
            cores.announce(first, there["kv"], states)
        if name:
            offset = positions.start - places[name].start
            cores.push(name, positions, here[name][offset : offset + len(positions)])
    cores.take(cores.senders.finish(ROOM, b"aux data", 0))
    victim = data.draw(st.integers(0, 3))
    while cores.jobs:
        job = cores.jobs.pop(data.draw(st.integers(0, len(cores.jobs) - 1)))
        done.append(job)
        if len(done) - 1 == victim and wrong == "lost":
            cores.take(cores.senders.completed(job.number, None, 0))
        else:
            cores.carry_out(job, changed=wrong == "changed" and len(done) - 1 == victim)
        cores.receivers.check()
        cores.senders.check()
    if wrong == "nothing" or victim >= len(done):
        assert cores.state == State.SUCCESS
        for name, blocks in there.items():
            assert cores.there.has(ROOM, name, wanted[name], blocks)
    else:
        assert cores.state == (State.FAILED if wrong == "changed" else State.TRANSFERRING)
    for name, blocks in there.items():
        assert cores.there.others_are_zero(name, blocks)


def head(kind: type[RangesHead | RangesWritten], *ranges: tuple[int, int, int]) -> Any:
    packed = pack_numbers([number for one in ranges for number in one])
    return kind(ROOM, packed, bytes(16 * len(ranges)))


@pytest.mark.parametrize(
    "wrong",
    [
        [(STATE_PLANE, 0, 2)],
        [(STATE_PLANE, 1, 1)],
        [(STATE_PLANE + 2, 0, 1)],
        [(STATE_PLANE, 0, 1), (STATE_PLANE, 0, 1)],
        [(STATE_PLANE, 0, 0)],
        [(STATE_PLANE + PLANES_MAX, 1, 1)],  # before the window
        [(STATE_PLANE + PLANES_MAX, 2, 2)],  # whose blocks are no neighbours
        [(STATE_PLANE + 2 * PLANES_MAX, 0, 1)],  # decode has it
    ],
)
def test_state_data_outside_the_announcement_ends_the_handoff_and_is_read_into_nothing(wrong):
    for kind in (RangesHead, RangesWritten):
        cores = TwoCores()
        cores.open(5)
        cores.announce(1, [1, 2, 3, 4], {"mamba": [2], "window": [3, 5, 6], "index": [0, 1, 2, 3]})
        landing, size, effects = cores.receivers.arriving(LINK, head(kind, *wrong), 0)

        assert landing is None
        assert effects
        assert size == sum(
            n * {0: 4_096, 1: 256, 2: 64}[(plane - STATE_PLANE) // PLANES_MAX]
            for plane, _, n in wrong
        )
        assert cores.state == State.FAILED


def test_state_data_that_another_transport_says_it_has_written_is_refused():
    cores = TwoCores()
    cores.receivers.linked("p", LINK, 0, writes=True)
    cores.receivers.engine_up(1, LandingPlace("rdma", "h:1", (1 << 20).to_bytes(8, "little") * 4))
    cores.open(5)
    cores.announce(4, [1], {"mamba": [2], "window": [3, 5, 6], "index": [4]})
    right = head(RangesWritten, (STATE_PLANE, 0, 1))
    assert cores.state == State.WAITING_FOR_INPUT
    assert cores.receivers.arriving(LINK, head(RangesWritten, (0, 4, 1)), 0)[0] is not None

    assert cores.receivers.arriving(LINK, right, 0)[0] is None
    assert cores.state == State.FAILED


@pytest.mark.parametrize(
    "ranges",
    [
        [(STATE_PLANE + 3 * PLANES_MAX, 0, 1)],
        [(AUX_PLANE - 1, 0, 1)],
        [(STATE_PLANE, 0, 1), (STATE_PLANE + PLANES_MAX, 2, 1)],
        [(STATE_PLANE, 0, 1), (0, 0, 1)],
        [(STATE_PLANE, 0, 1), (AUX_PLANE, 0, 8)],
        [(0, 0, 1), (STATE_PLANE, 0, 1)],
        [(0, 0, 1), (STATE_PLANE + 9 * PLANES_MAX, 0, 1)],
    ],
)
def test_ranges_of_several_kinds_in_one_head_and_of_unknown_buffers_cannot_be_read(ranges):
    for is_late in (False, True):
        cores = TwoCores()
        cores.open(5)
        cores.announce(0, [0, 1, 2, 3, 4], {"mamba": [2], "window": [3, 5, 6],
                                            "index": [0, 1, 2, 3, 4]})  # fmt: skip
        if is_late:
            cores.receivers.abort(ROOM, 0)
        with pytest.raises(ProtocolError):
            cores.receivers.arriving(LINK, head(RangesHead, *ranges), 0)


def states(*numbers: list[int]) -> list[bytes]:
    return [pack_numbers(one) for one in numbers]


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        states([1], [1, 2, 3]),
        states([1], [1, 2, 3], [1, 2, 3], [1]),
        states([], [1, 2, 3], [1, 2, 3]),
        states([1, 2], [1, 2, 3], [1, 2, 3]),
        states([1], [1, 2], [1, 2, 3]),
        states([1], [1, 2, 2], [1, 2, 3]),
        states([1], [1, 2, 3], [1, 2, 3, 4, 5]),
        [b"\0\0\0", *states([1, 2, 3], [1, 2, 3])],
    ],
)
def test_an_announcement_with_wrong_state_blocks_is_refused_and_nothing_is_sent(wrong):
    cores = TwoCores()
    cores.senders.open(ROOM, 5 * BLOCK_TOKENS, 0)
    cores.push("mamba", range(1), [0])
    right = Announce(
        ROOM, 5 * BLOCK_TOKENS, 2 * BLOCK_TOKENS, pack_numbers([1, 2, 3]), 0, None, wrong
    )
    effects = cores.senders.received(LINK, right, 0)

    assert [type(one.message) for one in effects] == [Failed, Drained]
    assert effects[0].message.failure.code == FailureCode.REFUSED


def test_slots_in_limbo_are_given_to_nobody_and_more_than_a_few_refuse_the_peer():
    cores = TwoCores()
    core = cores.receivers
    for room in (1, 2, 3):
        core.open(room, "p", BLOCK_TOKENS, 0)
    core.announce(1, BLOCK_TOKENS, [], 0, {"mamba": [4], "window": [1], "index": []})
    with pytest.raises(InvalidArgument, match="another handoff"):
        core.announce(2, BLOCK_TOKENS, [], 0, {"mamba": [4], "window": [2], "index": []})
    core.announce(2, BLOCK_TOKENS, [], 0, {"mamba": [5], "window": [2], "index": []})
    core.abort(1, 0)

    assert core.holds_blocks(1)
    assert core.limbo() == {0: 1, 1: 1}
    with pytest.raises(InvalidArgument, match="another handoff"):
        core.announce(3, BLOCK_TOKENS, [], 0, {"mamba": [4], "window": [3], "index": []})
    core.open(4, "p", BLOCK_TOKENS, 0)  # one of a small buffer is no reason to refuse
    core.abort(2, 0)
    with pytest.raises(CapacityError):
        core.open(5, "p", BLOCK_TOKENS, 0)
    core.received(LINK, Drained(1), 0)
    assert not core.holds_blocks(1)
    core.announce(3, BLOCK_TOKENS, [], 0, {"mamba": [4], "window": [1], "index": []})
    core.open(5, "p", BLOCK_TOKENS, 0)
    core.check()


def test_a_late_write_to_a_slot_is_waited_for():
    cores = TwoCores()
    core = cores.receivers
    core.open(1, "p", BLOCK_TOKENS, 0)
    core.announce(1, BLOCK_TOKENS, [], 0, {"mamba": [4], "window": [1], "index": []})
    packed = pack_numbers([STATE_PLANE, 0, 1])
    landing, size, _ = core.arriving(LINK, RangesHead(1, packed, bytes(16)), 0)
    assert (landing.targets, size) == ([4], 4_096)
    core.abort(1, 0)
    core.received(LINK, Drained(1), 0)
    assert core.holds_blocks(1)
    core.landed(landing, None, "", 0)

    assert not core.holds_blocks(1)
    assert not core.limbo()


def test_state_data_alone_is_waited_for_when_decode_has_all_kv():
    cores = TwoCores()
    cores.open(5)
    cores.announce(5, [], {"mamba": [2], "window": [3, 5, 6], "index": []})
    cores.push("kv", range(5), [0, 1, 2, 3, 4])
    cores.push("index", range(5), [0, 1, 2, 3, 4])
    cores.push("mamba", range(1), [0])
    cores.push("window", range(2, 5), [0, 1, 2])
    cores.take(cores.senders.finish(ROOM, b"aux data", 0))
    while cores.jobs:
        assert cores.state != State.SUCCESS
        cores.carry_out(cores.jobs.pop())
    assert cores.state == State.SUCCESS
