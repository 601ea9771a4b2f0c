"""Which nodes a cluster has.

The list may be out of date: a watcher must expect that it names a node that has ended, or lacks one
that has started. Only hits depend on it, not correctness.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Container, Iterable, Mapping
from typing import Final, Protocol

import msgspec

from kvstore.cluster.messages import (
    Join,
    Leave,
    NodesFound,
)
from kvstore.cluster.records import JoinStanding, NodeRecord
from kvstore.process.logs import event
from kvstore.protocol.counts import MembershipState
from kvstore.protocol.errors import printable

log = logging.getLogger(__name__)

STORE_NODES_MAX: Final = 256
"""Maximum used nodes of a membership; the same as the maximum sessions of a node."""


def known_first(
    nodes: Iterable[str], own: str, known: Container[str]
) -> list[str]:  # fmt: skip
    """The names of all other nodes in order of use, up to the limit.

    Any number of names can be written to the store, so nodes that were used before come before new
    ones; only then the alphabet counts.
    """
    return sorted(
        (name for name in nodes if name != own), key=lambda name: (name not in known, name)
    )


def used_nodes(
    nodes: Mapping[str, NodeRecord], own: str, known: Container[str] = ()
) -> dict[str, NodeRecord]:
    """The nodes of a membership that a node uses: itself, and a limited number of others.

    Args:
        nodes: of the membership.
        own: name of the node.
        known: names of the nodes that it used before.
    """
    used = known_first(nodes, own, known)[: STORE_NODES_MAX - 1]
    return {name: nodes[name] for name in (*used, *([own] if own in nodes else []))}


class Membership(Protocol):
    """The nodes of a cluster. Belongs to one event loop."""

    async def join(self, record: NodeRecord) -> None:
        """Join the cluster, in place of an earlier start of the same node.

        With a store, this returns before the node has joined; see
        :class:`kvstore.cluster.records.JoinStanding`.

        Args:
            record: about this node.
        """

    def watch(self) -> AsyncGenerator[Mapping[str, NodeRecord], None]:
        """All nodes by name, including this one: at once, and again after every change.

        Several quick changes may be reported together. There may be several watchers. A generator
        ends only when it is closed.
        """

    async def leave(self) -> None:
        """Leave the cluster; no effect if the node is not in it."""


class _Nodes:
    """The current nodes, for any number of watchers."""

    def __init__(self, present: dict[str, NodeRecord]) -> None:
        self.present = present
        self._changed = asyncio.Event()

    def set(self, present: dict[str, NodeRecord]) -> None:
        """Replace the nodes."""
        if present != self.present:
            self.present = present
            self._changed.set()
            self._changed = asyncio.Event()

    async def watch(self) -> AsyncGenerator[Mapping[str, NodeRecord], None]:
        """See :meth:`Membership.watch`."""
        last: dict[str, NodeRecord] | None = None
        while True:
            while self.present == last:
                await self._changed.wait()
            last = self.present
            yield last


class LocalMembership:
    """A fixed list of nodes: all others are always members; only this one joins and leaves.

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

    def stats(self) -> MembershipState:
        """Like :meth:`StoreMembership.stats`: a node of the list is always joined."""
        return MembershipState(
            kind="local", state="joined", field="", why="", changes={}, unreadable_records=0
        )


class StoreMembership:
    """The nodes that the index process finds in a store outside of the nodes.

    While the store or that process is away, the last answer stays valid: nodes may have joined or
    left, which only costs misses. An answer counts only if it contains this node, so an index
    process that has just started, or a store that was emptied, does not remove all nodes. A refused
    node is alone.

    Args:
        kind: of the store, for operators.
        tell: sends a message to the index process; messages sent while it is away are lost.

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
        """See :meth:`Membership.join`; returns before the node has joined."""
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
        """The index process has started, with an empty state."""
        self._stand(JoinStanding(why="the index process has started"))
        if self._own is not None:
            self._tell(Join(self._own, sorted(self._nodes.present)))

    def heard(self, message: NodesFound) -> None:
        """A message of the index process."""
        self._stand(message.standing)
        own = self._own
        if own is None:
            return
        if message.standing.state == "refused":
            self._nodes.set({})
        elif message.standing.state == "joined" and self._is_own(message.nodes.get(own.name)):
            self._nodes.set(used_nodes(message.nodes, own.name, self._nodes.present))

    def knows(self, name: str) -> bool:  # noqa: ARG002
        """Whether another node of that name may be served.

        Any may: it can be in the store before this node learns of it, and a client without a
        certificate of the cluster is refused earlier.
        """
        return True

    def stats(self) -> MembershipState:
        """The standing of this node, its changes by state, and records that were left out."""
        standing = self.standing
        return MembershipState(
            kind=self._kind, state=standing.state, field=standing.field, why=standing.why,
            changes=dict(self._changes), unreadable_records=standing.unreadable,
        )  # fmt: skip

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
