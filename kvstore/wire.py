"""The messages of the node's Unix socket, and how they are framed.

A frame is a little-endian uint32 length and that many bytes: one msgpack array whose first element
is the message's tag. Keys, addresses and digests of a batch travel packed in one bytes field each.
``id`` numbers the requests of one connection; the answer repeats it. Requests without ``id`` get
no answer. Leases and puts are named by the client, so that it can take back one whose answer never
came. ``docs/internals/wire.md`` describes every message.
"""

import struct
from typing import Annotated, Final, TypeVar

import msgspec
import numpy as np

from kvstore.errors import InvalidArgument, ProtocolError
from kvstore.page import ALL_KEYS, KEY_BYTES, ShardSpec, SpaceIdentity

PROTOCOL_MAJOR: Final = 1
PROTOCOL_MINOR: Final = 3
SETTLED_MINOR: Final = 3
"""Since when Settled names what it covers. An older node takes it for more, so it is not told."""
FRAME_BYTES_MAX: Final = 16 << 20
BATCH_KEYS_MAX: Final = 65_536
KNOWN_EXTENTS_MAX: Final = 4096
LIST_MAX: Final = 4096
"""Elements of a list in a request: each becomes an object before anything can look at it."""
SHORT_BYTES_MAX: Final = 2 << 20
"""A request whose size is not that of packed keys, tokens or digests; for the same reason."""

ADDRESS: Final = np.dtype([("extent", "<u4"), ("generation", "<u4"), ("offset", "<u8")])
"""Where a slot is: extent number, the allocation that filled it, byte offset in the extent."""
_ADDRESS: Final = struct.Struct("<IIQ")
_LENGTH: Final = struct.Struct("<I")

T = TypeVar("T")
Listed = Annotated[list[T], msgspec.Meta(max_length=LIST_MAX)]


class Hello(msgspec.Struct, array_like=True, tag=1):
    """First message of a connection. ``session`` empty = a new session."""

    id: int
    major: int
    minor: int
    name: str
    session: bytes = b""
    origin: bytes = b""
    """Random name of what connects: its later connections may settle what its earlier ones left."""
    number: int = 0
    """Which of its origin's connections this is: a later one has a higher number. 0 = not told, as
    until protocol 1.2: such a connection is never settled."""


class Welcome(msgspec.Struct, array_like=True, tag=2):
    """Answer to Hello. ``session`` is the one asked for, or a new one when none was."""

    id: int
    major: int
    minor: int
    boot: bytes
    node: str
    session: bytes
    extent_bytes: int
    quota_bytes: int


class OpenSpace(msgspec.Struct, array_like=True, tag=3):
    """Find or make a space and shards in it."""

    id: int
    identity: SpaceIdentity
    shards: Listed[ShardSpec]


class SpaceOpened(msgspec.Struct, array_like=True, tag=4):
    """Answer to OpenSpace: numbers to use on this connection."""

    id: int
    space: int
    shards: list[int]


class Lookup(msgspec.Struct, array_like=True, tag=5):
    """How long a prefix is there? Waits up to ``wait_ms`` while more of it is being written."""

    id: int
    space: int
    shards: Listed[int]
    keys: bytes
    wait_ms: int = 0


class Found(msgspec.Struct, array_like=True, tag=6):
    """Answer to Lookup; ``on_disk`` of the pages are in no memory."""

    id: int
    pages: int
    pending: int
    on_disk: int = 0


class Acquire(msgspec.Struct, array_like=True, tag=7):
    """Lease the leading run of READY pages among ``keys`` that are in memory.

    For ``lease_ms``, or as long as the node grants. Waits up to ``wait_ms`` while pages of the run
    come from disk; with 0 none are loaded.
    """

    id: int
    lease: int
    space: int
    shard: int
    keys: bytes
    lease_ms: int
    wait_ms: int = 0


class Acquired(msgspec.Struct, array_like=True, tag=8):
    """Answer to Acquire: addresses (:data:`ADDRESS`) and digests (16 bytes) of the pages leased.

    ``more`` READY pages right behind them are on disk. The first ``lasting`` neither expire nor are
    read once: only they may be kept elsewhere. The lease runs out after ``lease_ms``; 0 = not told.
    """

    id: int
    addresses: bytes
    digests: bytes
    more: int = 0
    lasting: int = 0
    lease_ms: int = 0


class Release(msgspec.Struct, array_like=True, tag=9):
    """The reader of a lease is done. No answer."""

    lease: int


class BeginPut(msgspec.Struct, array_like=True, tag=10):
    """Ask for slots for pages; ``parent`` is the key before the first, empty at a chain's start.

    Waits up to ``wait_ms`` for the first slot while room is being made.
    """

    id: int
    put: int
    space: int
    shard: int
    keys: bytes
    parent: bytes
    tokens: bytes = b""
    wait_ms: int = 0


class PutGranted(msgspec.Struct, array_like=True, tag=11):
    """Answer to BeginPut: a status byte a key, and the addresses of the granted ones.

    ``busy``: those without room may have some soon, pages are being written to disk for it.
    """

    id: int
    statuses: bytes
    addresses: bytes
    busy: bool = False


class CommitPut(msgspec.Struct, array_like=True, tag=12):
    """The granted pages are written; 16 bytes of digest each. ``ttl_ms`` 0 = no expiry.

    ``memory_only``: they never go to disk (nor do pages with a TTL or to be read once).
    """

    id: int
    put: int
    digests: bytes
    ttl_ms: int = 0
    read_once: bool = False
    memory_only: bool = False


class Committed(msgspec.Struct, array_like=True, tag=13):
    """Answer to CommitPut: a status byte for each granted page."""

    id: int
    statuses: bytes


class AbortPut(msgspec.Struct, array_like=True, tag=14):
    """The writer has stopped and takes its put back. No answer."""

    put: int


class Corrupt(msgspec.Struct, array_like=True, tag=15):
    """A page's bytes did not match its digest. No answer.

    ``boot`` is the node's when the page was leased: in another life the numbers name another page.
    """

    space: int
    shard: int
    key: bytes
    generation: int
    boot: bytes = b""


class Settled(msgspec.Struct, array_like=True, tag=16):
    """Nothing that began on its origin's connections before one number touches bytes any more.

    No answer. A ``before`` of 0, which is what clients until protocol 1.2 say, covers nothing.
    """

    before: int = 0


class ReportPrefill(msgspec.Struct, array_like=True, tag=17):
    """What computing a token costs this engine. No answer."""

    seconds_per_token: float


class Stats(msgspec.Struct, array_like=True, tag=18):
    """Ask for the node's statistics."""

    id: int


class StatsReply(msgspec.Struct, array_like=True, tag=19):
    """Answer to Stats: a JSON object."""

    id: int
    json: bytes


class FetchExtents(msgspec.Struct, array_like=True, tag=20):
    """First and only message of a short connection: send me the descriptors of these extents.

    ``known``: extents that the sender has mapped; it wants to know which of them are gone.
    ``boot``: whose extents they are; another boot refuses, as its extents have the same numbers.
    """

    session: bytes
    extents: Listed[int]
    known: Listed[int] = []
    boot: bytes = b""


class ExtentsFollow(msgspec.Struct, array_like=True, tag=21):
    """Answer to FetchExtents, sent with one descriptor for each of ``extents``.

    ``gone``: those of ``known`` whose numbers no address of this session will ever name again.
    """

    extents: list[int]
    gone: list[int] = []


class Failure(msgspec.Struct, array_like=True, tag=22):
    """Answer to a request that failed; ``field`` names the wrong argument, if one is."""

    id: int
    code: str
    message: str
    field: str = ""


class Ping(msgspec.Struct, array_like=True, tag=23):
    """Are you there?"""

    id: int


class Pong(msgspec.Struct, array_like=True, tag=24):
    """Answer to Ping."""

    id: int


class Persist(msgspec.Struct, array_like=True, tag=25):
    """Answer once these READY pages and all before them survive a crash, or fail."""

    id: int
    space: int
    shard: int
    keys: bytes
    wait_ms: int


class Persisted(msgspec.Struct, array_like=True, tag=26):
    """Answer to Persist."""

    id: int


Request = (
    Hello | OpenSpace | Lookup | Acquire | Release | BeginPut | CommitPut | AbortPut | Corrupt
    | Settled | ReportPrefill | Stats | FetchExtents | Ping | Persist
)  # fmt: skip
Answer = (
    Welcome | SpaceOpened | Found | Acquired | PutGranted | Committed | StatsReply | ExtentsFollow
    | Failure | Pong | Persisted
)  # fmt: skip

_ENCODER: Final = msgspec.msgpack.Encoder()
_REQUESTS: Final = msgspec.msgpack.Decoder(Request)
_ANSWERS: Final = msgspec.msgpack.Decoder(Answer)
_FIXARRAY: Final = 0x9
_LONG: Final = (5, 7, 10, 12, 25)
"""Tags of the requests with packed fields."""
_NO_MESSAGE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidArgument)
"""Broken bytes, bytes nested without end, and values that their own type refuses."""


def encode(message: Request | Answer) -> bytes:
    """One frame, length included."""
    body = _ENCODER.encode(message)
    return _LENGTH.pack(len(body)) + body


def decode_request(body: bytes | memoryview) -> Request:
    """The request in a frame's body.

    Raises:
        ProtocolError: it is no message of this protocol; says where it is wrong.
    """
    if len(body) > SHORT_BYTES_MAX and not (body[0] >> 4 == _FIXARRAY and body[1] in _LONG):
        raise ProtocolError(f"no request of this kind takes {len(body)} bytes")
    try:
        request: Request = _REQUESTS.decode(body)
    except _NO_MESSAGE as error:
        raise ProtocolError(f"not a request of protocol {PROTOCOL_MAJOR}: {error}") from error
    return request


def decode_answer(body: bytes | memoryview) -> Answer:
    """The answer in a frame's body.

    Raises:
        ProtocolError: it is no message of this protocol.
    """
    try:
        answer: Answer = _ANSWERS.decode(body)
    except _NO_MESSAGE as error:
        raise ProtocolError(f"not an answer of protocol {PROTOCOL_MAJOR}: {error}") from error
    return answer


def pack_address(extent: int, generation: int, offset: int) -> bytes:
    """One :data:`ADDRESS` as bytes."""
    return _ADDRESS.pack(extent, generation & 0xFFFFFFFF, offset)


def unpack_addresses(addresses: bytes) -> list[tuple[int, int, int]]:
    """``(extent, generation, offset)`` of each :data:`ADDRESS`; faster than numpy for a few."""
    return list(_ADDRESS.iter_unpack(addresses))


def frame_length(prefix: bytes | bytearray | memoryview) -> int:
    """The body length that a frame's first four bytes announce.

    Raises:
        ProtocolError: more than FRAME_BYTES_MAX; the stream cannot be followed any further.
    """
    (length,) = _LENGTH.unpack_from(prefix)
    if length > FRAME_BYTES_MAX:
        raise ProtocolError(f"a frame of {length} bytes is over the limit of {FRAME_BYTES_MAX}")
    return int(length)


class FrameReader:
    """Cuts a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def unread_bytes(self) -> int:
        """Bytes that were received and not given as bodies."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes | memoryview]:
        """Take received bytes; give the bodies that are complete now.

        Raises:
            ProtocolError: a frame is too long.
        """
        bodies: list[bytes | memoryview] = []
        body = self.add(data)
        while body is not None:
            bodies.append(body)
            body = self.next()
        return bodies

    def add(self, data: bytes) -> bytes | memoryview | None:
        """Take received bytes; give the first body that is complete now, :meth:`next` the others.

        Raises:
            ProtocolError: a frame is too long.
        """
        if not self._buffer and len(data) > _LENGTH.size and frame_length(data) == len(data) - 4:
            return memoryview(data)[4:]  # one whole frame, as nearly always
        self._buffer += data
        return self.next()

    def next(self) -> bytes | None:
        """The next body that is complete; None when none is.

        Raises:
            ProtocolError: a frame is too long.
        """
        buffer = self._buffer
        if len(buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + frame_length(buffer)
        if end > len(buffer):
            return None
        body = bytes(memoryview(buffer)[_LENGTH.size : end])
        del buffer[:end]
        return body


def count_keys(packed: bytes) -> int:
    """The number of keys packed, 1..:data:`BATCH_KEYS_MAX`.

    Raises:
        InvalidArgument: their length or number cannot be right.
    """
    count, rest = divmod(len(packed), KEY_BYTES)
    if rest:
        raise InvalidArgument("keys", f"{len(packed)} bytes are no whole number of 32-byte keys")
    if not 1 <= count <= BATCH_KEYS_MAX:
        raise InvalidArgument("keys", f"{count} keys, not 1..{BATCH_KEYS_MAX}")
    refuse_all_keys("keys", packed)
    return count


def refuse_all_keys(field: str, packed: bytes) -> None:
    """Refuse the one value of 32 bytes that is no page's key: see :data:`ALL_KEYS`.

    Raises:
        InvalidArgument: it is among the packed keys.
    """
    at = packed.find(ALL_KEYS)
    while at >= 0:
        if at % KEY_BYTES == 0:
            raise InvalidArgument(field, "32 zero bytes are no page's key")
        at = packed.find(ALL_KEYS, at + 1)
