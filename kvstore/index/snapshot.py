"""Asks a node which pages it has: all of them, some chosen at random, or where certain keys are.

How to follow a node from a snapshot on, exactly:

1. Subscribe to its live events and keep them.
2. Clear the node's known state, and add the pages of :func:`read_snapshot`.
3. Apply, in order, every batch whose number is ``sequence_first`` or more: first those of a replay
   from ``sequence_first`` on, then the live ones. After a gap, start again.
4. Once every batch whose number is less than ``sequence_end`` is applied, exactly the node's pages
   are known, and stay known with each further batch. Before that the pages should not count.

``kvstore.state.ask.inventory`` says why. The frames are those of :mod:`kvstore.events.questions`.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from kvstore.events import zmtp
from kvstore.events.questions import (
    AUDIT,
    END,
    HEAD,
    KEYS_MAX,
    PAGES,
    REFUSED,
    SAMPLE,
    SNAPSHOT,
    TIERS,
    Asked,
    encode_question,
)
from kvstore.index.channel import CONNECT_S, EventConnection
from kvstore.index.credentials import PeerCredentials
from kvstore.index.keys import packed_keys
from kvstore.index.reading import UnreadableError, read
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.page import KEY_BYTES

T = TypeVar("T")

SILENCE_S: Final = 10.0
"""Maximum time between two messages of an answer."""
SNAPSHOT_S_MAX: Final = 120.0
"""Maximum duration of a snapshot, and of other answers."""
ANSWER_S_MAX: Final = 10.0
PAGES_MAX: Final = 1 << 28
"""Pages of one snapshot."""
_EVENTS_MAX: Final = 65_536
_PLACES_MAX: Final = 64
"""Maximum mean number of shards and media of the keys of a sample."""

_Word = Annotated[str, Meta(max_length=64)]
_Number = Annotated[int, Meta(ge=0)]


class SnapshotError(Exception):
    """A node did not answer as it should.

    Attributes:
        cause: a fixed word for counters: ``unsupported`` (an older node), ``busy`` or
            ``unavailable`` (ask again later), ``malformed`` (a question that this node does not
            understand), ``invalid`` (an answer that is wrong), ``late`` (no answer in time).
        retry_s: after which time to ask again, as the node says; 0 = it does not say.
    """

    def __init__(self, cause: str, message: str, retry_s: float = 0.0) -> None:
        super().__init__(message)
        self.cause = cause
        self.retry_s = retry_s


class SnapshotHead(NamedTuple):
    """The first part of an answer.

    Attributes:
        boot: boot id of the node, hex: batches of another one do not belong to this answer.
        sequence_first: number of the first batch that the answer does not contain.
    """

    boot: str
    sequence_first: int


class SnapshotPages(NamedTuple):
    """Pages that a node has.

    Attributes:
        space: hex digest of their space.
        shard: digest of their shard, as ``shard_digest`` in events.
        medium: ``CPU`` or ``STORAGE``.
        keys: their prefix keys of 32 bytes, packed; heads mostly before tails.
    """

    space: str
    shard: str
    medium: str
    keys: bytes


class SnapshotEnd(NamedTuple):
    """The last part of an answer, which is complete with it.

    Attributes:
        sequence_end: number of the first batch that was not published yet.
        pages: keys in all the parts before; of an audit, keys that are in any medium.
    """

    sequence_end: int
    pages: int


class Audited(NamedTuple):
    """Where a node has some pages.

    Attributes:
        head: which node, and the first batch that the answer may not contain.
        end: the first batch that the answer surely does not contain.
        media: names of media.
        places: uint8, one element a key: bit i = in ``media[i]``.
    """

    head: SnapshotHead
    end: SnapshotEnd
    media: list[str]
    places: np.ndarray[tuple[int], np.dtype[np.uint8]]


class _Head(msgspec.Struct):
    boot: _Word
    sequence_first: _Number


class _End(msgspec.Struct):
    sequence_end: _Number
    pages: _Number


class _Held(msgspec.Struct, tag_field="type", tag="BlockStored"):
    block_hashes: msgspec.Raw
    medium: _Word
    space: _Word
    shard_digest: _Word


class _Holding(msgspec.Struct, array_like=True):
    ts: float
    events: Annotated[list[_Held], Meta(max_length=_EVENTS_MAX)]


class _Tiers(msgspec.Struct):
    media: Annotated[list[_Word], Meta(max_length=8)]
    tiers: Annotated[bytes, Meta(max_length=KEYS_MAX)]


class _Refused(msgspec.Struct):
    code: _Word
    message: Annotated[str, Meta(max_length=1_024)]
    retry_s: Annotated[float, Meta(ge=0, le=3_600)] = 0.0


_HEAD: Final = msgspec.msgpack.Decoder(_Head)
_END: Final = msgspec.msgpack.Decoder(_End)
_HOLDING: Final = msgspec.msgpack.Decoder(_Holding)
_TIERS: Final = msgspec.msgpack.Decoder(_Tiers)
_REFUSED: Final = msgspec.msgpack.Decoder(_Refused)


async def read_snapshot(
    endpoint: str,
    credentials: str | PeerCredentials = "",
    *,
    silence_s: float = SILENCE_S,
    limit_s: float = SNAPSHOT_S_MAX,
    pages_max: int = PAGES_MAX,
) -> AsyncGenerator[SnapshotHead | SnapshotPages | SnapshotEnd, None]:
    """Read all pages of a node: a head, any number of pages, and an end.

    Close the generator (``contextlib.aclosing``) to stop early. It reads only as fast as its
    caller takes; a caller that stops for 10 s is disconnected by the node.

    Args:
        endpoint: the node's endpoint for replays, ``ipc://``, ``tcp://`` or ``peer://``.
        credentials: see :meth:`EventConnection.open`.
        silence_s: maximum time between two messages.
        limit_s: maximum time of all.
        pages_max: more pages are an error.

    Raises:
        SnapshotError: the node does not answer, refuses, or answers wrongly.
        OSError: the connection broke, as when the node ends; what was read is no snapshot.
        PeerError: the peer is not a publisher, or it refuses the token.
    """
    asking = _ask(endpoint, credentials, Asked(SNAPSHOT), silence_s, limit_s)
    async with aclosing(asking) as answer:
        async for part in _parts(answer, pages_max):
            yield part


async def sample(
    endpoint: str,
    credentials: str | PeerCredentials = "",
    *,
    keys: int = KEYS_MAX,
    limit_s: float = ANSWER_S_MAX,
) -> tuple[SnapshotHead, list[SnapshotPages], SnapshotEnd]:
    """Read some pages of a node, chosen at random.

    Args:
        endpoint: see :func:`read_snapshot`.
        credentials: see :func:`read_snapshot`.
        keys: about how many keys, 1 to 4,096; each may be in several shards and media.
        limit_s: maximum time.

    Raises:
        InvalidArgument: the number of keys is out of range.
        SnapshotError, OSError, PeerError: see :func:`read_snapshot`.
    """
    if not 1 <= keys <= KEYS_MAX:
        raise InvalidArgument("keys", f"{keys} is not in 1..{KEYS_MAX}")
    asking = _ask(endpoint, credentials, Asked(SAMPLE, keys), limit_s, limit_s)
    async with aclosing(asking) as answer:
        head, *pages, end = [part async for part in _parts(answer, keys * _PLACES_MAX)]
    assert isinstance(head, SnapshotHead)
    assert isinstance(end, SnapshotEnd)
    return head, [one for one in pages if isinstance(one, SnapshotPages)], end


async def audit(
    endpoint: str,
    credentials: str | PeerCredentials,
    space: str,
    shard: str,
    keys: bytes,
    *,
    limit_s: float = ANSWER_S_MAX,
) -> Audited:
    """Ask a node in which media it has some pages.

    Args:
        endpoint: see :func:`read_snapshot`.
        credentials: see :func:`read_snapshot`.
        space: hex digest of the space; one that the node does not know has no pages.
        shard: digest of the shard, as in events; one that the node does not know has no pages.
        keys: 1 to 4,096 prefix keys of 32 bytes, packed.
        limit_s: maximum time.

    Raises:
        InvalidArgument: there are no keys, or too many.
        SnapshotError, OSError, PeerError: see :func:`read_snapshot`.
    """
    count, rest = divmod(len(keys), KEY_BYTES)
    if rest or not 1 <= count <= KEYS_MAX:
        raise InvalidArgument("keys", f"{len(keys)} bytes are not 1..{KEYS_MAX} keys")
    head: SnapshotHead | None = None
    found: _Tiers | None = None
    asked = Asked(AUDIT, count, space, shard, keys)
    async with aclosing(_ask(endpoint, credentials, asked, limit_s, limit_s)) as answer:
        async for word, payload in answer:
            if word == HEAD and head is None:
                head = _head(payload)
            elif word == TIERS and head is not None and found is None:
                found = _read(_TIERS, payload)
            elif word == END and head is not None and found is not None:
                break
            else:
                raise SnapshotError("invalid", f"{word[:16]!r} is out of place")
    assert head is not None
    assert found is not None
    if len(found.tiers) != count:
        raise SnapshotError("invalid", f"it tells of {len(found.tiers)} keys, not {count}")
    places = np.frombuffer(found.tiers, dtype=np.uint8)
    return Audited(head, _end(payload), found.media, places)


async def _ask(
    endpoint: str,
    credentials: str | PeerCredentials,
    asked: Asked,
    silence_s: float,
    limit_s: float,
) -> AsyncGenerator[tuple[bytes, bytes], None]:
    """Word and payload of each message of the answer; the last one is the end."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    try:
        channel = await EventConnection.open(
            endpoint, zmtp.DEALER, credentials, min(CONNECT_S, limit_s)
        )
    except TimeoutError as error:
        raise SnapshotError("late", "it does not answer") from error
    try:
        await channel.send(encode_question(asked))
        while True:
            try:
                until = min(loop.time() + silence_s, deadline)
                async with asyncio.timeout_at(until):
                    messages: list[zmtp.Message] = []
                    while not messages:
                        messages = await channel.receive()
            except TimeoutError as error:
                raise SnapshotError("late", "its answer did not come in time") from error
            for message in messages:
                if len(message) != 4 or message[0]:
                    raise SnapshotError("invalid", "a message that is no part of an answer")
                word, payload = message[2], message[3]
                if word == REFUSED:
                    raise _refusal(payload)
                if not payload:  # the end of a replay, by a node that knows no questions
                    raise SnapshotError("unsupported", "this node does not answer questions")
                yield word, payload
                if word == END:
                    return
    finally:
        channel.close()


async def _parts(
    answer: AsyncGenerator[tuple[bytes, bytes], None], pages_max: int
) -> AsyncGenerator[SnapshotHead | SnapshotPages | SnapshotEnd, None]:
    """The parts of an answer that lists pages."""
    begun, pages = False, 0
    async for word, payload in answer:
        if word == HEAD and not begun:
            begun = True
            yield _head(payload)
        elif word == PAGES and begun:
            for held in _read(_HOLDING, payload).events:
                try:
                    keys = packed_keys(held.block_hashes)
                except UnreadableError as error:
                    raise SnapshotError("invalid", str(error)) from error
                pages += len(keys) // KEY_BYTES
                if pages > pages_max:
                    raise SnapshotError("invalid", f"it has more than {pages_max} pages")
                yield SnapshotPages(held.space, held.shard_digest, held.medium, keys)
        elif word == END and begun:
            end = _end(payload)
            if end.pages != pages:
                raise SnapshotError("invalid", f"{pages} pages came, not {end.pages}")
            yield end
        else:
            raise SnapshotError("invalid", f"{word[:16]!r} is out of place")


def _head(payload: bytes) -> SnapshotHead:
    head = _read(_HEAD, payload)
    return SnapshotHead(head.boot, head.sequence_first)


def _end(payload: bytes) -> SnapshotEnd:
    end = _read(_END, payload)
    return SnapshotEnd(end.sequence_end, end.pages)


def _refusal(payload: bytes) -> SnapshotError:
    refusal = _read(_REFUSED, payload)
    return SnapshotError(refusal.code, refusal.message, refusal.retry_s)


def _read(decoder: "msgspec.msgpack.Decoder[T]", payload: bytes) -> T:
    try:
        return read(decoder.decode, payload)
    except UnreadableError as error:
        raise SnapshotError("invalid", f"its answer cannot be read: {error}") from error
