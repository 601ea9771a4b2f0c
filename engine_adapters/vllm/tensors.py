"""Describes vLLM's KV tensors as memory for the mover, from their shapes and strides."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import torch

from kvstore.engine.identity import Group
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.errors import ConfigError

DEVICES: Final = ("cpu", "cuda")
PARTS_MAX: Final = 256
"""Contiguous pieces of a block of one layer, at most: each costs an operation of the device."""


class _Blocks(NamedTuple):
    """The blocks of a layer: ``parts`` pieces each, of ``part_bytes`` bytes.

    Attributes:
        addresses: address of each piece of block 0, ascending.
        part_bytes: bytes of a piece.
        stride_bytes: distance between the same pieces of two blocks.
    """

    addresses: tuple[int, ...]
    part_bytes: int
    stride_bytes: int


def pool_of(
    group: Group, layers: Sequence[str], tensors: Mapping[str, torch.Tensor], block_count: int,
    heads: int = 0,
) -> KVPool:  # fmt: skip
    """The memory of one KV group: whole blocks, in their own format.

    If the parts of a block of all layers are adjacent (vLLM's layouts with blocks outermost), they
    are one plane, and a page has the blocks' bytes as they are; else, and if ``heads`` are told
    apart, each layer has planes of its own.

    Args:
        group: the group as the scheduler sees it.
        layers: names of its layers, in order.
        tensors: layer name → tensor whose first dimension is blocks; the others may lie anywhere.
        block_count: number of blocks in the engine's tables.
        heads: a block of a layer must have so many heads, one behind the other; 0 = its order does
            not matter.

    Raises:
        ConfigError: the tensors are on an unknown device, or their layout cannot be described or is
            not as the scheduler assumes; names the layer.
    """
    found = [(name, tensors[name]) for name in layers if name in tensors]
    if len(found) != len(layers):
        raise ConfigError(f"KV cache: {len(found)} of {len(layers)} layers of a group exist")
    devices = {str(tensor.device) for _, tensor in found}
    if len(devices) != 1 or found[0][1].device.type not in DEVICES:
        raise ConfigError(f"KV cache: it is on {', '.join(sorted(devices))}; only one of host"
                          " memory and one CUDA device is supported")  # fmt: skip
    described = [_blocks(name, tensor, block_count) for name, tensor in found]
    first = described[0]
    for (name, tensor), blocks in zip(found, described, strict=True):
        if (len(blocks.addresses), *blocks[1:]) != (len(first.addresses), *first[1:]):
            raise ConfigError(
                f"KV cache: {_shown(name, tensor)} is laid out differently from {_shown(*found[0])}"
            )
    block_bytes = len(first.addresses) * first.part_bytes
    if block_bytes != group.block_bytes:
        raise ConfigError(
            f"KV cache: a block of {_shown(*found[0])} has {block_bytes} bytes, not"
            f" {group.block_bytes}"
        )
    for name, tensor in found if heads else ():
        _check_heads(name, tensor, block_count, heads)
    device = found[0][1].device
    planes = tuple(address for blocks in described for address in blocks.addresses)
    whole = _together(planes, first) if not heads else 0
    return KVPool(
        planes=planes[:1] if whole else planes,
        block_bytes=whole or first.part_bytes,
        block_stride_bytes=first.stride_bytes,
        block_count=block_count,
        planes_per_layer=1 if whole else len(first.addresses),
        device="cpu" if device.type == "cpu" else f"cuda:{device.index or 0}",
    )


def _together(planes: tuple[int, ...], first: _Blocks) -> int:
    """Bytes of a block of all planes if they are adjacent, in the order of the layers; else 0."""
    size = len(planes) * first.part_bytes
    start = min(planes)
    order = tuple(range(start, start + size, first.part_bytes))
    adjacent = tuple(sorted(planes)) == order and planes[0] == start
    return size if adjacent and len(planes) > 1 and size <= first.stride_bytes else 0


def _check_heads(name: str, tensor: torch.Tensor, block_count: int, heads: int) -> None:
    """Refuse a layer whose blocks have other heads, or bytes of several heads in between."""
    shape, strides = tensor.shape, tensor.stride()
    inside = sorted(zip(strides[2:], shape[2:], strict=True))
    size = 1
    for stride, count in inside:
        size = size * count if stride == size or count == 1 else 0
    if shape[:2] != (block_count, heads) or strides[1] != size:
        raise ConfigError(
            f"KV cache: {_shown(name, tensor)}: its {heads} KV heads do not lie one behind the"
            " other in a block, so that servers of other tensor-parallel sizes could not read"
            " them: not supported"
        )


def _blocks(name: str, tensor: torch.Tensor, block_count: int) -> _Blocks:
    """The blocks of one layer.

    The first dimension is blocks; its rows of one block (vLLM's kernels may use smaller blocks) and
    all other dimensions belong to a block.
    """
    rows, rest = divmod(tensor.shape[0], block_count)
    if rest or not rows:
        raise ConfigError(f"KV cache: {_shown(name, tensor)} is not made of {block_count} blocks")
    item = tensor.element_size()
    shape, strides = (rows, *tensor.shape[1:]), [stride * item for stride in tensor.stride()]
    stride_bytes = rows * strides[0]
    dims = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size > 1]
    dims.sort(key=lambda dim: dim[1])
    part = item
    apart: list[tuple[int, int]] = []
    for size, stride in dims:
        if stride == part and not apart:
            part *= size
        else:
            apart.append((size, stride))
    offsets = [0]
    for size, stride in apart:
        offsets = [offset + number * stride for offset in offsets for number in range(size)]
    offsets.sort()
    overlaps = any(second - first < part for first, second in pairwise(offsets))
    if overlaps or part > stride_bytes or len(offsets) > PARTS_MAX:
        raise ConfigError(
            f"KV cache: the layout of {_shown(name, tensor)} is not supported: a block has"
            f" {len(offsets)} parts of {part} bytes, {stride_bytes} bytes apart"
        )
    start = tensor.data_ptr()
    return _Blocks(tuple(start + offset for offset in offsets), part, stride_bytes)


def _shown(name: str, tensor: torch.Tensor) -> str:
    return f"{name} {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}"
