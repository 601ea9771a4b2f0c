"""Events of handoffs for debugging: JSON in the log, off by default.

They are at four points: before prefill sends, when a transfer has ended, after decode has got the
K/V, and in each step of decoding. docs/handoff.md lists the fields.
"""

import logging
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import xxhash

from engine_adapters.reference.pool import PagedPool
from engine_adapters.reference.request import Request
from kvstore.handoff.job_watch import EndedJob

_BLOCKS_SHOWN: Final = 16
_log: Final = logging.getLogger(__name__)


class HandoffObserver:
    """Writes the events of one engine; any thread may call it.

    Args:
        pool: of the engine.
        fake: no K/V are moved.
    """

    def __init__(self, pool: PagedPool, *, fake: bool) -> None:
        self._pool = pool
        self._fake = fake

    def before_send(
        self, request: Request, layers: range, positions: range, blocks: Sequence[int]
    ) -> None:
        """Prefill gives K/V of some layers and positions to the library."""
        size = 2 * len(layers) * len(blocks) * self._pool.block_bytes * self._pool.ranks
        stop = min(positions.stop * self._pool.block_tokens, request.prompt_tokens)
        keys = self._pool.keys[0]
        self._say(
            "before_send",
            request,
            cached_tokens=request.timings.cached_tokens + request.timings.restored_tokens,
            tokens=[positions.start * self._pool.block_tokens, stop],
            layers=[layers.start, layers.stop],
            blocks=_shown(blocks),
            layout={
                "layers": len(self._pool.keys),
                "ranks": self._pool.ranks,
                "kv_heads": self._pool.ranks * keys.shape[3],
                "head_dim": keys.shape[4],
                "dtype": str(keys.dtype).removeprefix("torch."),
                "block_tokens": self._pool.block_tokens,
            },
            bytes=0 if self._fake else size,
            **self._hashes(layers, positions[-1], blocks[-1]),
        )

    def transferred(self, job: EndedJob) -> None:
        """A job of a push has ended."""
        self._write(
            "transfer",
            {
                "room": job.room,
                "rank": job.rank,
                "transport": job.transport,
                "device": "cpu",
                "buffers": len(job.sizes),
                "buffer_bytes": job.sizes[:_BLOCKS_SHOWN],
                "bytes": sum(job.sizes),
                "seconds": round(job.seconds, 6),
                "code": job.code,
            },
        )

    def after_restore(self, request: Request, tokens: int, pushed: int, *, failed: bool) -> None:
        """The push of a request has ended at decode; K/V of so many tokens are in its blocks."""
        last = -(-request.prompt_tokens // self._pool.block_tokens) - 1
        layers = range(0 if failed else len(self._pool.keys))
        self._say(
            "after_restore",
            request,
            state="failed" if failed else "success",
            tokens=tokens,
            pushed_tokens=pushed,
            blocks=_shown(request.blocks[: last + 1]),
            **self._hashes(layers, last, request.blocks[last]),
        )

    def decode_step(self, request: Request, finish_reason: str | None) -> None:
        """A token was sampled; the K/V of the one before it are there.

        Nothing is written of a request that has no push.

        Args:
            request: with the new token; it has its blocks.
            finish_reason: None = it goes on.
        """
        if request.push is None:
            return
        at = len(request.tokens) - 2
        (slot,) = self._pool.slots(request.blocks, at, at + 1).tolist()
        self._say(
            "decode_step",
            request,
            step=request.output_tokens - 1,
            last_token=request.tokens[-2],
            next_token=request.tokens[-1],
            slot=slot,
            finish_reason=finish_reason,
        )

    def _hashes(self, layers: range, position: int, block: int) -> dict[str, Any]:
        """Of K and V of one block in some layers: the same at both engines."""
        found: dict[str, Any] = {"hash_position": position}
        for name, planes in (("k_hash", self._pool.keys), ("v_hash", self._pool.values)):
            rows = [planes[layer][:, block].transpose(0, 1).contiguous() for layer in layers]
            found[name] = [xxhash.xxh3_64_hexdigest(one.numpy().data) for one in rows]
        return found

    def _say(self, event: str, request: Request, **fields: Any) -> None:
        assert request.push is not None
        ids = {"request": request.id, "room": request.push.room}
        self._write(event, {**ids, "prompt_tokens": request.prompt_tokens, **fields})

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        _log.info("%s", msgspec.json.encode({"event": event, **fields}).decode())


def _shown(blocks: Sequence[int]) -> dict[str, Any]:
    """Some block numbers, and how many there are."""
    least, most = (min(blocks), max(blocks)) if blocks else (None, None)
    return {"count": len(blocks), "first": list(blocks[:_BLOCKS_SHOWN]), "min": least, "max": most}
