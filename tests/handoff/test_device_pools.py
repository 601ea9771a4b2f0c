"""Goal: KV of a pool on a device arrives byte for byte, and no block is used before the device is
done with it."""

import contextlib
import random
import threading

import pytest

torch = pytest.importorskip("torch")

from kvstore.handoff import device_copies  # noqa: E402
from kvstore.handoff.memory import HandoffPool  # noqa: E402
from kvstore.handoff.prefill import PrefillManager  # noqa: E402
from kvstore.handoff.state_data import StateBuffer, StateKind  # noqa: E402
from kvstore.handoff.states import FailureCode, State  # noqa: E402
from kvstore.mover import push_way  # noqa: E402
from kvstore.mover.kvpool import KVPool  # noqa: E402
from kvstore.protocol.errors import DeviceUnavailable, InvalidArgument  # noqa: E402
from kvstore.testing.device import LateDevice  # noqa: E402
from kvstore.tier.gpu import CudaDevice, HostDevice  # noqa: E402
from kvstore.tier.push_memory import PushMemory  # noqa: E402
from tests.handoff.on_device import DeviceBlocks  # noqa: E402
from tests.handoff.pair import (  # noqa: E402
    BLOCK_TOKENS,
    BLOCKS,
    SECRET,
    SPACE,
    Memory,
    Pair,
    push_all,
)


@contextlib.contextmanager
def pair_of(here, there):
    pair = Pair(here=here, there=there)
    try:
        yield pair
    finally:
        for memory in (here, there):
            if isinstance(memory, DeviceBlocks) and isinstance(memory.device, LateDevice):
                memory.device.stalled = False
        pair.close()


def hand_over(pair, room, wait_until, *, seed=3, count=40):
    """One handoff between scattered blocks; asserts that all arrives, and nothing elsewhere."""
    shuffled = random.Random(seed)
    here, there = shuffled.sample(range(BLOCKS), count), shuffled.sample(range(BLOCKS), count)
    sender, receiver = pair.begin(room, count)
    receiver.announce(0, there)
    push_all(sender, pair.here, here)
    wait_until(lambda: sender.progress.ended and receiver.progress.ended)
    assert (sender.failure, receiver.failure) == (None, None)
    assert pair.there.has(room, range(count), there), "other bytes, or too early"
    wait_until(lambda: not sender.holds_blocks)
    assert not receiver.holds_blocks
    sender.close()
    receiver.close()
    return there


DEVICES = {
    "host": lambda: HostDevice("cpu:0"),
    **{f"late-{seed}": (lambda seed=seed: LateDevice(seed)) for seed in range(3)},
}


@pytest.mark.parametrize("of", DEVICES.values(), ids=DEVICES)
def test_kv_arrives_whole_from_device_to_device(of, wait_until):
    with pair_of(DeviceBlocks(of()), DeviceBlocks(of())) as pair:
        blocks = hand_over(pair, 1, wait_until)
        assert pair.there.others_are_zero(blocks)
        hand_over(pair, 2, wait_until, seed=4)
        assert pair.prefill.describe() == pair.decode.describe() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_kv_arrives_whole_from_cuda_to_cuda(wait_until):
    with pair_of(*(DeviceBlocks(CudaDevice("cuda:0")) for _ in range(2))) as pair:
        blocks = hand_over(pair, 1, wait_until)
        assert pair.there.others_are_zero(blocks)
        hand_over(pair, 2, wait_until, seed=4)


def test_either_side_may_have_its_pool_in_host_memory(wait_until):
    with pair_of(DeviceBlocks(LateDevice(1)), Memory()) as pair:
        hand_over(pair, 1, wait_until)
    with pair_of(Memory(), DeviceBlocks(LateDevice(2))) as pair:
        hand_over(pair, 1, wait_until)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_who_does_not_wait_for_the_device_is_found(side, wait_until, monkeypatch):
    hurried = DeviceBlocks(LateDevice(1, hurried=True))
    one, other = (hurried, Memory()) if side == "prefill" else (Memory(), hurried)
    monkeypatch.setattr("kvstore.testing.device.LateEvent.done", lambda _: True)  # they lie
    with pair_of(one, other) as pair:
        hurried.device.stalled = True  # what is not awaited is not done
        with pytest.raises(AssertionError, match="too early"):
            hand_over(pair, 1, wait_until)


def test_blocks_are_read_after_the_step_that_writes_them(wait_until):
    here = DeviceBlocks(LateDevice(5))
    with pair_of(here, Memory()) as pair:
        here.device.stalled = True  # the step has not been done when its blocks are sent
        sender, receiver = pair.begin(1, 8)
        receiver.announce(0, list(range(8)))
        push_all(sender, here, list(range(8)))
        wait_until(lambda: sender.state == State.TRANSFERRING)
        assert sender.holds_blocks
        assert not here.planes.any()
        here.device.stalled = False
        wait_until(lambda: receiver.state == State.SUCCESS)
        assert pair.there.has(1, range(8), list(range(8)))


def test_blocks_are_written_after_the_work_that_reads_them(wait_until):
    there, seen = DeviceBlocks(LateDevice(6)), []
    with pair_of(Memory(), there) as pair:
        there.device.stalled = True
        for _ in range(12):
            there.device.current().run(lambda: seen.append(bool(there.planes.any())))
        sender, receiver = pair.begin(1, 8)
        receiver.announce(0, list(range(8)))
        push_all(sender, pair.here, list(range(8)))
        wait_until(lambda: receiver.state == State.TRANSFERRING)
        there.device.stalled = False
        wait_until(lambda: receiver.state == State.SUCCESS)
        assert seen == [False] * 12, "a block was written while the engine still read it"


def test_success_comes_after_the_copy_to_the_device(wait_until):
    there = DeviceBlocks(LateDevice(7))
    with pair_of(Memory(), there) as pair:
        sender, receiver = pair.begin(1, 4)
        receiver.announce(0, [0, 1, 2, 3])
        there.device.stalled = True
        push_all(sender, pair.here, [0, 1, 2, 3])
        wait_until(lambda: pair.decode.stats()["device_copies"] > 0)
        wait_until(lambda: sender.progress.moved_bytes > 0)
        assert receiver.state == State.TRANSFERRING
        there.device.stalled = False
        wait_until(lambda: receiver.state == State.SUCCESS)
        assert there.has(1, range(4), [0, 1, 2, 3])


@pytest.mark.parametrize("by_decode", [True, False])
def test_blocks_of_an_abort_are_held_until_the_device_has_left_them(by_decode, wait_until):
    there = DeviceBlocks(LateDevice(8))
    with pair_of(Memory(), there) as pair:
        sender, receiver = pair.begin(1, 4)
        receiver.announce(0, [0, 1, 2, 3])
        there.device.stalled = True
        pair.here.write(1, range(1), range(4), [0, 1, 2, 3])
        sender.send(range(1), range(4), [0, 1, 2, 3])
        wait_until(lambda: pair.decode.stats()["device_copies"] > 0)
        (receiver if by_decode else sender).abort()
        wait_until(lambda: sender.state == receiver.state == State.FAILED)
        wait_until(lambda: not sender.holds_blocks)  # so it has told that it is drained
        wait_until(lambda: pair.decode.stats()["limbo_blocks"] == 4)
        assert receiver.holds_blocks
        there.device.stalled = False
        wait_until(lambda: not receiver.holds_blocks)
        assert receiver.failure.code == FailureCode.ABORTED
        assert pair.decode.stats()["limbo_blocks"] == 0


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_device_that_does_not_finish_fails_the_request_and_its_blocks_stay(
    side, wait_until, monkeypatch
):
    monkeypatch.setattr(device_copies, "DEVICE_S", 0.3)
    late = DeviceBlocks(LateDevice(9))
    one, other = (late, Memory()) if side == "prefill" else (Memory(), late)
    with pair_of(one, other) as pair:
        sender, receiver = pair.begin(1, 4)
        receiver.announce(0, [0, 1, 2, 3])
        late.device.stalled = True
        push_all(sender, pair.here, [0, 1, 2, 3])
        wait_until(lambda: sender.state == receiver.state == State.FAILED)
        assert sender.failure.code == receiver.failure.code == FailureCode.DEVICE
        assert sender.failure.side == side
        holder, free = (sender, receiver) if side == "prefill" else (receiver, sender)
        wait_until(lambda: not free.holds_blocks)
        assert holder.holds_blocks
        monkeypatch.setattr(device_copies, "DEVICE_S", 10.0)
        late.device.stalled = False
        wait_until(lambda: not holder.holds_blocks)
        sender.close()
        receiver.close()
        hand_over(pair, 2, wait_until)
        links = pair.decode.stats()["links"]
        assert links == 1, "the link lives on"


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_copy_that_fails_fails_the_request_only(side, wait_until):
    late = DeviceBlocks(LateDevice(10))
    one, other = (late, Memory()) if side == "prefill" else (Memory(), late)
    with pair_of(one, other) as pair:
        hand_over(pair, 1, wait_until)
        sender, receiver = pair.begin(2, 4)
        receiver.announce(0, [0, 1, 2, 3])
        pair.here.write(2, range(1), range(4), [0, 1, 2, 3])
        late.device.failures.append(("run", RuntimeError("CUDA error: out of memory\nmore")))
        sender.send(range(1), range(4), [0, 1, 2, 3])
        wait_until(lambda: sender.state == receiver.state == State.FAILED)
        assert receiver.failure.code == FailureCode.DEVICE
        assert receiver.failure.message == "RuntimeError: CUDA error: out of memory"
        wait_until(lambda: not (sender.holds_blocks or receiver.holds_blocks))
        hand_over(pair, 3, wait_until)


def test_many_handoffs_share_few_slots_and_leave_none_taken(wait_until):
    of = [DeviceBlocks(LateDevice(seed)) for seed in (11, 12)]
    with pair_of(*of) as pair:
        threads = threading.active_count()
        both = [pair.begin(room, 4) for room in range(1, 25)]
        for number, (sender, receiver) in enumerate(both):
            blocks = list(range(4 * number, 4 * number + 4))
            receiver.announce(0, blocks)
            push_all(sender, pair.here, blocks)
        wait_until(lambda: all(one.state == State.SUCCESS for _, one in both))
        for number, (sender, receiver) in enumerate(both):
            blocks = list(range(4 * number, 4 * number + 4))
            assert pair.there.has(sender.room, range(4), blocks)
            wait_until(lambda sender=sender: not sender.holds_blocks)
            sender.close()
            receiver.close()
        wait_until(lambda: pair.prefill.stats()["device_copies"] == 0)
        assert threading.active_count() <= threads + 4  # of the link
        hand_over(pair, 100, wait_until)


def test_a_block_that_is_given_away_before_it_is_read_fails_the_handoff(wait_until):
    here = DeviceBlocks(LateDevice(13))
    with pair_of(here, Memory()) as pair:
        here.device.stalled = True
        sender, receiver = pair.begin(1, 2)
        receiver.announce(0, [0, 1])
        push_all(sender, here, [0, 1])
        here.generations[1] += 1
        here.write(77, range(4), range(2), [0, 1])
        here.device.stalled = False
        wait_until(lambda: receiver.state == State.FAILED)
        assert receiver.failure.code == FailureCode.BLOCKS_REUSED


@pytest.mark.parametrize("others", [0, 2, "size", "count", "order"])
def test_a_device_s_part_of_other_memory_is_refused(others):
    """What it copies would verify, and be something else."""
    device = LateDevice(1)
    starts = DeviceBlocks(device).starts
    pool = KVPool(starts, 64, 64, 4, device="cpu:0")
    state = StateBuffer("mamba", StateKind.SLOT, starts[:1], 32, 4)
    right = KVPool(state.planes, 32, 32, 4, 1, device="cpu:0")
    pools = {
        0: [pool], 2: [pool, right, right],
        "size": [pool, KVPool(state.planes, 16, 16, 4, 1, device="cpu:0")],
        "count": [pool, KVPool(state.planes, 32, 32, 3, 1, device="cpu:0")],
        "order": [right, pool],
    }[others]  # fmt: skip

    HandoffPool(pool, 16, states=[state], device=PushMemory([pool, right], device))
    with pytest.raises(InvalidArgument) as caught:
        HandoffPool(pool, 16, states=[state], device=PushMemory(pools, device))

    assert caught.value.field == "device"


def test_what_cannot_be_is_refused_by_field():
    device = LateDevice(1)
    blocks = DeviceBlocks(device)
    pool = KVPool(blocks.starts, 64, 64, 4, device="cpu:0")
    with pytest.raises(InvalidArgument) as caught:
        HandoffPool(pool, 16)
    assert caught.value.field == "device"
    host = KVPool(blocks.starts, 64, 64, 4)
    with pytest.raises(InvalidArgument) as caught:
        HandoffPool(host, 16, device=PushMemory([pool], device))
    assert caught.value.field == "device"
    with pytest.raises(InvalidArgument) as caught:
        PushMemory([pool, host], device)
    assert caught.value.field == "pools"


def test_a_device_without_memory_ends_the_start_and_leaves_nothing():
    device = LateDevice(1)
    blocks = DeviceBlocks(device)
    threads = threading.active_count()
    for where in ("pinned", "memory"):
        device.failures.append((where, RuntimeError("out of memory")))
        with pytest.raises(DeviceUnavailable, match="out of memory"):
            PrefillManager(blocks.pool, SPACE, SECRET)
    assert threading.active_count() == threads


def test_decode_has_a_part_already(wait_until):
    there = DeviceBlocks(LateDevice(2))
    with pair_of(DeviceBlocks(LateDevice(3)), there) as pair:
        sender, receiver = pair.begin(1, 10)
        receiver.announce(7 * BLOCK_TOKENS + 3, [50, 51, 52])
        push_all(sender, pair.here, list(range(10)))
        wait_until(lambda: receiver.state == State.SUCCESS)
        assert there.has(1, range(7, 10), [50, 51, 52])
        assert there.others_are_zero([50, 51, 52])


@pytest.mark.parametrize("direction", ["way_in", "way_out"])
def test_a_way_pins_no_more_than_its_slots(direction, monkeypatch):
    monkeypatch.setattr(push_way, "STAGING_BYTES", 3 << 20)
    device = HostDevice("cpu:0")
    pinned = []
    allocate = device.pinned
    monkeypatch.setattr(device, "pinned", lambda size: pinned.append(size) or allocate(size))
    blocks = DeviceBlocks(device)

    way = getattr(blocks.pool.device, direction)(1 << 20, 8)

    assert way.slots.shape == (2, 1 << 20)
    assert pinned[-1] <= 3 << 20
    way.close()
