"""Goal: vLLM's KV tensors are described from shapes and strides, or refused by name."""

import ctypes
from math import prod

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from engine_adapters.vllm.tensors import pool_of  # noqa: E402
from kvstore.engine.identity import Group  # noqa: E402
from kvstore.mover.kvpool import KVPool  # noqa: E402
from kvstore.protocol.errors import ConfigError  # noqa: E402

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 7, 2, 4, 8
NAMES = [f"model.layers.{number}" for number in range(LAYERS)]
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4), "BLNHC": (1, 0, 3, 2, 4), "BHLNC": (1, 2, 0, 3, 4),
}  # fmt: skip
"""vLLM 0.32's names: the memory order of layers, blocks, heads, tokens, content."""


def group(block_bytes: int) -> Group:
    return Group(index=0, layers=LAYERS, block_tokens=TOKENS, block_bytes=block_bytes, kv_heads=2)


def filled(shape: tuple[int, ...], dtype: "torch.dtype") -> "torch.Tensor":
    size = prod(shape) * dtype.itemsize
    raw = np.random.default_rng(size).integers(0, 100, size, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def of_layout(order: tuple[int, ...], dtype: "torch.dtype") -> "dict[str, torch.Tensor]":
    """What vLLM registers: for each layer a view [B, H, N, C] of one allocation."""
    logical = (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
    memory = filled(tuple(logical[dim] for dim in order), dtype)
    back = [order.index(dim) for dim in range(5)]
    return dict(zip(NAMES, memory.permute(back), strict=True))


def block_bytes(pool: KVPool, block: int) -> list[bytes]:
    """A block's bytes in each plane."""
    places = (plane + block * pool.block_stride_bytes for plane in pool.planes)
    return [ctypes.string_at(place, pool.block_bytes) for place in places]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_of_vllm_is_described_completely(name, dtype):
    tensors = of_layout(LAYOUTS[name], dtype)
    size = HEADS * TOKENS * CONTENT * dtype.itemsize
    pool = pool_of(group(size), NAMES, tensors, BLOCKS)
    seen = set()
    for block in range(BLOCKS):
        parts = block_bytes(pool, block)
        wanted = b"".join(
            tensors[layer][block].contiguous().view(torch.uint8).numpy().tobytes()
            for layer in NAMES
        )
        # Every byte of the block and none of another one, in the order of memory.
        assert sorted(b"".join(parts)) == sorted(wanted)
        seen |= {plane + block * pool.block_stride_bytes for plane in pool.planes}
    assert len(seen) == BLOCKS * len(pool.planes)
    assert (len(pool.planes) == 1) is name.startswith("B")
    assert pool.layer_count == (1 if name.startswith("B") else LAYERS)


def test_blocks_of_a_layout_with_layers_outermost_are_as_the_engine_has_them():
    tensors = of_layout(LAYOUTS["LBHNC"], torch.bfloat16)
    pool = pool_of(group(HEADS * TOKENS * CONTENT * 2), NAMES, tensors, BLOCKS)
    for block in range(BLOCKS):
        expected = [tensors[layer][block].view(torch.uint8).numpy().tobytes() for layer in NAMES]
        assert block_bytes(pool, block) == expected


def test_latents_of_mla_are_one_plane_a_layer_also_with_padding():
    memory = filled((LAYERS, BLOCKS, TOKENS * 9 + 5), torch.uint8)
    tensors = {
        name: memory[at].as_strided((BLOCKS, TOKENS, 9), (TOKENS * 9 + 5, 9, 1),
                                    memory[at].storage_offset())
        for at, name in enumerate(NAMES)
    }  # fmt: skip
    pool = pool_of(group(TOKENS * 9), NAMES, tensors, BLOCKS)
    assert (pool.block_bytes, pool.block_stride_bytes) == (TOKENS * 9, TOKENS * 9 + 5)
    assert block_bytes(pool, 3)[1] == tensors[NAMES[1]][3].contiguous().numpy().tobytes()


def test_smaller_blocks_of_a_kernel_belong_to_one_block_of_the_table():
    tensors = {name: filled((3 * BLOCKS, HEADS, TOKENS, CONTENT), torch.uint8) for name in NAMES}
    size = 3 * HEADS * TOKENS * CONTENT
    pool = pool_of(group(size), NAMES, tensors, BLOCKS)
    assert block_bytes(pool, 2)[0] == tensors[NAMES[0]][6:9].numpy().tobytes()


def test_what_cannot_be_described_is_refused_by_name():
    size = HEADS * TOKENS * CONTENT
    good = {name: filled((BLOCKS, HEADS, TOKENS, CONTENT), torch.uint8) for name in NAMES}

    def refused(match: str, tensors=None, of=None) -> None:
        with pytest.raises(ConfigError, match=match):
            pool_of(of or group(size), NAMES, {**good, **(tensors or {})}, BLOCKS)

    last = NAMES[-1]
    refused("not made of 7 blocks", {last: filled((2, BLOCKS, 64), torch.uint8)})
    refused("not made of 7 blocks", {last: filled((5, HEADS, TOKENS, CONTENT), torch.uint8)})
    refused(f"{last}.*laid out differently", {last: of_layout(LAYOUTS["LHBNC"], torch.uint8)[last]})
    refused("has 64 bytes, not 63", of=group(size - 1))
    same = torch.zeros(1, dtype=torch.uint8).expand(BLOCKS, HEADS, TOKENS, CONTENT)
    refused(f"{NAMES[0]}.*not supported", {NAMES[0]: same})
    many = filled((BLOCKS, 300, 2), torch.uint8)[:, :, :1]
    refused("300 parts", {NAMES[0]: many})
    refused("it is on cpu, meta", {last: torch.empty((BLOCKS, 64), device="meta")})
    with pytest.raises(ConfigError, match="2 of 3 layers"):
        pool_of(group(size), NAMES, {name: good[name] for name in NAMES[:2]}, BLOCKS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_heads_are_told_apart_only_where_they_lie_one_behind_the_other(name):
    tensors = of_layout(LAYOUTS[name], torch.bfloat16)
    size = HEADS * TOKENS * CONTENT * 2
    if name not in ("LBHNC", "BLHNC"):
        with pytest.raises(ConfigError, match="2 KV heads do not lie one behind the other"):
            pool_of(group(size), NAMES, tensors, BLOCKS, HEADS)
        return
    pool = pool_of(group(size), NAMES, tensors, BLOCKS, HEADS)
    assert pool.layer_count == len(pool.planes) == LAYERS
    for head in range(HEADS):
        part = pool.part(head * size // HEADS, size // HEADS)
        for block in range(BLOCKS):
            assert block_bytes(part, block) == [
                tensors[layer][block, head].contiguous().view(torch.uint8).numpy().tobytes()
                for layer in NAMES
            ]


@pytest.mark.parametrize("shape", [(BLOCKS * 2, HEADS, TOKENS // 2, CONTENT), (BLOCKS, 64)])
def test_blocks_that_are_not_made_of_heads_are_refused_where_heads_are_told_apart(shape):
    tensors = {name: filled(shape, torch.bfloat16) for name in NAMES}
    size = HEADS * TOKENS * CONTENT * 2
    pool_of(group(size), NAMES, tensors, BLOCKS)
    with pytest.raises(ConfigError, match="heads do not lie"):
        pool_of(group(size), NAMES, tensors, BLOCKS, HEADS)
