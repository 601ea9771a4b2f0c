"""Goal: heads, and state data, of pools on a device arrive as they do in host memory."""

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvstore.handoff.aux_data import AuxData  # noqa: E402
from kvstore.handoff.memory import HandoffPool  # noqa: E402
from kvstore.handoff.places import PushRange  # noqa: E402
from kvstore.handoff.states import State  # noqa: E402
from kvstore.mover.kvpool import HeadRows, KVPool  # noqa: E402
from kvstore.mover.push_way import BlockRows  # noqa: E402
from kvstore.testing.device import LateDevice  # noqa: E402
from kvstore.tier.gpu import CudaDevice, HostDevice  # noqa: E402
from kvstore.tier.push_memory import PushMemory  # noqa: E402
from tests.handoff import ranked as engines_of_ranks  # noqa: E402
from tests.handoff.pair import BLOCK_TOKENS  # noqa: E402
from tests.handoff.ranked import BLOCKS, RankMemory, ranked, whole_of  # noqa: E402
from tests.handoff.ranked_states import RankStates, some_blocks  # noqa: E402
from tests.handoff.stateful import KV, StatefulMemory, positions_of, send_kv, send_state  # noqa: E402
from tests.handoff.stateful import stateful_pair as pair_of  # noqa: E402
from tests.handoff.test_unequal_ranks import split  # noqa: E402


class RankOnDevice(RankMemory):
    """The pool of one rank, in host memory that is treated as a device which is late."""

    def __init__(self, group, states=(), *, shared=False):
        super().__init__(group, states, shared=shared)
        heads = self.planes.shape[3]
        size = engines_of_ranks.BLOCK_TOKENS * heads * engines_of_ranks.HEAD_BYTES
        pools = [KVPool(self.starts, size, size, BLOCKS, device="cpu:0"), *pools_of(states)]
        memory = PushMemory(pools, LateDevice(group.rank))
        self.pool = HandoffPool(
            pools[0], engines_of_ranks.BLOCK_TOKENS, self.generations, group, states=states,
            device=memory,
        )  # fmt: skip


def pools_of(states):
    return [
        KVPool(one.planes, one.block_bytes, one.block_bytes, one.block_count, 1, "cpu:0")
        for one in states
    ]


@pytest.mark.parametrize(
    ("prefill", "decode"), [(split(heads=2), split()), (split(), split(heads=4))], ids=str
)
def test_heads_are_gathered_and_spread_on_the_device(prefill, decode, wait_until, monkeypatch):
    monkeypatch.setattr(engines_of_ranks, "RankMemory", RankOnDevice)
    with ranked(prefill, decode) as engines:
        whole, there = whole_of(1, 10), [9, 3, 4, 5, 30, 1, 0, 63, 62, 40]
        senders, receivers = engines.begin(1, 10)
        for receiver in receivers:
            receiver.announce(0, there)
        engines.push(senders, whole, list(range(20, 30)))
        wait_until(lambda: all(one.progress.ended for one in (*senders, *receivers)))
        assert {one.failure for one in (*senders, *receivers)} == {None}
        assert engines.wrong(whole, there) == []
        for memory in engines.there:
            assert not np.delete(memory.planes, there, axis=1).any()


def test_state_data_of_a_pipeline_arrive_on_the_device(wait_until, monkeypatch):
    monkeypatch.setattr(engines_of_ranks, "RankMemory", RankOnDevice)
    chance, here, there = random.Random(5), RankStates(), RankStates()
    with ranked(split(layers=2), split(), states=(here.of, there.of)) as engines:
        blocks = some_blocks(6, chance)
        senders, (receiver,) = engines.begin(1, 6)
        receiver.announce(0, [9, 8, 7, 3, 2, 1], blocks)
        here.send(senders, 1, 6, chance)
        engines.push(senders, whole_of(1, 6), [0, 2, 4, 6, 8, 10])
        wait_until(lambda: receiver.progress.ended)
        assert receiver.state == State.SUCCESS, receiver.failure
        assert there.wrong(1, 6, blocks) == []


class StatefulOnDevice(StatefulMemory):
    """The same with state buffers."""

    def __init__(self, change=None):
        super().__init__(change)
        buffers = [one.buffer for one in self.pool._states]
        pools = [KVPool(self.starts("kv"), KV[2], KV[2], KV[1], device="cpu:0")]
        pools += pools_of(buffers)
        memory = PushMemory(pools, LateDevice(3))
        self.pool = HandoffPool(pools[0], BLOCK_TOKENS, states=buffers, device=memory)


def test_state_data_of_three_kinds_arrive_on_the_device(wait_until):
    with pair_of(StatefulOnDevice(), StatefulOnDevice()) as pair:
        sender, receiver = pair.begin(1, 5)
        states = {"mamba": [2], "window": [9, 3, 4], "index": [7, 8, 1, 2, 20]}
        receiver.announce(0, [3, 9, 4, 5, 6], states)
        send_kv(sender, pair.here, [0, 1, 2, 3, 4])
        for name in states:
            send_state(sender, pair.here, name, 5, 1)
        sender.finish(AuxData(first_token=1, position=80))
        wait_until(lambda: receiver.progress.ended)
        assert receiver.state == State.SUCCESS, receiver.failure
        assert pair.there.has(1, "kv", range(5), [3, 9, 4, 5, 6])
        for name, blocks in states.items():
            assert pair.there.has(1, name, positions_of(name, 5), blocks)
            assert pair.there.others_are_zero(name, blocks)


def test_a_rank_of_later_layers_has_the_same_planes_on_a_device_as_in_host_memory():
    changed = {name: {"first_plane": 7, "is_alike": True} for name in ("mamba", "window", "index")}
    host, there = StatefulMemory(changed), StatefulOnDevice(changed)
    for index, one in enumerate(host.pool.shape.states):
        for at, plane in enumerate(host.pool.shape.state_shares[index].planes):
            ranges = [PushRange(plane, 0, 1)]
            (place,) = host.pool.places(ranges, [2])
            start = host.starts(one.name)[at]
            assert place == (start + 2 * one.block_bytes, one.block_bytes)
            (rows,) = there.pool.block_rows(ranges, [2], [])
            assert (rows.memory, rows.plane, rows.blocks.tolist()) == (index + 1, at, [2])


def open_cuda():
    return CudaDevice("cuda:0")


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(lambda: HostDevice("cpu:0"), id="host"),
        pytest.param(lambda: LateDevice(4), id="late"),
        pytest.param(
            open_cuda,
            id="cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("block_bytes", [4096, 520, 33 * 16])
@pytest.mark.parametrize("heads", [None, HeadRows(8, 1, 0, 1), HeadRows(4, 2, 1, 2)])
def test_a_slot_has_what_the_blocks_have_and_gives_it_back(of, block_bytes, heads, wait_until):
    device, stride, count = of(), block_bytes + 16, 12
    memory = device.memory(3 * count * stride, device.stream())
    whole = np.random.default_rng(block_bytes).integers(0, 256, len(memory), dtype=np.uint8)
    memory.copy_(torch.from_numpy(whole))
    planes = tuple(memory.data_ptr() + plane * count * stride for plane in range(3))
    there = PushMemory([KVPool(planes, block_bytes, stride, count, 1, device.name)], device)
    rows = [BlockRows(0, 2, np.array([7, 1])), BlockRows(0, 2, np.array([0])),
            BlockRows(0, 0, np.array([11, 3, 4]))]  # fmt: skip
    blocks = whole.reshape(3, count, stride)[:, :, :block_bytes]
    parts = [blocks[one.plane, one.blocks] for one in rows]
    if heads is not None:
        parts = [
            one.reshape(len(one), heads.tokens, heads.heads, -1)[:, :, heads.first : heads.stop]
            for one in parts
        ]
    expected = np.concatenate([one.reshape(-1) for one in parts])

    out = there.way_out(1 << 16, 64)
    started = out.copy(3, rows, heads, [there.fence()])
    assert not started.why
    wait_until(started.fence.done)
    assert (out.slots[3, : len(expected)] == expected).all()

    way_in = there.way_in(1 << 16, 64)
    way_in.slots[2, : len(expected)] = expected ^ 0xFF
    started = way_in.copy(2, rows, heads, [there.fence()])
    assert not started.why
    wait_until(started.fence.done)
    after = memory.cpu().numpy()
    assert (after != whole).sum() == len(expected), "other bytes were written too"
    started = out.copy(0, rows, heads, [there.fence()])
    wait_until(started.fence.done)
    assert (out.slots[0, : len(expected)] == expected ^ 0xFF).all()
    out.close()
    way_in.close()
