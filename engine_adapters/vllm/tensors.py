"""Describes vLLM's KV tensors as memory for the mover."""

from collections.abc import Mapping, Sequence

import torch

from kvstore.engine.identity import Group
from kvstore.errors import ConfigError
from kvstore.mover.kvpool import KVPool


def pool_of(
    group: Group, layers: Sequence[str], tensors: Mapping[str, torch.Tensor], block_count: int
) -> KVPool:
    """The memory of one KV group; one plane per layer, whole blocks.

    Args:
        group: the group as the scheduler sees it.
        layers: names of its layers, in order.
        tensors: layer name → tensor whose first dimension is blocks.
        block_count: number of blocks in the engine's tables.

    Raises:
        ConfigError: the tensors are not in host memory, or their layout is not as the scheduler
            assumes.
    """
    found = [tensors[name] for name in layers if name in tensors]
    if len(found) != len(layers):
        raise ConfigError(f"KV cache: {len(found)} of {len(layers)} layers of a group exist")
    shapes = {_block_shape(tensor, block_count) for tensor in found}
    if len(shapes) != 1:
        raise ConfigError(f"KV cache: layers of one group differ: {sorted(shapes)}")
    block_bytes, stride_bytes = shapes.pop()
    if block_bytes != group.block_bytes:
        raise ConfigError(
            f"KV cache: a block of one layer has {block_bytes} bytes, not {group.block_bytes}"
        )
    return KVPool(
        planes=tuple(tensor.data_ptr() for tensor in found),
        block_bytes=block_bytes,
        block_stride_bytes=stride_bytes,
        block_count=block_count,
        planes_per_layer=1,
    )


def _block_shape(tensor: torch.Tensor, block_count: int) -> tuple[int, int]:
    """Bytes of a block, and the stride between blocks."""
    if tensor.device.type != "cpu":
        raise ConfigError(f"KV cache: it is on {tensor.device}; only host memory is supported")
    rows, rest = divmod(tensor.shape[0], block_count)
    if rest or not rows:
        raise ConfigError(f"KV cache: {tuple(tensor.shape)} is not made of {block_count} blocks")
    row = tensor[0]
    if not row.is_contiguous():
        raise ConfigError(f"KV cache: a block with strides {row.stride()} is not contiguous")
    row_bytes = row.numel() * tensor.element_size()
    stride_bytes = tensor.stride(0) * tensor.element_size()
    if rows > 1 and stride_bytes != row_bytes:
        raise ConfigError("KV cache: the parts of a block are not adjacent")
    return rows * row_bytes, rows * stride_bytes
