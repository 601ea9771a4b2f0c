"""The interface of a store for the records of a cluster's nodes: names and bytes.

A store is a service outside of the nodes that can be unreachable, suspended, emptied and restarted.
So each call ends within :data:`CALL_S`.
"""

from collections.abc import AsyncGenerator, Mapping
from typing import Final, Protocol

LEASE_S: Final = 10.0
"""A record expires this long after its node has last renewed its lease."""
CALL_S: Final = 2.0
"""Time limit of each call."""


class RecordStore(Protocol):
    """The records of one cluster, for one node. Belongs to one event loop.

    Every call raises :class:`~kvstore.protocol.errors.TransferError` when the store is away or does
    not answer in time, and :class:`~kvstore.protocol.errors.InvalidArgument` when it rejects this
    node's credentials: ``field`` is then ``login``, ``authority``, ``certificate`` or ``key``.
    After an error the store is closed and opened again. No error contains contents of those files.

    Attributes:
        lease_s: seconds after the last renewal in which a record is gone.
    """

    lease_s: float

    async def open(self) -> None:
        """Connect, each time to the next of several endpoints. Reads the files."""

    async def close(self) -> None:
        """Disconnect. The lease and the record stay; may be called at any time."""

    async def settings(self, offered: bytes) -> bytes:
        """The settings record of the cluster; if there is none, the offered one is stored."""

    async def claim(self, name: str, value: bytes, expected: bytes | None) -> bytes | None:
        """Put a record under this process's lease, if the current one is the expected one.

        Args:
            name: of a node.
            value: its record.
            expected: the expected record; None = there is none.

        Returns:
            None on success; otherwise the current record, empty if there is none.
        """

    async def renew(self) -> bool:
        """Renew the lease; False = it has expired, so the claimed record may be gone."""

    async def check(self) -> None:
        """Only check: raises if the store is away, which a watch may not notice."""

    async def withdraw(self, name: str, value: bytes) -> None:
        """Delete a record if it is still this one."""

    def watch(self) -> AsyncGenerator[Mapping[str, bytes], None]:
        """All records by name: at once, and again after every change. Ends only with an error.

        Changes before the first iteration are in the first answer.
        """
