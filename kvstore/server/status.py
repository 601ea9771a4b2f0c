"""The status of a node: readiness, counters, tiers, policies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from time import monotonic
from typing import Any, Final, Protocol

from kvstore.config.machine import version_of
from kvstore.node.desk import Desk
from kvstore.protocol.page import PrefixKey, ShardSpec, SpaceIdentity
from kvstore.server import answers
from kvstore.server.copies import CopySide
from kvstore.server.installed import installed
from kvstore.server.nodes import node_list
from kvstore.server.publish import Publication
from kvstore.state.choice.policy import POLICIES
from kvstore.tier.host import HostMemory
from kvstore.transport.mooncake import MooncakeTransport

_WITHHELD: Final = "all memory is withheld because clients of the previous run still map it"


class OtherNodes(CopySide, Protocol):
    """The side towards the other nodes of the cluster.

    Attributes:
        cluster: name of the cluster.
    """

    cluster: str

    def stats(self) -> dict[str, Any]:
        """A :class:`kvstore.server.counts.ClusterCounts`, as plain values."""
        ...

    def holders(
        self, identity: SpaceIdentity, shards: Sequence[ShardSpec], key: PrefixKey,
        found: Callable[[dict[str, list[int]]], None],
    ) -> None:  # fmt: skip
        """Ask which nodes have one page.

        ``found`` is called once, at once or within a second: node → positions in ``shards`` of
        those that it has.
        """
        ...


class NodeStatus:
    """The status for the log, engines and operators; call it on the state's loop.

    Args:
        desk: the node's desk.
        memory: the bytes of the host tier.
        configured_policy: the configured eviction policy.
        started_s: time of the start, monotonic seconds.
        publication: the node's events.

    Attributes:
        others: the other nodes of the cluster; None = the node is alone.
    """

    def __init__(
        self, desk: Desk, memory: HostMemory, configured_policy: str, started_s: float,
        publication: Publication,
    ) -> None:  # fmt: skip
        self._desk = desk
        self._table = desk.node.pages
        self._memory = memory
        self._configured_policy = configured_policy
        self._started_s = started_s
        self._publication = publication
        self.others: OtherNodes | None = None
        self._version = version_of()
        self._sources: list[Callable[[], Mapping[str, object]]] = []

    def add(self, source: Callable[[], Mapping[str, object]]) -> None:
        """Add the counters of another part of the daemon to :meth:`stats`."""
        self._sources.append(source)

    def join(self, others: OtherNodes | None) -> None:
        """Show the other nodes too, if there are any."""
        self.others = others
        self.add(lambda: {"cluster": others and others.stats()})

    def registered(self) -> Mapping[str, int]:
        """The counts of the transport that registers memory; empty = there is none."""
        counts: Mapping[str, Mapping[str, int]] = {}
        if self.others is not None:
            counts = self.others.stats()["transports"]
        return counts.get(MooncakeTransport.name, {})

    def unready(self) -> str:
        """Why no page can be stored; empty if pages can be stored."""
        return "" if self._table.slots.extents else _WITHHELD

    def stats(self) -> dict[str, Any]:
        """A snapshot of all counters.

        It has the fields of :class:`kvstore.server.counts.NodeStats`, as plain values, and takes
        less than a turn whatever the size of the node.
        """
        stats = {
            **self._desk.stats(),
            "version": self._version,
            "uptime_s": monotonic() - self._started_s,
            "unready": self.unready(),
            "policy": self._table.eviction.policy,
            "populated_bytes": self._memory.populated_bytes(),
            "missing_bytes": self._memory.missing_bytes(),
            "memory_failures": self._memory.failures,
            "mover": installed().mover,
        }
        for source in self._sources:
            stats |= source()
        return stats

    def nodes(self) -> dict[str, Any]:
        """The nodes of the cluster: a :class:`kvstore.server.nodes.NodeList`, as plain values."""
        return node_list(self.stats())

    def event_source(self) -> answers.EventSource:
        """Where the node publishes its events."""
        node, publication = self._desk.node, self._publication
        return answers.EventSource(
            node=node.name, boot=node.boot.hex(), topic=publication.topic,
            endpoint=publication.endpoint or None,
            replay_endpoint=publication.replay_endpoint or None,
            follow_token=publication.needs_token, tokens=publication.tells_tokens,
            cluster=self.others.cluster if self.others is not None else "",
        )  # fmt: skip

    def tiers(self) -> list[dict[str, Any]]:
        """Each tier's name, sizes and state: those of :class:`kvstore.server.counts.TierList`."""
        slots = self._table.slots.stats()
        tiers: list[dict[str, Any]] = [
            {
                "tier": "host",
                "state": "ready" if slots.capacity_bytes else "withheld",
                **asdict(slots),
                "populated_bytes": self._memory.populated_bytes(),
            }
        ]
        if self._desk.disk is not None:
            tiers.append({"tier": "ssd", **self._desk.disk.stats()})
        return tiers

    def policy(self) -> dict[str, Any]:
        """The present policies: a :class:`kvstore.server.answers.Policy`."""
        shown: dict[str, Any] = {
            "name": self._table.eviction.policy,
            "known": list(POLICIES),
            "configured": self._configured_policy,
        }
        if self._desk.disk is not None:
            ssd = self._desk.disk.stats()
            shown["ssd"] = {name: ssd[name] for name in ("write", "sync", "admission", "wear")}
        return shown
