"""One worker's event payloads → changes of the prefix index. Pure.

Events that name a space carry our prefix keys, which go straight in. All others carry an engine's
own hashes and go through :class:`~conductor.foreign.ForeignBlocks`. Events of kinds that we do not
know are skipped; a payload that cannot be read at all is the caller's to handle as a loss.
"""

from typing import Annotated, Final

import msgspec

from conductor.foreign import BlockHash, ForeignBlocks
from conductor.index import PrefixIndex
from kvstore.page import KEY_BYTES

_SHARD_MAX: Final = 1023
_MEDIUM_DEFAULT: Final = "GPU"
"""Engines that publish no medium have only one."""


class _Stored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    medium: str | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[object] | None = None
    group_idx: int | None = None
    space: str | None = None
    shard: Annotated[int, msgspec.Meta(ge=0, le=_SHARD_MAX)] = 0

    @property
    def is_plain(self) -> bool:
        """Nothing but tokens decides about this KV, and every layer has it."""
        extra = any(key is not None for key in self.extra_keys or ())
        return self.lora_id is None and self.lora_name is None and not extra and not self.group_idx


class _Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    space: str | None = None
    shard: Annotated[int, msgspec.Meta(ge=0, le=_SHARD_MAX)] = 0


class _Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


class _Kind(msgspec.Struct):
    type: str


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_KNOWN: Final = {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
_BATCH: Final = msgspec.msgpack.Decoder(_Batch)
_EVENT: Final = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_KIND: Final = msgspec.msgpack.Decoder(_Kind)


class WorkerIngest:
    """Applies one worker's events; owns everything the index has of that worker."""

    def __init__(self, index: PrefixIndex, worker: str, domain: str, foreign: ForeignBlocks):
        """Start with nothing known.

        Args:
            index: changed in place.
            worker: name in the index.
            domain: what pages of events without a space are indexed under.
            foreign: maps the hashes of such events.
        """
        self._index = index
        self._worker = worker
        self._domain = domain
        self._foreign = foreign
        self.skipped = 0

    @property
    def unmapped(self) -> int:
        """Blocks that could not be mapped to pages, since the start."""
        return self._foreign.unmapped

    def apply(self, payload: bytes) -> float:
        """Apply one batch.

        Returns:
            when it was published, seconds since the epoch.

        Raises:
            msgspec.MsgspecError: the payload cannot be read; some of its events may be applied.
        """
        batch = _BATCH.decode(payload)
        for raw in batch.events:
            try:
                event = _EVENT.decode(raw)
            except msgspec.ValidationError:
                if _KIND.decode(raw).type in _KNOWN:
                    raise
                self.skipped += 1
                continue
            match event:
                case _Stored():
                    self._stored(event)
                case _Removed():
                    self._removed(event)
                case _Cleared():
                    self.clear()
        return batch.ts

    def clear(self) -> int:
        """Forget everything this worker holds; gives how many pages that were."""
        self._foreign.clear()
        return self._index.drop(self._worker)

    def _stored(self, event: _Stored) -> None:
        medium = event.medium or _MEDIUM_DEFAULT
        if event.space is not None:
            packed = _own_keys(event.block_hashes)
            self._index.store(self._worker, medium, event.space, packed, event.shard)
        elif event.is_plain:
            keys = self._foreign.stored(
                medium,
                event.block_hashes,
                event.parent_block_hash,
                event.token_ids,
                event.block_size,
            )
            if keys:
                self._index.store(self._worker, medium, self._domain, b"".join(keys))
        else:
            self.skipped += 1

    def _removed(self, event: _Removed) -> None:
        medium = event.medium or _MEDIUM_DEFAULT
        if event.space is not None:
            packed = _own_keys(event.block_hashes)
            self._index.remove(self._worker, medium, event.space, packed, event.shard)
        elif not event.group_idx:
            keys = self._foreign.removed(medium, event.block_hashes)
            if keys:
                self._index.remove(self._worker, medium, self._domain, b"".join(keys))


def _own_keys(hashes: list[BlockHash]) -> bytes:
    """Our prefix keys, packed.

    Raises:
        msgspec.ValidationError: these are others.
    """
    try:
        packed = b"".join(hashes)  # type: ignore[arg-type] # an int in it is the error below
    except TypeError as error:
        raise msgspec.ValidationError(
            "an event with a space has hashes that are no keys"
        ) from error
    if len(packed) != KEY_BYTES * len(hashes):
        raise msgspec.ValidationError("an event with a space has keys that are not 32 bytes long")
    return packed
