"""The messages about the cluster between a node and its index process.

Each message is one :class:`kvstore.index.control.Aside`, as msgpack. A new process gets
:class:`BeginCluster` first, then :class:`Join` if the node has joined.
"""

from typing import Final

import msgspec

from kvstore.cluster.access import StoreServers
from kvstore.cluster.records import JoinStanding, NodeRecord
from kvstore.cluster.stores import StoreKind
from kvstore.index.credentials import PeerCredentials
from kvstore.index.reading import read


class StorePlace(msgspec.Struct, frozen=True):
    """Where a store is.

    Attributes:
        kind: ``etcd`` or ``redis``.
        servers: its servers.
    """

    kind: StoreKind
    servers: StoreServers


class DirectorySettings(msgspec.Struct, frozen=True, kw_only=True):
    """A directory that nodes share.

    Attributes:
        servers: of Redis.
        endpoint: ``host:port`` of this node's own peer service, whose events are announced.
        boot: boot id of this node.
    """

    servers: StoreServers
    endpoint: str
    boot: bytes


class ChildSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the cluster for the index process of a node.

    Attributes:
        credentials: for connections to other nodes.
        membership: where the membership is kept; None = nowhere.
        directory: the directory that nodes share; None = there is none.
    """

    credentials: PeerCredentials
    membership: StorePlace | None = None
    directory: DirectorySettings | None = None


class BeginCluster(msgspec.Struct, frozen=True, tag="begin"):
    """The first message to the process."""

    settings: ChildSettings


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Join the cluster as this node; replaces an earlier message.

    Attributes:
        record: about it.
        known: names of the nodes that it uses, if the process has just started.
    """

    record: NodeRecord
    known: list[str] = []


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Leave the cluster."""


class NodesFound(msgspec.Struct, frozen=True, tag="nodes"):
    """The nodes of the cluster, and whether this one is among them.

    Attributes:
        nodes: by name, as the store has them.
        standing: of this node.
    """

    nodes: dict[str, NodeRecord]
    standing: JoinStanding


class AskPages(msgspec.Struct, frozen=True, tag="ask"):
    """Which nodes have these pages?

    Attributes:
        number: names the query.
        space: hex digest of their space.
        shards: for each shard its hex digest, and how many of the last pages suffice; 0 = all.
        keys: their prefix keys, 32 bytes each.
        among: names and boot ids of the nodes that count; an empty id is any.
    """

    number: int
    space: str
    shards: list[tuple[str, int]]
    keys: bytes
    among: dict[str, bytes]


class HoldingsFound(msgspec.Struct, frozen=True, tag="told"):
    """The answer to an :class:`AskPages`.

    Attributes:
        number: of the query.
        holdings: name and boot id of each node, and how many leading pages it has; the longest
            prefix first.
    """

    number: int
    holdings: list[tuple[str, bytes, int]]


class DirectoryReport(msgspec.Struct, frozen=True, tag="directory"):
    """The state of the shared directory, reported periodically.

    Attributes:
        current: all pages of this node are announced, except waiting ones, and the directory
            answers.
        announced: pages announced, changes included.
        waiting: pages that wait.
        announcements: complete announcements of all pages.
        asked: queries that were answered.
        faults: failures, by cause.
        why: why the node's own events cannot be followed; empty if they can.
        trouble: why the last call to the directory failed; empty = it did not.
    """

    current: bool = False
    announced: int = 0
    waiting: int = 0
    announcements: int = 0
    asked: int = 0
    faults: dict[str, int] = {}
    why: str = ""
    trouble: str = ""


ToChild = BeginCluster | Join | Leave | AskPages
FromChild = NodesFound | HoldingsFound | DirectoryReport

_ENCODER: Final = msgspec.msgpack.Encoder()
_TO_CHILD: Final[msgspec.msgpack.Decoder[ToChild]] = msgspec.msgpack.Decoder(ToChild)
_FROM_CHILD: Final[msgspec.msgpack.Decoder[FromChild]] = msgspec.msgpack.Decoder(FromChild)


def encode_message(message: ToChild | FromChild) -> bytes:
    """A message as the body of an aside."""
    return _ENCODER.encode(message)


def message_to_child(body: bytes) -> ToChild:
    """Decode a message to the index process.

    Raises:
        UnreadableError: it is not one.
    """
    return read(_TO_CHILD.decode, body)


def message_from_child(body: bytes) -> FromChild:
    """Decode a message of the index process; raises the same as :func:`message_to_child`."""
    return read(_FROM_CHILD.decode, body)
