"""Which nodes a cluster has.

A membership that is kept outside of the nodes says so too, as soon as it knows; whoever watches
must expect that a node is named that has ended, and the other way round. Nothing but the hope for a
hit depends on it.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from kvstore.cluster.records import NodeRecord


class Membership(Protocol):
    """The nodes of a cluster. Belongs to one event loop."""

    async def join(self, record: NodeRecord) -> None:
        """Be a node of the cluster from now on, in place of an earlier start of the same node.

        Args:
            record: about this node.

        Raises:
            InvalidArgument: another live node has this name; ``field`` is ``name``.
            PeerUnreachable: the membership is away; nothing has changed.
        """

    def watch(self) -> AsyncGenerator[Mapping[str, NodeRecord], None]:
        """All nodes by name, this one included: at once, and again after every change.

        Changes that follow each other closely may be told together. There may be several watchers.
        A generator ends only when it is closed.
        """

    async def leave(self) -> None:
        """Be no node of the cluster any more; nothing happens if it is none."""


class LocalMembership:
    """A fixed list of nodes: all of them are always there, and only this one comes and goes."""

    def __init__(self, nodes: Mapping[str, str]) -> None:
        """Not a node yet.

        Args:
            nodes: the other nodes: name → ``host:port`` of its peer service.
        """
        self._others = {name: NodeRecord(name=name, endpoint=at) for name, at in nodes.items()}
        self._own: NodeRecord | None = None
        self._changed = asyncio.Condition()

    async def join(self, record: NodeRecord) -> None:
        """See :meth:`Membership.join`; a name of the list is that of this node from now on."""
        await self._set(record)

    async def watch(self) -> AsyncGenerator[Mapping[str, NodeRecord], None]:
        """See :meth:`Membership.watch`."""
        told: dict[str, NodeRecord] | None = None
        while True:
            async with self._changed:
                while (nodes := self._nodes()) == told:
                    await self._changed.wait()
            told = nodes
            yield nodes

    async def leave(self) -> None:
        """See :meth:`Membership.leave`."""
        await self._set(None)

    def _nodes(self) -> dict[str, NodeRecord]:
        own = {self._own.name: self._own} if self._own is not None else {}
        return self._others | own

    async def _set(self, own: NodeRecord | None) -> None:
        async with self._changed:
            if own is not None:
                self._others.pop(own.name, None)
            self._own = own
            self._changed.notify_all()
