"""Where a cluster keeps the records of its nodes, as its memberships see it: names and bytes.

A store is a service outside of the nodes that can be away, stopped, emptied and restarted. So each
call has an end of its own, :data:`CALL_S` after its beginning at the latest.
"""

from collections.abc import AsyncGenerator, Mapping
from typing import Final, Protocol

LEASE_S: Final = 10.0
"""A record is gone so long after its node has renewed its lease for the last time."""
CALL_S: Final = 2.0
"""Limit of each call."""


class RecordStore(Protocol):
    """The records of one cluster, for one node. Belongs to one event loop.

    Every call raises :class:`~kvstore.protocol.errors.TransferError` when the store is away or does
    not answer in time, and :class:`~kvstore.protocol.errors.InvalidArgument` when it does not take
    what this node shows: ``field`` is then ``login``, ``authority``, ``certificate`` or ``key``.
    After an error the store is closed and opened again. No error contains what is in those files.

    Attributes:
        lease_s: seconds after the last renewal in which a record is gone.
    """

    lease_s: float

    async def open(self) -> None:
        """Connect; of several endpoints with the next one each time. Reads the files."""

    async def close(self) -> None:
        """Disconnect. The lease and the record stay; may be called at any time."""

    async def settings(self, offered: bytes) -> bytes:
        """The settings record of the cluster: what is there, else what is offered from now on."""

    async def claim(self, name: str, value: bytes, expected: bytes | None) -> bytes | None:
        """Put a record under this process's lease, if what is there is what is expected.

        Args:
            name: of a node.
            value: its record.
            expected: the present record; None = there is none.

        Returns:
            None when done; else what is there instead, empty if nothing is.
        """

    async def renew(self) -> bool:
        """Renew the lease; False = it has run out, so the record that was claimed may be gone."""

    async def check(self) -> None:
        """Ask for nothing: raises when the store is away, which a watch may not notice."""

    async def withdraw(self, name: str, value: bytes) -> None:
        """Delete a record if it is still this one."""

    def watch(self) -> AsyncGenerator[Mapping[str, bytes], None]:
        """All records by name: at once, and again after every change. Ends with an error only.

        What has changed before it is iterated is in the first answer.
        """
