"""Applies the event payloads of one worker to the prefix index. Pure.

Events with a space have prefix keys, which are indexed directly. All others have an engine's own
hashes, which :class:`~kvstore.index.foreign.ForeignBlocks` maps. Events of unknown kinds are
skipped. If a payload cannot be read, the caller must treat it as lost.
"""

from collections.abc import Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvstore.index.foreign import ForeignBlocks
from kvstore.index.holders import PrefixIndex
from kvstore.index.reading import UnreadableError, read
from kvstore.page import KEY_BYTES

EVENTS_MAX: Final = 65_536
"""Maximum events in one batch; engines with one token per page publish one event per page."""
HASHES_MAX: Final = 65_536
"""Maximum hashes in one event."""
TOKENS_MAX: Final = 262_144
"""Maximum tokens in one event: those of one step of an engine."""
HASH_BYTES_MAX: Final = 64
MEDIA_MAX: Final = 8
"""Maximum media of one worker; events of further media are not applied."""
_PIECE: Final = 1_024
"""Hashes per step."""
_SHARD_MAX: Final = 1023
_MEDIUM_DEFAULT: Final = "GPU"
"""Medium of engines that do not publish one."""
_NIL: Final = b"\xc0"

_Hashes = Annotated[
    list[Annotated[bytes, Meta(max_length=HASH_BYTES_MAX)] | int], Meta(max_length=HASHES_MAX)
]
_Tokens = Annotated[list[int], Meta(max_length=TOKENS_MAX)]
_Word = Annotated[str, Meta(max_length=64)]
_Shard = Annotated[int, Meta(ge=0, le=_SHARD_MAX)]


class _Stored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    block_hashes: _Hashes
    parent_block_hash: Annotated[bytes, Meta(max_length=HASH_BYTES_MAX)] | int | None
    token_ids: _Tokens
    block_size: Annotated[int, Meta(ge=1)]
    medium: _Word | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = msgspec.Raw(_NIL)
    group_idx: int | None = None
    space: _Word | None = None
    shard: _Shard = 0

    @property
    def is_plain(self) -> bool:
        """Whether only tokens determine this KV, and all layers have it."""
        return (
            self.lora_id is None
            and self.lora_name is None
            and not self.group_idx
            and _is_nothing(bytes(self.extra_keys))
        )


class _Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: _Hashes
    medium: _Word | None = None
    group_idx: int | None = None
    space: _Word | None = None
    shard: _Shard = 0


class _Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


class _Kind(msgspec.Struct):
    type: str


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: Annotated[list[msgspec.Raw], Meta(max_length=EVENTS_MAX)]
    data_parallel_rank: int | None = None


_KNOWN: Final = {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
_BATCH: Final = msgspec.msgpack.Decoder(_Batch)
_EVENT: Final = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_KIND: Final = msgspec.msgpack.Decoder(_Kind)


class WorkerIngest:
    """Applies the events of one worker; owns all index entries of that worker.

    Attributes:
        published: publication time of the newest batch, seconds since the epoch.
        skipped: events that were not applied: of unknown kinds, with LoRA or extra keys, or with
            too many media.
    """

    def __init__(self, index: PrefixIndex, worker: str, domain: str, foreign: ForeignBlocks):
        """Start without entries.

        Args:
            index: the index to update.
            worker: name in the index.
            domain: domain for events without a space.
            foreign: maps the hashes of such events.
        """
        self._index = index
        self._worker = worker
        self._domain = domain
        self._foreign = foreign
        self._media: set[str] = set()
        self.published = 0.0
        self.skipped = 0

    @property
    def unmapped(self) -> int:
        """Blocks that could not be mapped to pages, since the start."""
        return self._foreign.unmapped

    def apply(self, payload: bytes) -> Iterator[None]:
        """Apply one batch in steps, so that the caller can yield between them.

        Raises:
            UnreadableError: the payload cannot be read; some of its events may have been applied.
        """
        batch = read(_BATCH.decode, payload)
        self.published = batch.ts
        for raw in batch.events:
            try:
                event = read(_EVENT.decode, raw)
            except UnreadableError:
                if read(_KIND.decode, raw).type in _KNOWN:
                    raise
                self.skipped += 1
                yield
                continue
            match event:
                case _Stored():
                    yield from self._stored(event)
                case _Removed():
                    yield from self._removed(event)
                case _Cleared():
                    yield from self.clear()
            yield

    def clear(self) -> Iterator[None]:
        """Delete all entries of this worker, in steps; they are misses from the first step on."""
        self._foreign.clear()
        self._media.clear()
        for _ in self._index.drop(self._worker):
            yield

    def _stored(self, event: _Stored) -> Iterator[None]:
        medium = event.medium or _MEDIUM_DEFAULT
        if medium not in self._media and len(self._media) >= MEDIA_MAX:
            self.skipped += 1
            return
        self._media.add(medium)
        if event.space is not None:
            for packed in _own_keys(event.block_hashes):
                self._index.store(self._worker, medium, event.space, packed, event.shard)
                yield
        elif event.is_plain:
            for keys in self._foreign.stored(
                medium,
                event.block_hashes,
                event.parent_block_hash,
                event.token_ids,
                event.block_size,
            ):
                self._index.store(self._worker, medium, self._domain, b"".join(keys))
                yield
        else:
            self.skipped += 1

    def _removed(self, event: _Removed) -> Iterator[None]:
        medium = event.medium or _MEDIUM_DEFAULT
        if event.space is not None:
            for packed in _own_keys(event.block_hashes):
                self._index.remove(self._worker, medium, event.space, packed, event.shard)
                yield
        elif not event.group_idx:
            for keys in self._foreign.removed(medium, event.block_hashes):
                self._index.remove(self._worker, medium, self._domain, b"".join(keys))
                yield


def _own_keys(hashes: list[bytes | int]) -> Iterator[bytes]:
    """Prefix keys, packed, in pieces.

    Raises:
        UnreadableError: these are not prefix keys.
    """
    if not all(isinstance(one, bytes) and len(one) == KEY_BYTES for one in hashes):
        raise UnreadableError("an event with a space has hashes that are not keys of 32 bytes")
    for start in range(0, len(hashes), _PIECE):
        yield b"".join(hashes[start : start + _PIECE])  # type: ignore[arg-type] # see above


def _is_nothing(raw: bytes) -> bool:
    """Whether this is None, or a list of None."""
    heads = {0xDC: 3, 0xDD: 5}  # lists with more than 15 elements
    head = heads.get(raw[0], 1 if 0x90 <= raw[0] <= 0x9F else 0)
    return raw == _NIL or (bool(head) and raw.count(_NIL, head) == len(raw) - head)
