"""Which nodes a cluster has.

A membership that is kept outside of the nodes says so too, as soon as it knows; whoever watches
must expect that a node is named that has ended, and the other way round. Nothing but the hope for a
hit depends on it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Container, Iterable, Mapping
from typing import Any, Final, Protocol

import msgspec

from kvstore.cluster.messages import (
    Join,
    Leave,
    NodesFound,
)
from kvstore.cluster.records import JoinStanding, NodeRecord
from kvstore.process.logs import event
from kvstore.protocol.errors import printable

log = logging.getLogger(__name__)

STORE_NODES_MAX: Final = 256
"""Nodes of a membership that are used; as many as have sessions with one node."""


def known_first(
    nodes: Iterable[str], own: str, known: Container[str]
) -> list[str]:  # fmt: skip
    """The names of all other nodes in the order in which they are used, as far as there is room.

    Whoever can write to the store can put in any number of names, so nodes that were used before
    come before new ones; only then the alphabet counts.
    """
    return sorted(
        (name for name in nodes if name != own), key=lambda name: (name not in known, name)
    )


def used_nodes(
    nodes: Mapping[str, NodeRecord], own: str, known: Container[str] = ()
) -> dict[str, NodeRecord]:
    """The nodes of a membership that the node of a name uses: its own, and so many others.

    Args:
        nodes: of the membership.
        own: name of the node.
        known: names of those that it used before.
    """
    used = known_first(nodes, own, known)[: STORE_NODES_MAX - 1]
    return {name: nodes[name] for name in (*used, *([own] if own in nodes else []))}


class Membership(Protocol):
    """The nodes of a cluster. Belongs to one event loop."""

    async def join(self, record: NodeRecord) -> None:
        """Be a node of the cluster from now on, in place of an earlier start of the same node.

        A membership that is kept elsewhere returns before it is one; see
        :class:`kvstore.cluster.records.JoinStanding`.

        Args:
            record: about this node.
        """

    def watch(self) -> AsyncGenerator[Mapping[str, NodeRecord], None]:
        """All nodes by name, this one included: at once, and again after every change.

        Changes that follow each other closely may be told together. There may be several watchers.
        A generator ends only when it is closed.
        """

    async def leave(self) -> None:
        """Be no node of the cluster any more; nothing happens if it is none."""


class _Nodes:
    """The present nodes, for any number of watchers."""

    def __init__(self, present: dict[str, NodeRecord]) -> None:
        self.present = present
        self._changed = asyncio.Event()

    def set(self, present: dict[str, NodeRecord]) -> None:
        """These are the nodes from now on."""
        if present != self.present:
            self.present = present
            self._changed.set()
            self._changed = asyncio.Event()

    async def watch(self) -> AsyncGenerator[Mapping[str, NodeRecord], None]:
        """See :meth:`Membership.watch`."""
        told: dict[str, NodeRecord] | None = None
        while True:
            while self.present == told:
                await self._changed.wait()
            told = self.present
            yield told


class LocalMembership:
    """A fixed list of nodes: all of them are always there, and only this one comes and goes.

    Args:
        nodes: the other nodes: name → ``host:port`` of its peer service.
    """

    def __init__(self, nodes: Mapping[str, str]) -> None:
        self._others = {name: NodeRecord(name=name, endpoint=at) for name, at in nodes.items()}
        self._nodes = _Nodes(dict(self._others))

    async def join(self, record: NodeRecord) -> None:
        """See :meth:`Membership.join`; a name of the list is that of this node from now on."""
        self._others.pop(record.name, None)
        self._nodes.set({**self._others, record.name: record})

    def watch(self) -> AsyncGenerator[Mapping[str, NodeRecord], None]:
        """See :meth:`Membership.watch`."""
        return self._nodes.watch()

    async def leave(self) -> None:
        """See :meth:`Membership.leave`."""
        self._nodes.set(dict(self._others))

    def knows(self, name: str) -> bool:
        """Whether another node of that name may be served: it is in the list."""
        return name in self._others

    def stats(self) -> dict[str, Any]:
        """As those of :meth:`StoreMembership.stats`: a node of the list is always one."""
        return {
            "kind": "local", "state": "joined", "field": "", "why": "", "changes": {},
            "unreadable_records": 0,
        }  # fmt: skip


class StoreMembership:
    """The nodes that the index process finds in a store outside of the nodes.

    What was told last stays true while the store or that process is away: nodes may have come and
    gone, which costs misses only. What is told counts only if this node is among it, so an index
    process that has just begun, or a store that was emptied, does not take all nodes away. A node
    that is refused is alone.

    Args:
        kind: of the store, for operators.
        tell: tells the index process; what is told while it is away is lost.

    Attributes:
        standing: of this node.
    """

    def __init__(self, kind: str, tell: Callable[[Join | Leave], None]) -> None:
        self.standing = JoinStanding()
        self._kind = kind
        self._tell = tell
        self._own: NodeRecord | None = None
        self._nodes = _Nodes({})
        self._changes: Counter[str] = Counter()

    async def join(self, record: NodeRecord) -> None:
        """See :meth:`Membership.join`; returns before it is a node."""
        self._own = record
        self._tell(Join(record))

    def watch(self) -> AsyncGenerator[Mapping[str, NodeRecord], None]:
        """See :meth:`Membership.watch`."""
        return self._nodes.watch()

    async def leave(self) -> None:
        """See :meth:`Membership.leave`."""
        own, self._own = self._own, None
        if own is not None:
            self._tell(Leave())
            self._nodes.set({n: one for n, one in self._nodes.present.items() if n != own.name})

    def began(self) -> None:
        """The index process has started, and knows nothing yet."""
        self._stand(JoinStanding(why="the index process has started"))
        if self._own is not None:
            self._tell(Join(self._own, sorted(self._nodes.present)))

    def heard(self, told: NodesFound) -> None:
        """The index process has told something."""
        self._stand(told.standing)
        own = self._own
        if own is None:
            return
        if told.standing.state == "refused":
            self._nodes.set({})
        elif told.standing.state == "joined" and self._is_own(told.nodes.get(own.name)):
            self._nodes.set(used_nodes(told.nodes, own.name, self._nodes.present))

    def knows(self, name: str) -> bool:  # noqa: ARG002
        """Whether another node of that name may be served.

        Any may: it can be in the store before it is heard of here, and whoever has no certificate
        of the cluster does not get as far.
        """
        return True

    def stats(self) -> dict[str, Any]:
        """The standing of this node, its changes by state, and records that were left out."""
        standing = self.standing
        return {
            "kind": self._kind, "state": standing.state, "field": standing.field,
            "why": standing.why, "changes": dict(self._changes),
            "unreadable_records": standing.unreadable,
        }  # fmt: skip

    def _is_own(self, record: NodeRecord | None) -> bool:
        assert self._own is not None
        return record is not None and record.boot == self._own.boot

    def _stand(self, standing: JoinStanding) -> None:
        before = self.standing
        self.standing = msgspec.structs.replace(standing, why=printable(standing.why))
        if (standing.state, standing.field) == (before.state, before.field):
            return
        self._changes[standing.state] += 1
        level = logging.INFO if standing.state in ("joined", "joining") else logging.WARNING
        known = {"field": standing.field, "why": self.standing.why}
        event(log, level, f"membership {standing.state}", store=self._kind,
              **{name: text for name, text in known.items() if text})  # fmt: skip
