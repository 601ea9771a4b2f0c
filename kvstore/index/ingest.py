"""One worker's event payloads → changes of the prefix index. Pure.

Events that name a space carry our prefix keys, which go straight in. All others carry an engine's
own hashes and go through :class:`~kvstore.index.foreign.ForeignBlocks`. Events of kinds that we do
not know are skipped; a payload that cannot be read at all is the caller's to handle as a loss.
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
"""In one batch; engines with a page a token publish one event a page."""
HASHES_MAX: Final = 65_536
"""In one event."""
TOKENS_MAX: Final = 262_144
"""In one event: what an engine computes in one step."""
HASH_BYTES_MAX: Final = 64
MEDIA_MAX: Final = 8
"""Media of one worker; events of others are not applied."""
_PIECE: Final = 1_024
"""Hashes after which others may run."""
_SHARD_MAX: Final = 1023
_MEDIUM_DEFAULT: Final = "GPU"
"""Engines that publish no medium have only one."""
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
        """Nothing but tokens decides about this KV, and every layer has it."""
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
    """Applies one worker's events; owns everything the index has of that worker.

    Attributes:
        published: when the newest batch was published, seconds since the epoch.
        skipped: events that were not applied: of kinds we do not know, with LoRA or extra keys, or
            of one medium too many.
    """

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
        self._media: set[str] = set()
        self.published = 0.0
        self.skipped = 0

    @property
    def unmapped(self) -> int:
        """Blocks that could not be mapped to pages, since the start."""
        return self._foreign.unmapped

    def apply(self, payload: bytes) -> Iterator[None]:
        """Apply one batch, piece by piece: others may run between two pieces.

        Raises:
            UnreadableError: the payload cannot be read; some of its events may be applied.
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
        """Forget everything this worker holds, from the first step on, piece by piece."""
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
    """Our prefix keys, packed, in pieces.

    Raises:
        UnreadableError: these are others.
    """
    if not all(isinstance(one, bytes) and len(one) == KEY_BYTES for one in hashes):
        raise UnreadableError("an event with a space has hashes that are not keys of 32 bytes")
    for start in range(0, len(hashes), _PIECE):
        yield b"".join(hashes[start : start + _PIECE])  # type: ignore[arg-type] # see above


def _is_nothing(raw: bytes) -> bool:
    """Whether this is None, or a list of nothing but None."""
    heads = {0xDC: 3, 0xDD: 5}  # lists of more than 15
    head = heads.get(raw[0], 1 if 0x90 <= raw[0] <= 0x9F else 0)
    return raw == _NIL or (bool(head) and raw.count(_NIL, head) == len(raw) - head)
