"""The engine's paged K/V memory, and the mapping from a request's tokens to it.

Two mappings lead from a token to its bytes: the block table gives the token's *slot*, and the slot
is an index into every layer's K and V. A slot belongs to a block::

    position p of a request  ->  block = blocks[p // block_tokens]
                             ->  slot  = block * block_tokens + p % block_tokens
                             ->  row   = keys[layer].view(-1, kv_heads, head_dim)[slot]

The allocator allocates blocks for all layers together. ``page_tokens / block_tokens`` consecutive
blocks of a table are a page, the unit of the prefix tree and of the store.

An engine of several ranks has one pool a rank, with some of the K/V heads of every token; a block
has the same number in all of them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import xxhash

from engine_adapters.reference.config import ModelConfig
from kvstore.handoff.shared_memory import SharedMemory
from kvstore.mover.kvpool import KVPool

_ELEMENT_BYTES = 4


class LayerHash(NamedTuple):
    """xxh3_128 (hex) of one layer's K rows and V rows of one request."""

    k: str
    v: str


class PagedPool:
    """K and V of every layer, as blocks.

    Attributes:
        keys: one tensor per layer, shape (ranks, blocks, block_tokens, kv_heads / ranks, head_dim),
            float32.
        values: like ``keys``.
        block_tokens: tokens per block.
        ranks: divides the number of K/V heads.
        shared: memory of all tensors, if a transport's own process has to map it.
    """

    def __init__(
        self, config: ModelConfig, blocks: int, block_tokens: int, ranks: int = 1, *,
        shared: bool = False,
    ) -> None:  # fmt: skip
        shape = (ranks, blocks, block_tokens, config.kv_heads // ranks, config.head_dim)
        # Zeros, not garbage: a masked row still enters a product as 0 * value, and 0 * NaN is NaN.
        self.shared: SharedMemory | None = None
        if shared:
            self.shared = SharedMemory(2 * config.layers * math.prod(shape) * _ELEMENT_BYTES)
            whole = torch.frombuffer(self.shared.buffer, dtype=torch.float32)
            layers = whole.view(config.layers, 2, *shape)
            self.keys: list[torch.Tensor] = [layer[0] for layer in layers]
            self.values: list[torch.Tensor] = [layer[1] for layer in layers]
        else:
            self.keys = [torch.zeros(shape) for _ in range(config.layers)]
            self.values = [torch.zeros(shape) for _ in range(config.layers)]
        self.block_tokens = block_tokens
        self.block_count = blocks
        self.ranks = ranks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one plane (K or V of one layer) of one rank."""
        return self.keys[0][0, 0].numel() * self.keys[0].element_size()

    def planes(self, rank: int = 0) -> list[int]:
        """Addresses of layer 0 K, layer 0 V, layer 1 K, ...; valid while this pool exists."""
        pairs = zip(self.keys, self.values, strict=True)
        return [plane[rank].data_ptr() for pair in pairs for plane in pair]

    def heads(self, rank: int) -> tuple[int, int]:
        """First K/V head of a rank, and the one after the last."""
        each = self.keys[0].shape[3]
        return rank * each, (rank + 1) * each

    def for_transfers(self, rank: int = 0) -> KVPool:
        """A rank's pool as the store and handoffs see it; this pool must outlive their jobs."""
        return KVPool(
            planes=tuple(self.planes(rank)),
            block_stride_bytes=self.block_bytes,
            block_bytes=self.block_bytes,
            block_count=self.block_count,
            planes_per_layer=2,
        )

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write the rows of some slots: (len(slots), kv_heads, head_dim) each."""
        for plane, rows in ((self.keys[layer], keys), (self.values[layer], values)):
            ranks, _, _, heads, dim = plane.shape
            split = rows.reshape(len(rows), ranks, heads, dim).transpose(0, 1)
            plane.view(ranks, -1, heads, dim)[:, slots] = split

    def read(self, layer: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the blocks of a table: (len(table) * block_tokens, kv_heads, head_dim)."""

        def rows(plane: torch.Tensor) -> torch.Tensor:
            ranks, _, tokens, heads, dim = plane.shape
            found = plane[:, table].permute(1, 2, 0, 3, 4)
            return found.reshape(len(table) * tokens, ranks * heads, dim)

        return rows(self.keys[layer]), rows(self.values[layer])

    def slots(self, blocks: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """Slots of the positions ``start..stop-1`` of a request with this block table, int64."""
        positions = torch.arange(start, stop)
        table = torch.tensor(blocks, dtype=torch.int64)
        return table[positions // self.block_tokens] * self.block_tokens + (
            positions % self.block_tokens
        )

    def zero(self, blocks: Sequence[int]) -> None:
        """Zero ``blocks`` whose contents are not valid."""
        index = torch.tensor(blocks, dtype=torch.int64)
        for plane in (*self.keys, *self.values):
            plane[:, index] = 0.0

    def zero_slots(self, slots: torch.Tensor) -> None:
        """Zero single slots."""
        for plane in (*self.keys, *self.values):
            plane.view(self.ranks, -1, *plane.shape[3:])[:, slots] = 0.0

    def hashes(self, blocks: Sequence[int], tokens: int) -> list[LayerHash]:
        """Hash each layer's K and V rows of the positions ``0..tokens-1`` of a request."""
        slots = self.slots(blocks, 0, tokens)

        def digest(plane: torch.Tensor) -> str:
            rows = plane.view(self.ranks, -1, *plane.shape[3:])[:, slots]
            return xxhash.xxh3_128_hexdigest(rows.transpose(0, 1).contiguous().numpy().data)

        pairs = zip(self.keys, self.values, strict=True)
        return [LayerHash(digest(keys), digest(values)) for keys, values in pairs]
