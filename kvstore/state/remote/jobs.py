"""Jobs that a node gives to its peer side, and the reports on them. Pure values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.page import ShardSpec, SpaceIdentity
from kvstore.state.tree.node import Retention
from kvstore.state.tree.slots import Slot


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """Limits of all fetches from peers.

    Attributes:
        in_flight_bytes_max: maximum slot bytes that jobs may fill at a time, including slots that a
            failed read may still write.
        fetch_ns: maximum time in which a request gets pages of peers.
    """

    in_flight_bytes_max: int
    fetch_ns: int = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Locate:
    """Which peers have a prefix of these pages?

    Attributes:
        number: names the query.
        keys: consecutive, 32 bytes each; of a lookup, from the start of their chain.
    """

    number: int
    identity: SpaceIdentity
    shards: tuple[ShardSpec, ...]
    keys: bytes


class Holding(NamedTuple):
    """One peer has a leading prefix.

    Attributes:
        peer: its name.
        pages: how many of the keys are a hit there for all requested shards; for a KV group with
            ``window_pages``, only the last pages of these.
    """

    peer: str
    pages: int


@dataclass(frozen=True, slots=True)
class PeerFetch:
    """Read consecutive pages of one shard from one peer into slots of this node.

    Attributes:
        job: names the job.
        before: keys of the chain before the first wanted page; may be empty.
        keys: of the wanted pages, 32 bytes each.
        slots: the slot of each page; its address is ``SlotTable.address``, and its memory may not
            be created yet.
        deadline_ns: after it no request waits for the job.
        copies: the peer itself requested the pages, not an engine.
    """

    job: int
    peer: str
    identity: SpaceIdentity
    shard: ShardSpec
    before: bytes
    keys: bytes
    slots: list[Slot]
    deadline_ns: int
    copies: bool = False


class FetchEnd(NamedTuple):
    """A job has ended.

    Attributes:
        job: number of the job.
        digests: 16 bytes for each leading page that arrived and matched its digest.
        error: why the others did not; None if the peer just does not have them.
        settled: nothing writes into the slots any more; if False, the node is told later.
        kept: how long each fetched page is kept; empty = all until their room is needed.
    """

    job: int
    digests: bytes
    error: KVStoreError | None
    settled: bool
    kept: Sequence[Retention] = ()


@dataclass(frozen=True, slots=True)
class PeerBring:
    """Ask one peer to fetch consecutive pages of one shard from this node, and to keep them.

    Attributes:
        number: names the request.
        peer: name of the other node.
        keys: of the chain from its beginning, 32 bytes each.
        first: index of the first wanted page.
        idle_ms: for these pages the peer evicts only pages unused for this long; 0 = as for a put.
        deadline_ns: it has ended by then.
        gone: the pages were dropped from this node, and nothing is fetched: the peer should keep
            those that it has as ordinary ones.
    """

    number: int
    peer: str
    identity: SpaceIdentity
    shard: ShardSpec
    keys: bytes
    first: int
    idle_ms: int
    deadline_ns: int
    gone: bool = False


class BringEnd(NamedTuple):
    """A peer was asked to fetch pages.

    Attributes:
        number: of the request.
        pages: how many consecutive pages from the first wanted one on it has.
        error: why that is unknown; None = it has answered.
    """

    number: int
    pages: int
    error: KVStoreError | None


@dataclass(frozen=True, slots=True)
class Spread:
    """Copy pages of one shard that this node has to more nodes.

    Attributes:
        number: names the job.
        keys: of the chain from its beginning, 32 bytes each.
        first: index of the first wanted page.
        peers: number of other nodes that should have the pages.
        deadline_ns: the job has ended by then.
    """

    number: int
    identity: SpaceIdentity
    shard: ShardSpec
    keys: bytes
    first: int
    peers: int
    deadline_ns: int


class SpreadEnd(NamedTuple):
    """A :class:`Spread` has ended.

    Attributes:
        number: of the job.
        peers: number of other nodes that reported all pages.
        draining: number of nodes that were not asked because they are draining.
    """

    number: int
    peers: int
    draining: int = 0


PeerJob = Locate | PeerFetch | Spread
