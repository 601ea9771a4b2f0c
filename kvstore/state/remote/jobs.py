"""What the node asks of the cluster, and the completions."""

from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import KVStoreError
from kvstore.page import ShardSpec, SpaceIdentity
from kvstore.state.tree.slots import Slot


@dataclass(frozen=True, slots=True)
class Locate:
    """Which peers have a prefix of these pages?

    Attributes:
        number: names the question in its completion.
        identity: the space.
        shards: the shards that a hit needs.
        keys: packed keys of the whole chain from its start.
    """

    number: int
    identity: SpaceIdentity
    shards: tuple[ShardSpec, ...]
    keys: bytes


class Holding(NamedTuple):
    """One peer has a leading prefix.

    Attributes:
        peer: name of the node.
        pages: leading pages that it has of all the asked shards.
    """

    peer: str
    pages: int


@dataclass(frozen=True, slots=True)
class PeerFetch:
    """Read consecutive pages of one shard from one peer into slots of this node.

    Attributes:
        job: names the fetch in its completion.
        peer: name of the node that has the pages.
        identity: the space.
        shard: the shard.
        before: packed keys of the chain before the first page; may be empty.
        keys: packed keys of the pages.
        slots: where each page goes.
        deadline_ns: monotonic time at which the fetch ends, with what came until then.
    """

    job: int
    peer: str
    identity: SpaceIdentity
    shard: ShardSpec
    before: bytes
    keys: bytes
    slots: list[Slot]
    deadline_ns: int


class FetchEnd(NamedTuple):
    """Completion of a :class:`PeerFetch`.

    Attributes:
        job: the fetch.
        digests: 16 bytes for each leading page that arrived and matched its digest.
        error: why pages are missing; None = all came, or the peer has no more.
        settled: False = the transport may still write into the slots; that it has ended is told
            later.
    """

    job: int
    digests: bytes
    error: KVStoreError | None
    settled: bool
