"""A small Llama-style model whose logits do not depend on the batch.

The same token at the same position gets bit-equal logits, whatever else is in the batch, however
its prompt was split into chunks, and whether earlier K/V were computed or restored. Floating-point
sums depend on their order, and matrix libraries choose the order by shape, so the shapes are fixed:

* every linear layer multiplies tiles of exactly ``TILE_ROWS`` rows, the last tile zero-padded;
* attention of position p always runs in the query tile ``[p // B * B, p // B * B + B)`` over the
  keys ``[0, p // B * B + B)``, where B is the pool's block_tokens: the shape depends only on p.
  Unused rows are zero, later keys are masked;
* norms and activations work on whole tiles of rows.

This assumes that in the matrix library a row of a fixed-shape product does not depend on its
position in the tile. tests/engine_adapters/reference/test_batch_invariance.py tests this.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from engine_adapters.reference.config import ModelConfig
from engine_adapters.reference.pool import PagedPool
from engine_adapters.reference.tokenizer import PRINTABLE, VOCAB_SIZE

TILE_ROWS: Final = 64
NORM_EPSILON: Final = 1e-5
ROPE_BASE: Final = 10_000.0
_GAIN: Final = 2.0


class Chunk(NamedTuple):
    """A run of consecutive tokens of one request to compute now.

    Attributes:
        tokens: their ids.
        start: position of the first.
        blocks: the request's block table; covers at least ``start + len(tokens)`` positions, and
            the K/V of all positions before ``start`` are in the pool.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]


class _Layer(NamedTuple):
    attention_norm: torch.Tensor  # (hidden,)
    qkv: torch.Tensor  # (hidden, (heads + 2 * kv_heads) * head_dim)
    output: torch.Tensor  # (heads * head_dim, hidden)
    mlp_norm: torch.Tensor  # (hidden,)
    gate_up: torch.Tensor  # (hidden, 2 * intermediate)
    down: torch.Tensor  # (intermediate, hidden)


class Model:
    """Seeded random weights and the forward pass. Not thread-safe; one engine thread uses it."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        random = torch.Generator().manual_seed(config.seed)

        def weight(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
            return torch.randn(rows, columns, generator=random) * (gain / math.sqrt(rows))

        hidden, heads_dim = config.hidden, config.heads * config.head_dim
        kv_dim = config.kv_heads * config.head_dim
        self._embedding = torch.randn(VOCAB_SIZE, hidden, generator=random)
        ones = torch.ones(hidden)
        # A gain of 1 makes a random model repeat two or three tokens forever. At 2 attention is
        # selective (scores of a few units), and greedy output has 30 different tokens in 40.
        self._layers = [
            _Layer(
                attention_norm=ones,
                qkv=weight(hidden, heads_dim + 2 * kv_dim, _GAIN),
                output=weight(heads_dim, hidden),
                mlp_norm=ones,
                gate_up=weight(hidden, 2 * config.intermediate, _GAIN),
                down=weight(config.intermediate, hidden),
            )
            for _ in range(config.layers)
        ]
        self._final_norm = ones
        self._head = weight(hidden, VOCAB_SIZE, _GAIN)
        # The weights are random, so allow only printable output, and no end token.
        self._unsayable = torch.full((VOCAB_SIZE,), -math.inf)
        self._unsayable[list(PRINTABLE)] = 0.0
        half = config.head_dim // 2
        frequency = ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(config.max_model_len, dtype=torch.float64), frequency)
        self._cos, self._sin = angle.cos().float(), angle.sin().float()

    @torch.inference_mode()
    def forward(
        self,
        chunks: Sequence[Chunk],
        pool: PagedPool,
        after_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Compute ``chunks``, write their K/V into ``pool`` and return the logits after each.

        Args:
            chunks: at least one, of different requests.
            pool: rows of the chunks' positions are written, earlier ones are read.
            after_layer: called with the number of each layer when the layer's K/V of all chunks are
                in the pool, before the next one is computed. Must not block.

        Returns:
            Logits of the last token of each chunk, shape (len(chunks), VOCAB_SIZE), float32.
        """
        rows = sum(len(chunk.tokens) for chunk in chunks)
        padded = -(-rows // TILE_ROWS) * TILE_ROWS
        tokens = torch.zeros(padded, dtype=torch.int64)
        positions = torch.zeros(padded, dtype=torch.int64)
        spans: list[tuple[Chunk, int, torch.Tensor]] = []  # chunk, its first row, its block table
        slots: list[torch.Tensor] = []
        row = 0
        for chunk in chunks:
            end = row + len(chunk.tokens)
            tokens[row:end] = torch.tensor(chunk.tokens, dtype=torch.int64)
            positions[row:end] = torch.arange(chunk.start, chunk.start + len(chunk.tokens))
            slots.append(pool.slots(chunk.blocks, chunk.start, chunk.start + len(chunk.tokens)))
            spans.append((chunk, row, torch.tensor(chunk.blocks, dtype=torch.int64)))
            row = end
        slot = torch.cat(slots)
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        ahead = torch.ones(pool.block_tokens, pool.block_tokens, dtype=torch.bool).triu(1)
        ahead = ahead.repeat_interleave(self.config.heads // self.config.kv_heads, dim=0)
        stream = self._embedding[tokens]
        for index, layer in enumerate(self._layers):
            query, key, value = self._project(layer, stream, cos, sin)
            pool.write(index, slot, key[:rows], value[:rows])
            if after_layer is not None:
                after_layer(index)
            attended = torch.zeros_like(query)
            for chunk, first, table in spans:
                tiles = -(-(chunk.start + len(chunk.tokens)) // pool.block_tokens)
                context = pool.read(index, table[:tiles])
                _attend(chunk, query[first:], *context, ahead, attended[first:])
            stream = stream + _linear(attended.flatten(1), layer.output)
            gate, up = _linear(_norm(stream, layer.mlp_norm), layer.gate_up).chunk(2, dim=1)
            stream = stream + _linear(torch.nn.functional.silu(gate) * up, layer.down)
        last = [first + len(chunk.tokens) - 1 for chunk, first, _ in spans]
        final = torch.zeros(-(-len(last) // TILE_ROWS) * TILE_ROWS, self.config.hidden)
        final[: len(last)] = stream[last]
        logits = _linear(_norm(final, self._final_norm), self._head)[: len(last)]
        return logits + self._unsayable

    def _project(
        self, layer: _Layer, stream: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key (both rotated) and value: (rows, heads or kv_heads, head_dim)."""
        config = self.config
        mixed = _linear(_norm(stream, layer.attention_norm), layer.qkv)
        mixed = mixed.view(len(stream), -1, config.head_dim)
        first_value = config.heads + config.kv_heads
        query, key = mixed[:, : config.heads], mixed[:, config.heads : first_value]
        return _rotate(query, cos, sin), _rotate(key, cos, sin), mixed[:, first_value:]


def _attend(
    chunk: Chunk,
    query: torch.Tensor,
    context_keys: torch.Tensor,
    context_values: torch.Tensor,
    ahead: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Causal attention of one chunk, one query tile after another.

    Args:
        chunk: its rows are the first ``len(chunk.tokens)`` of ``query`` and ``out``.
        query: (rows, heads, head_dim).
        context_keys: keys of the request's first blocks, (tokens, kv_heads, head_dim).
        context_values: values of the request's first blocks, like ``context_keys``.
        ahead: (block_tokens * heads / kv_heads, block_tokens), bool: keys masked for a row.
        out: (rows, heads, head_dim); the result.
    """
    kv_heads, head_dim = context_keys.shape[1:]
    heads, block_tokens = query.shape[1], ahead.shape[1]
    group = heads // kv_heads
    stop = chunk.start + len(chunk.tokens)
    tiles = -(-stop // block_tokens)
    scale = 1.0 / math.sqrt(head_dim)
    for tile in range(chunk.start // block_tokens, tiles):
        # Positions [begin, begin + block_tokens) are the tile, [low, high) of them are computed.
        begin = tile * block_tokens
        low, high = max(begin, chunk.start), min(begin + block_tokens, stop)
        asked = torch.zeros(block_tokens, heads, head_dim)
        asked[low - begin : high - begin] = query[low - chunk.start : high - chunk.start]
        asked = asked.view(block_tokens, kv_heads, group, head_dim).permute(1, 0, 2, 3)
        asked = asked.reshape(kv_heads, block_tokens * group, head_dim) * scale
        extent = begin + block_tokens
        scores = torch.bmm(asked, context_keys[:extent].permute(1, 2, 0))
        scores[:, :, begin:].masked_fill_(ahead, -math.inf)
        mixed = torch.bmm(scores.softmax(dim=-1), context_values[:extent].permute(1, 0, 2))
        mixed = mixed.view(kv_heads, block_tokens, group, head_dim).permute(1, 0, 2, 3)
        mixed = mixed.reshape(block_tokens, heads, head_dim)
        out[low - chunk.start : high - chunk.start] = mixed[low - begin : high - begin]


def _linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``rows @ weight`` in products of exactly TILE_ROWS rows; len(rows) is a multiple of it."""
    assert len(rows) % TILE_ROWS == 0, "pad to whole tiles first"
    rows = rows.contiguous()
    out = torch.empty(len(rows), weight.shape[1])
    for start in range(0, len(rows), TILE_ROWS):
        torch.mm(rows[start : start + TILE_ROWS], weight, out=out[start : start + TILE_ROWS])
    return out


def _norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm of each row."""
    return rows * torch.rsqrt(rows.square().mean(dim=1, keepdim=True) + NORM_EPSILON) * weight


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on (rows, heads, head_dim): the two halves of a head are the two coordinates."""
    left, right = heads.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
