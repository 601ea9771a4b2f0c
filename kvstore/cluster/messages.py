"""What a node and its index process tell each other about the cluster.

Each message is one :class:`kvstore.index.control.Aside`, as msgpack. A new process knows nothing:
it is told :class:`BeginCluster` first, then :class:`Join` if the node has joined.
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


class ChildSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the index process of a node needs to know of the cluster.

    Attributes:
        credentials: what to show to other nodes.
        membership: where the membership is kept; None = nowhere.
    """

    credentials: PeerCredentials
    membership: StorePlace | None = None


class BeginCluster(msgspec.Struct, frozen=True, tag="begin"):
    """The first message to the process."""

    settings: ChildSettings


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Be this node of the cluster, in place of what was said before."""

    record: NodeRecord


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Be no node of the cluster any more."""


class NodesTold(msgspec.Struct, frozen=True, tag="nodes"):
    """The nodes of the cluster, and whether this one is among them.

    Attributes:
        nodes: by name, as the store has them.
        standing: of this node.
    """

    nodes: dict[str, NodeRecord]
    standing: JoinStanding


ToChild = BeginCluster | Join | Leave
FromChild = NodesTold

_ENCODER: Final = msgspec.msgpack.Encoder()
_TO_CHILD: Final[msgspec.msgpack.Decoder[ToChild]] = msgspec.msgpack.Decoder(ToChild)
_FROM_CHILD: Final[msgspec.msgpack.Decoder[FromChild]] = msgspec.msgpack.Decoder(FromChild)


def encode_message(message: ToChild | FromChild) -> bytes:
    """A message as the body of an aside."""
    return _ENCODER.encode(message)


def message_to_child(body: bytes) -> ToChild:
    """Read a message to the index process.

    Raises:
        UnreadableError: this is none.
    """
    return read(_TO_CHILD.decode, body)


def message_from_child(body: bytes) -> FromChild:
    """Read a message of the index process; raises the same as :func:`message_to_child`."""
    return read(_FROM_CHILD.decode, body)
