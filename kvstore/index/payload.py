"""Decodes the payload of one batch of KV events. Pure.

Hashes, tokens and extra keys stay msgpack, for :mod:`kvstore.mover.chains`. The format is that of
vLLM and SGLang (an array of time, events and data-parallel rank; an event is a map with its kind in
``type``), with the fields ``space``, ``shard`` and ``shard_digest`` of our nodes.
"""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from kvstore.index.reading import UnreadableError, read
from kvstore.mover.chains import HASH_BYTES_MAX, Chains, WordBuffer

EVENTS_MAX: Final = 65_536
"""Maximum events in one batch; engines with one token per page publish one event per page."""
LONG_BYTES = 4_096
"""Bytes of a payload that is worth a look at where its tokens are; measured."""
_NIL: Final = b"\xc0"
_SHARD_MAX: Final = 1023
EXTRA_BYTES_MAX: Final = 512 << 10
"""Maximum bytes of the extra keys of an event: a hundred for each block of a long step."""
_EXTRAS_MAX: Final = 64
"""Maximum extra keys of a block."""
_LIST_MAX: Final = 65_536

_Word = Annotated[str, Meta(max_length=64)]
_Shard = Annotated[int, Meta(ge=0, le=_SHARD_MAX)]


class BlocksStored(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    """Blocks were stored in a medium; the fields are those of the engines."""

    block_hashes: msgspec.Raw
    parent_block_hash: Annotated[bytes, Meta(max_length=HASH_BYTES_MAX)] | int | None
    token_ids: msgspec.Raw
    block_size: Annotated[int, Meta(ge=1)]
    medium: _Word | None = None
    lora_id: int | str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = msgspec.Raw(_NIL)
    group_idx: int | None = None
    kv_cache_spec_kind: _Word | None = None
    kv_cache_spec_sliding_window: int | None = None
    space: _Word | None = None
    shard: _Shard = 0
    shard_digest: _Word | None = None


class BlocksRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    """Blocks were removed from a medium."""

    block_hashes: msgspec.Raw
    medium: _Word | None = None
    group_idx: int | None = None
    space: _Word | None = None
    shard: _Shard = 0
    shard_digest: _Word | None = None


class AllCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    """The worker has no block any more."""


KvEvent = BlocksStored | BlocksRemoved | AllCleared


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: Annotated[list[BlocksStored | BlocksRemoved | AllCleared], Meta(max_length=EVENTS_MAX)]
    data_parallel_rank: int | None = None


class _AnyBatch(msgspec.Struct, array_like=True):
    ts: float
    events: Annotated[list[msgspec.Raw], Meta(max_length=EVENTS_MAX)]
    data_parallel_rank: int | None = None


class _Kind(msgspec.Struct):
    type: str


_KNOWN: Final = {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
_BATCH: Final = msgspec.msgpack.Decoder(_Batch)
_ANY_BATCH: Final = msgspec.msgpack.Decoder(_AnyBatch)
_EVENT: Final = msgspec.msgpack.Decoder(BlocksStored | BlocksRemoved | AllCleared)
_KIND: Final = msgspec.msgpack.Decoder(_Kind)
_EXTRAS: Final = msgspec.msgpack.Decoder(
    Annotated[
        list[Annotated[list[Any], Meta(max_length=_EXTRAS_MAX)] | None], Meta(max_length=_LIST_MAX)
    ]
)
_HASHES: Final = msgspec.msgpack.Decoder(list[bytes | int])


def read_payload(
    payload: bytes, chains: Chains, spots: WordBuffer
) -> tuple[float, list[KvEvent], int]:
    """Decode one batch.

    Args:
        payload: the batch.
        chains: the implementation in use.
        spots: room for two numbers for each event of a batch with many tokens.

    Returns:
        When it was published, seconds since the epoch; its events, in order; and the number of
        further events that are of unknown kinds.

    Raises:
        UnreadableError: the payload, or an event of a known kind, is invalid.
    """
    count = chains.find_tokens(payload, spots) if len(payload) >= LONG_BYTES else -1
    try:
        if count > 0:
            batch = _read_without_tokens(payload, spots.array[: 2 * count].tolist())
        else:
            batch = _BATCH.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
        return _read_each(payload)
    return batch.ts, batch.events, 0


def _read_without_tokens(payload: bytes, spots: list[int]) -> _Batch:
    """Decode a batch whose token ids are known to be at ``spots``: msgspec is slow to skip them."""
    spans = list(zip(spots[::2], spots[1::2], strict=True))
    parts, at = [], 0
    for start, stop in spans:
        if stop:
            parts.append(payload[at:start])
            at = stop
    batch = _BATCH.decode(_NIL.join([*parts, payload[at:]]))
    for event, (start, stop) in zip(batch.events, spans, strict=True):
        if stop and type(event) is BlocksStored:
            event.token_ids = msgspec.Raw(payload[start:stop])
    return batch


def _read_each(payload: bytes) -> tuple[float, list[KvEvent], int]:
    """Decode event by event."""
    batch = read(_ANY_BATCH.decode, payload)
    events: list[KvEvent] = []
    for raw in batch.events:
        try:
            events.append(read(_EVENT.decode, raw))
        except UnreadableError:
            if read(_KIND.decode, raw).type in _KNOWN:
                raise
    return batch.ts, events, len(batch.events) - len(events)


def first_hash(hashes: bytes) -> bytes | int | None:
    """The first of the block hashes; None if there is none.

    Raises:
        UnreadableError: these are not block hashes.
    """
    found = read(_HASHES.decode, hashes)
    return found[0] if found else None


def read_extras(raw: bytes, lora: str | None, *, is_root: bool) -> tuple[str, list[bytes] | None]:
    """Other inputs than tokens and LoRA that distinguish the blocks of an event.

    vLLM publishes for each block a list of the name of the LoRA, (image, offset) pairs, the cache
    salt in the first block of a chain, and digests of embeddings.

    Args:
        raw: msgpack of a list with None or a list for each block; or of None.
        lora: name of the event's LoRA.
        is_root: whether its first block is the first of a chain.

    Returns:
        The cache salt, empty if there is none, and the msgpack of the other inputs of each block,
        empty for none; None instead of a list if no block has any.

    Raises:
        UnreadableError: ``raw`` is something else, or there are too many.
    """
    if is_nothing(raw):
        return "", None
    if len(raw) > EXTRA_BYTES_MAX:
        raise UnreadableError(f"extra keys of more than {EXTRA_BYTES_MAX} bytes")
    each = [list(one) if one else [] for one in read(_EXTRAS.decode, raw)]
    for one in each:
        if lora is not None and lora in one:
            one.remove(lora)
    salt = ""
    if is_root and each:
        words = [one for one in each[0] if isinstance(one, str)]
        if len(words) == 1:
            salt = words[0]
            each[0].remove(salt)
    if not any(each):
        return salt, None
    return salt, [msgspec.msgpack.encode(one) if one else b"" for one in each]


def is_nothing(raw: bytes) -> bool:
    """Whether this is the msgpack of None, or of a list of None."""
    if raw == _NIL:
        return True
    head = {0xDC: 3, 0xDD: 5}.get(raw[0], 1 if 0x90 <= raw[0] <= 0x9F else 0)
    return bool(head) and raw.count(_NIL, head) == len(raw) - head
