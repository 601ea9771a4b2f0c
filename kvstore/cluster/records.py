"""What is known of the nodes of a cluster. Pure."""

from typing import Final

import msgspec

SCHEME: Final = "sha256/xxh3_128 1"
"""How keys and digests of pages are computed: see :mod:`kvstore.page`. Nodes that compute them in
different ways would take the pages of each other for damaged ones."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a cluster.

    Attributes:
        name: its name; no two live nodes have the same one.
        boot: its boot id, 16 bytes; empty = unknown until it is connected to.
        endpoint: ``host:port`` of its peer service.
    """

    name: str
    boot: bytes = b""
    endpoint: str
