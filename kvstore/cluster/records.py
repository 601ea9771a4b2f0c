"""What a node says about itself, and what all nodes of a cluster must have in common. Pure."""

from typing import Final

import msgspec

from kvstore.errors import InvalidArgument
from kvstore.wire import PROTOCOL_MAJOR

SCHEME: Final = "sha256/xxh3_128 1"
"""How keys and digests of pages are computed: see :mod:`kvstore.page`. Nodes that compute them in
different ways would take the pages of each other for damaged ones."""
BOOT_UNKNOWN: Final = b""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a cluster.

    Attributes:
        name: its name; no two live nodes have the same one.
        boot: its boot id, 16 bytes; empty = unknown until it is connected to.
        endpoint: ``host:port`` of its peer service.
    """

    name: str
    boot: bytes = BOOT_UNKNOWN
    endpoint: str


class ClusterTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What is equal on all nodes of a cluster.

    Attributes:
        cluster: name of the cluster.
        major: major version of the protocol.
        scheme: see :data:`SCHEME`.
    """

    cluster: str
    major: int = PROTOCOL_MAJOR
    scheme: str = SCHEME

    def refuse_other(self, told: "ClusterTerms") -> None:
        """Refuse a node with other terms.

        Args:
            told: what that node says.

        Raises:
            InvalidArgument: they differ; ``field`` is the first attribute that does.
        """
        for field in ("major", "cluster", "scheme"):
            ours, theirs = getattr(self, field), getattr(told, field)
            if ours != theirs:
                raise InvalidArgument(field, f"{theirs!r} here, {ours!r} in this cluster")
