"""A store outside of the nodes: records under a lease, and one record of settings. Bytes only."""

from collections.abc import AsyncGenerator, Mapping
from typing import Literal, Protocol

import msgspec

StoreKind = Literal["etcd", "redis"]


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a store is, and how to be let in. Files are read by whoever opens the store.

    Attributes:
        kind: ``etcd`` or ``redis``.
        cluster: name of the cluster whose records these are.
        endpoints: ``host:port`` of each server; tried in turns.
        login: file with one line ``user:password``; empty = none.
        authority: PEM file of the servers' authority; empty = no TLS.
        certificate: PEM file with the certificate to show; empty = none.
        key: PEM file with its private key.
    """

    kind: StoreKind
    cluster: str
    endpoints: tuple[str, ...]
    login: str = ""
    authority: str = ""
    certificate: str = ""
    key: str = ""


class RecordStore(Protocol):
    """The records of one cluster.

    Every call ends within two seconds. Every method but :meth:`close` raises ``PeerUnreachable`` if
    the store does not answer, or not as it should; the call may have taken effect then.
    """

    async def open(self) -> None:
        """Connect, and begin a lease; what was claimed under an earlier one is another's now."""
        ...

    async def close(self) -> None:
        """End the connection, and the lease if that can be said at once; nothing if not open."""
        ...

    async def settings(self, offered: bytes) -> bytes:
        """Write the settings of the cluster unless there are some.

        Args:
            offered: those of this node.

        Returns:
            The settings that are there now.
        """
        ...

    async def claim(self, name: str, value: bytes, expected: bytes | None) -> bytes | None:
        """Write a record, if what is there is what is expected. It ends with this lease.

        Args:
            name: of the node.
            value: the record.
            expected: what is there; None = nothing.

        Returns:
            None if it is written, else what is there instead; empty if nothing is.
        """
        ...

    async def renew(self) -> bool:
        """Prolong the lease.

        Returns:
            Whether there was one; if not, everything must be claimed again, after :meth:`open`.
        """
        ...

    async def withdraw(self, name: str, value: bytes) -> None:
        """Remove a record, if this is what is there."""
        ...

    def watch(self) -> AsyncGenerator[Mapping[str, bytes], None]:
        """All records by name: at once, and again after every change.

        Changes that follow each other closely may be told together.
        """
        ...
