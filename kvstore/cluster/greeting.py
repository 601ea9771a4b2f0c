"""The first messages between two nodes, and the differences that refuse a session; pure."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore.protocol import wire
from kvstore.protocol.errors import InvalidArgument

BOOT_BYTES: Final = 16
NODE_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Valid names of nodes. Names are in log lines, metrics and answers."""
PEER_MINOR: Final = 5
"""The minor version since which nodes have sessions with each other."""


@dataclass(frozen=True, slots=True)
class LocalNode:
    """This node, as it introduces itself to others.

    Attributes:
        cluster: name of the cluster; equal on all its nodes.
        name: name of the node; no two nodes of a cluster have the same.
        boot: 16 bytes that differ at every start.
        scheme: how it computes keys and digests of pages; equal on all nodes of a cluster.
    """

    cluster: str
    name: str
    boot: bytes
    scheme: str

    def hello(self, number: int) -> wire.PeerHello:
        """The first message to another node."""
        return wire.PeerHello(
            number, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, self.cluster, self.name, self.boot,
            self.scheme,
        )  # fmt: skip

    def admit(
        self, hello: wire.PeerHello | wire.FollowEvents, knows: Callable[[str], bool]
    ) -> None:
        """Check the first message of another node.

        Args:
            hello: the message.
            knows: whether the cluster has a node of the given name.

        Raises:
            InvalidArgument: it must not have a session; ``field`` names the difference.
        """
        if isinstance(hello, wire.PeerHello):
            check_protocol(hello.major, hello.minor)
        if hello.cluster != self.cluster:
            what = f"{hello.cluster!r}; node {self.name!r} is in {self.cluster!r}"
            raise InvalidArgument("cluster", what)
        if hello.scheme != self.scheme:
            raise InvalidArgument(
                "scheme", f"{hello.scheme!r}; node {self.name!r} uses {self.scheme!r}"
            )
        if hello.node == self.name:
            if isinstance(hello, wire.FollowEvents):
                return  # this node's index process, which announces its pages
            raise InvalidArgument("node", f"{hello.node!r} is the name of this node")
        if not NODE_NAME.fullmatch(hello.node):
            raise InvalidArgument("node", f"{hello.node[:64]!r} is not the name of a node")
        if not knows(hello.node):
            what = f"{hello.node!r} is not in cluster.nodes (or the membership) of {self.name!r}"
            raise InvalidArgument("node", what)


def check_protocol(major: int, minor: int) -> None:
    """Check the protocol version of another node.

    Raises:
        InvalidArgument: sessions with this version are not supported.
    """
    if major != wire.PROTOCOL_MAJOR or minor < PEER_MINOR:
        own = f"{wire.PROTOCOL_MAJOR}.{wire.PROTOCOL_MINOR}"
        raise InvalidArgument("protocol", f"{major}.{minor}; this node speaks {own}")
