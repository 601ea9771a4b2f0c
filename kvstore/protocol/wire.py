"""The messages of the node's Unix socket and of two nodes, and their framing.

A frame is a little-endian uint32 length and that many bytes: one msgpack array whose first element
is the tag of the message. Keys, addresses and digests of a batch are packed into one bytes field
each. ``id`` numbers the requests of a connection; the answer repeats it. Requests without ``id``
get no answer. The client chooses the ids of leases and puts, so that it can release one whose
answer was lost. ``docs/internals/wire.md`` describes every message.
"""

import struct
from typing import Annotated, Final, TypeVar

import msgspec
import numpy as np

from kvstore.protocol.errors import InvalidArgument, ProtocolError
from kvstore.protocol.page import ALL_KEYS, KEY_BYTES, EngineLabel, ShardSpec, SpaceIdentity

PROTOCOL_MAJOR: Final = 1
PROTOCOL_MINOR: Final = 9
SETTLED_MINOR: Final = 3
"""The minor version since which Settled has ``before``. It is not sent to an older node, which
would settle too much."""
COPIES_MINOR: Final = 6
"""The minor version since which a node understands Bring and Replicate."""
AHEAD_MINOR: Final = 7
"""The minor version since which a node reserves slots ahead, and understands StorePage."""
CONVERSATIONS_MINOR: Final = 8
"""The minor version since which a node understands KeepConversation."""
TURNS_MINOR = 9
"""The minor version since which a BeginPut can wait for the page before its own."""
FRAME_BYTES_MAX: Final = 16 << 20
BATCH_KEYS_MAX: Final = 65_536
HOLDER_CHARS_MAX: Final = 64
"""Maximum length of the name of a node in a Lookup."""
CONVERSATION_CHARS_MAX: Final = 256
"""Maximum length of the name of a conversation."""
KEEP_KEYS_MAX: Final = 128
"""Maximum keys of a KeepConversation."""
KNOWN_EXTENTS_MAX: Final = 4096
LIST_MAX: Final = 4096
"""Maximum elements of a list, because each is decoded to an object before it can be checked."""
TRANSPORTS_MAX: Final = 16
"""Maximum transports that a node tells of, for the same reason."""
SHORT_BYTES_MAX: Final = 2 << 20
"""Maximum size of a request without packed keys, tokens or digests, for the same reason."""

ADDRESS: Final = np.dtype([("extent", "<u4"), ("generation", "<u4"), ("offset", "<u8")])
"""Address of a slot: extent number, generation of the extent's allocation, byte offset."""
KEPT: Final = np.dtype([("left_ms", "<u8"), ("read_once", "u1"), ("memory_only", "u1")])
"""How long a page stays that is lent to another node: milliseconds from the answer on, or
:data:`NO_TTL`; whether its first read is its last; whether it may not go to disk."""
NO_TTL: Final = (1 << 64) - 1
TTL_MS_MAX: Final = 10 * 366 * 86_400_000
"""Maximum lifetime of a page with a TTL."""
FETCH_S_MAX: Final = 1e6
"""What it may be said to take to fetch pages; no NaN and nothing infinite gets into an estimate."""
_ADDRESS: Final = struct.Struct("<IIQ")
_LENGTH: Final = struct.Struct("<I")


T = TypeVar("T")
Listed = Annotated[list[T], msgspec.Meta(max_length=LIST_MAX)]
Pages = Annotated[int, msgspec.Meta(ge=0, le=BATCH_KEYS_MAX)]


class Hello(msgspec.Struct, array_like=True, tag=1):
    """First message of a connection. ``session`` empty = a new session."""

    id: int
    major: int
    minor: int
    name: str
    session: bytes = b""
    origin: bytes = b""
    """Random id of the client: its later connections may settle leases and puts of its earlier
    ones."""
    number: int = 0
    """Number of this connection among those of its origin; later ones have higher numbers. 0 =
    unknown (protocol 1.2 and older): such a connection is never settled."""
    engine: EngineLabel | None = None
    """The engine of the process; None = unnamed (and protocol 1.3 and older)."""


class Welcome(msgspec.Struct, array_like=True, tag=2):
    """Answer to Hello. ``session`` is the requested one, or a new one."""

    id: int
    major: int
    minor: int
    boot: bytes
    node: str
    session: bytes
    extent_bytes: int
    quota_bytes: int


class OpenSpace(msgspec.Struct, array_like=True, tag=3):
    """Open a space and shards of it; create them if necessary."""

    id: int
    identity: SpaceIdentity
    shards: Listed[ShardSpec]


class SpaceOpened(msgspec.Struct, array_like=True, tag=4):
    """Answer to OpenSpace: numbers to use on this connection."""

    id: int
    space: int
    shards: Listed[int]


class Lookup(msgspec.Struct, array_like=True, tag=5):
    """Ask how long a prefix is stored; wait up to ``wait_ms`` while its next pages are written.

    ``holder`` names a node that has the first ``held`` pages, as far as the engine knows: the
    directory is not asked for these. Empty = the engine knows of none (and protocol 1.4 and older).
    """

    id: int
    space: int
    shards: Listed[int]
    keys: bytes
    wait_ms: int = 0
    holder: str = ""
    held: int = 0


class Found(msgspec.Struct, array_like=True, tag=6):
    """Answer to Lookup; ``on_disk`` of the pages are only on disk.

    Peers have ``remote`` further pages after ``pages``; an Acquire that waits fetches them, in some
    ``remote_s`` seconds.
    """

    id: int
    pages: Pages
    pending: Pages
    on_disk: Pages = 0
    remote: Pages = 0
    remote_s: Annotated[float, msgspec.Meta(ge=0, le=FETCH_S_MAX)] = 0.0


class Acquire(msgspec.Struct, array_like=True, tag=7):
    """Lease the leading run of READY pages among ``keys`` that are in memory.

    For ``lease_ms``, or less if the node limits it. Waits up to ``wait_ms`` while pages of the run
    are loaded from disk or fetched from peers; with 0 none are. ``begins``: the chain begins with
    these keys, so that peers can be asked for them; False = unknown (and protocol 1.4 and older).
    ``copies``: another node was asked to keep copies of them, so that this is no use (since 1.6).
    ``parent``: the key before the first, so that peers can be asked if its page is here; empty =
    unknown (since 1.6).
    """

    id: int
    lease: int
    space: int
    shard: int
    keys: bytes
    lease_ms: int
    wait_ms: int = 0
    begins: bool = False
    copies: bool = False
    parent: bytes = b""


class Acquired(msgspec.Struct, array_like=True, tag=8):
    """Answer to Acquire: addresses (:data:`ADDRESS`) and digests (16 bytes) of the leased pages.

    An Acquire that waits may bring the next ``more`` pages: they are READY on disk, except the last
    ``remote`` of them, which peers have or are to be asked for. The first ``lasting`` pages have no
    TTL and are not read-once: only these may be copied to a slab. The lease expires after
    ``lease_ms``; 0 = unknown. ``kept`` is for another node, as in :class:`Lent`.
    """

    id: int
    addresses: bytes
    digests: bytes
    more: int = 0
    lasting: int = 0
    lease_ms: int = 0
    remote: int = 0
    kept: bytes = b""


class Release(msgspec.Struct, array_like=True, tag=9):
    """Release a lease. No answer.

    ``read``: its pages were read, and those to be read once leave the index. False since minor
    version 5 if another node did not get all of them, and if an engine has read none.
    """

    lease: int
    read: bool = True


class BeginPut(msgspec.Struct, array_like=True, tag=10):
    """Request slots for pages; ``parent`` is the key before the first, empty at a chain's start.

    Waits up to ``wait_ms`` for the first slot while slots are being freed; and if ``follows``,
    until the page of ``parent`` is there, or is being written: somebody else puts it now. Protocol
    1.8 and older know no ``follows``: they refuse the pages.
    """

    id: int
    put: int
    space: int
    shard: int
    keys: bytes
    parent: bytes
    tokens: bytes = b""
    wait_ms: int = 0
    follows: bool = False


class PutGranted(msgspec.Struct, array_like=True, tag=11):
    """Answer to BeginPut: a status byte for each key, and the addresses of the granted ones.

    ``busy``: slots for the others may be free soon, because pages are being written to disk.
    """

    id: int
    statuses: bytes
    addresses: bytes
    busy: bool = False


class CommitPut(msgspec.Struct, array_like=True, tag=12):
    """The granted pages are written; 16 bytes of digest each. ``ttl_ms`` 0 = no expiry.

    ``memory_only``: they are never written to disk (nor are pages with a TTL and read-once pages).
    ``ahead``: number of a put for which a slot of the same shard is to be reserved; 0 = none (and
    protocol 1.6 and older).
    """

    id: int
    put: int
    digests: bytes
    ttl_ms: int = 0
    read_once: bool = False
    memory_only: bool = False
    ahead: int = 0


class Committed(msgspec.Struct, array_like=True, tag=13):
    """Answer to CommitPut and StorePage: a status byte for each granted page.

    ``ahead``: the address of the slot that is reserved; empty = none is.
    """

    id: int
    statuses: bytes
    ahead: bytes = b""


class AbortPut(msgspec.Struct, array_like=True, tag=14):
    """Abort a put; the client has stopped writing. No answer."""

    put: int


class Corrupt(msgspec.Struct, array_like=True, tag=15):
    """A page's bytes did not match its digest. No answer.

    ``boot`` is the node's boot id when the page was leased: after a restart the numbers refer to
    other pages.
    """

    space: int
    shard: int
    key: bytes
    generation: int
    boot: bytes = b""


class Settled(msgspec.Struct, array_like=True, tag=16):
    """All copies begun on this origin's connections with numbers below ``before`` have ended.

    No answer. A ``before`` of 0, as sent by clients with protocol 1.2 and older, settles nothing.
    """

    before: int = 0


class ReportPrefill(msgspec.Struct, array_like=True, tag=17):
    """Report the seconds per prompt token of this engine. No answer."""

    seconds_per_token: float


class Stats(msgspec.Struct, array_like=True, tag=18):
    """Request the node's statistics."""

    id: int


class StatsReply(msgspec.Struct, array_like=True, tag=19):
    """Answer to Stats: a JSON object."""

    id: int
    json: bytes


class FetchExtents(msgspec.Struct, array_like=True, tag=20):
    """Request the descriptors of extents; the first and only message of a short connection.

    ``known``: extents that the client has mapped; the answer names those that are gone. ``boot``:
    boot id of the node they belong to; a node with another boot id refuses, because its extents
    have the same numbers.
    """

    session: bytes
    extents: Listed[int]
    known: Listed[int] = []
    boot: bytes = b""


class ExtentsFollow(msgspec.Struct, array_like=True, tag=21):
    """Answer to FetchExtents, sent with one descriptor for each of ``extents``.

    ``gone``: those of ``known`` that no address of this session will use again.
    """

    extents: Listed[int]
    gone: Listed[int] = []


class Failure(msgspec.Struct, array_like=True, tag=22):
    """Answer to a failed request; ``field`` names the wrong argument, if any."""

    id: int
    code: str
    message: str
    field: str = ""


class Ping(msgspec.Struct, array_like=True, tag=23):
    """Check that the node answers."""

    id: int


class Pong(msgspec.Struct, array_like=True, tag=24):
    """Answer to Ping."""

    id: int


class Persist(msgspec.Struct, array_like=True, tag=25):
    """Answered when these READY pages and all pages before them are durable, or failed."""

    id: int
    space: int
    shard: int
    keys: bytes
    wait_ms: int


class Persisted(msgspec.Struct, array_like=True, tag=26):
    """Answer to Persist."""

    id: int


class PeerHello(msgspec.Struct, array_like=True, tag=27):
    """First message of the session of one node with another.

    ``cluster``: name of the cluster. ``node`` and ``boot``: name and boot id of the sender.
    ``scheme``: how it computes keys and digests of pages.
    """

    id: int
    major: int
    minor: int
    cluster: str
    node: str
    boot: bytes
    scheme: str


class PeerWelcome(msgspec.Struct, array_like=True, tag=28):
    """Answer to PeerHello.

    ``transports``: name of each transport through which this node can be read, and its endpoint. An
    endpoint ``:port`` without a host is at the host of the peer service.
    """

    id: int
    major: int
    minor: int
    node: str
    boot: bytes
    transports: Annotated[dict[str, str], msgspec.Meta(max_length=TRANSPORTS_MAX)]


class FollowEvents(msgspec.Struct, array_like=True, tag=29):
    """First message of a connection that carries the protocol of KV events afterwards.

    No answer. ``cluster``, ``node`` and ``scheme`` as in PeerHello. ``replay``: the connection asks
    for missed batches and the snapshot, instead of following.
    """

    cluster: str
    node: str
    scheme: str
    replay: bool


class Lent(msgspec.Struct, array_like=True, tag=30):
    """Answer to Acquire of another node: as Acquired, and the 16 bytes that open the pages.

    The pages can be read through a transport with ``ticket`` until the lease ends. ``kept`` says
    how long each may stay at the reader (:data:`KEPT`); empty = all until their room is needed.
    ``places``: name of each transport that reads these pages by their addresses → its endpoint, and
    the address of each page, 8 bytes each, little-endian. (Nodes before this field read over
    ``tcp``.)
    """

    id: int
    addresses: bytes
    digests: bytes
    more: int
    lasting: int
    lease_ms: int
    ticket: bytes
    kept: bytes = b""
    places: Annotated[dict[str, tuple[str, bytes]], msgspec.Meta(max_length=TRANSPORTS_MAX)] = {}


class Bring(msgspec.Struct, array_like=True, tag=31):
    """Ask another node to fetch pages from the node that asks, and to keep them.

    ``keys``: a chain from its beginning. It brings the pages from number ``first`` on, and those
    before them that it has not. It makes room only by evicting pages that were not used for
    ``idle_ms``; 0 = as for a put. Answered when it has them, or has got no more after ``wait_ms``.
    ``gone``: the node that asks has these pages no more: nothing is fetched, and those that came
    from it are no replicas any longer. An older node ignores it.
    """

    id: int
    space: int
    shard: int
    keys: bytes
    first: int
    wait_ms: int
    idle_ms: int = 0
    gone: bool = False


class Brought(msgspec.Struct, array_like=True, tag=32):
    """Answer to Bring: how many consecutive pages from ``first`` on are READY there now."""

    id: int
    pages: int


class Replicate(msgspec.Struct, array_like=True, tag=33):
    """Let ``copies`` nodes have these READY pages, this node included.

    Answered when they have, or after ``wait_ms``, or when no other node can take them.
    """

    id: int
    space: int
    shard: int
    keys: bytes
    copies: int
    wait_ms: int


class Replicated(msgspec.Struct, array_like=True, tag=34):
    """Answer to Replicate: how many nodes are known to have all of the pages, this one included.

    ``draining``: how many nodes were not asked because they are draining; a node of an earlier
    version does not say it.
    """

    id: int
    copies: int
    draining: int = 0


class StorePage(msgspec.Struct, array_like=True, tag=35):
    """Store a page whose bytes are written to the slot that was reserved for the put ``put``.

    Answered with Committed: STORED, or why it is not; then the slot stays reserved, under the
    number ``ahead``. ``ahead`` and the other fields are as in BeginPut and CommitPut; with an
    ``ahead`` of 0 the slot is given back. Since 1.7.
    """

    id: int
    put: int
    space: int
    shard: int
    key: bytes
    parent: bytes
    digest: bytes
    tokens: bytes = b""
    ttl_ms: int = 0
    read_once: bool = False
    memory_only: bool = False
    ahead: int = 0


class KeepConversation(msgspec.Struct, array_like=True, tag=36):
    """Keep pages of a conversation for ``ttl_ms`` from now on. No answer. Since 1.8.

    ``keys``: at most :data:`KEEP_KEYS_MAX`; the first one begins the chain, or follows one that is
    kept. ``bytes_max``: what the conversation may take; 0 = no limit of its own. A ``ttl_ms`` of 0
    ends it: its pages are left to the eviction policy; ``keys`` are empty then.
    """

    space: int
    name: str
    keys: bytes
    ttl_ms: int
    bytes_max: int = 0


Request = (
    Hello | OpenSpace | Lookup | Acquire | Release | BeginPut | CommitPut | AbortPut | Corrupt
    | Settled | ReportPrefill | Stats | FetchExtents | Ping | Persist | PeerHello | FollowEvents
    | Bring | Replicate | StorePage | KeepConversation
)  # fmt: skip
Answer = (
    Welcome | SpaceOpened | Found | Acquired | PutGranted | Committed | StatsReply | ExtentsFollow
    | Failure | Pong | Persisted | PeerWelcome | Lent | Brought | Replicated
)  # fmt: skip

_ENCODER: Final = msgspec.msgpack.Encoder()
_REQUESTS: Final = msgspec.msgpack.Decoder(Request)
_ANSWERS: Final = msgspec.msgpack.Decoder(Answer)
_FIXARRAY: Final = 0x9
_LONG: Final = (5, 7, 10, 12, 25, 31, 33, 36)
"""Tags of the requests with packed fields."""
_NO_MESSAGE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidArgument)
"""Invalid bytes, too deep nesting, and values that a type refuses."""


def encode(message: Request | Answer | FollowEvents) -> bytes:
    """Encode a message as one frame, including its length."""
    body = _ENCODER.encode(message)
    return _LENGTH.pack(len(body)) + body


def decode_request(body: bytes | memoryview) -> Request:
    """Decode the request in a frame's body.

    Raises:
        ProtocolError: it is not a message of this protocol; the message says where it is wrong.
    """
    if len(body) > SHORT_BYTES_MAX and not (body[0] >> 4 == _FIXARRAY and body[1] in _LONG):
        raise ProtocolError(f"a request of this kind has fewer than {len(body)} bytes")
    try:
        request: Request = _REQUESTS.decode(body)
    except _NO_MESSAGE as error:
        raise ProtocolError(f"not a request of protocol {PROTOCOL_MAJOR}: {error}") from error
    return request


def decode_answer(body: bytes | memoryview) -> Answer:
    """Decode the answer in a frame's body.

    Raises:
        ProtocolError: it is not a message of this protocol.
    """
    try:
        answer: Answer = _ANSWERS.decode(body)
    except _NO_MESSAGE as error:
        raise ProtocolError(f"not an answer of protocol {PROTOCOL_MAJOR}: {error}") from error
    return answer


def unpack_addresses(addresses: bytes) -> list[tuple[int, int, int]]:
    """``(extent, generation, offset)`` of each :data:`ADDRESS`; faster than numpy for a few."""
    return list(_ADDRESS.iter_unpack(addresses))


def frame_length(prefix: bytes | bytearray | memoryview) -> int:
    """The length of a frame's body, from its first four bytes.

    Raises:
        ProtocolError: it is more than FRAME_BYTES_MAX; the rest of the stream cannot be read.
    """
    (length,) = _LENGTH.unpack_from(prefix)
    if length > FRAME_BYTES_MAX:
        raise ProtocolError(f"a frame of {length} bytes is over the limit of {FRAME_BYTES_MAX}")
    return int(length)


class FrameReader:
    """Splits a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def unread_bytes(self) -> int:
        """Received bytes that were not returned as bodies yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes | memoryview]:
        """Add received bytes; return all complete bodies.

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
        """Add received bytes; return the first complete body, :meth:`next` the others.

        Raises:
            ProtocolError: a frame is too long.
        """
        if not self._buffer and len(data) > _LENGTH.size and frame_length(data) == len(data) - 4:
            return memoryview(data)[4:]  # exactly one frame: the common case
        self._buffer += data
        return self.next()

    def next(self) -> bytes | None:
        """The next complete body, or None.

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
    """The number of packed keys, 1..:data:`BATCH_KEYS_MAX`.

    Raises:
        InvalidArgument: the length or the number is wrong.
    """
    count, rest = divmod(len(packed), KEY_BYTES)
    if rest:
        raise InvalidArgument("keys", f"{len(packed)} bytes are not a whole number of 32-byte keys")
    if not 1 <= count <= BATCH_KEYS_MAX:
        raise InvalidArgument("keys", f"{count} keys, not 1..{BATCH_KEYS_MAX}")
    refuse_all_keys("keys", packed)
    return count


def refuse_all_keys(field: str, packed: bytes) -> None:
    """Refuse the 32-byte value that is never the key of a page: see :data:`ALL_KEYS`.

    Raises:
        InvalidArgument: the packed keys contain it.
    """
    # The first bytes of 64 KiB of keys are searched in half the time of all bytes.
    firsts, at = packed[::KEY_BYTES], -1
    while (at := firsts.find(0, at + 1)) >= 0:
        if packed.startswith(ALL_KEYS, at * KEY_BYTES):
            raise InvalidArgument(field, "32 zero bytes are not a valid key")
