"""The status of a node: readiness, counters, tiers, policies."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Final

from msgspec import structs

from kvstore.config.machine import version_of
from kvstore.node.desk import Desk
from kvstore.protocol.counts import AdminCounts, HostTier, NodeList, NodeStats, SsdTier, TierList
from kvstore.server import answers
from kvstore.server.cluster import ClusterSide
from kvstore.server.installed import installed
from kvstore.server.nodes import node_list
from kvstore.server.publish import Publication
from kvstore.state.choice.policies import POLICIES
from kvstore.tier.host import HostMemory
from kvstore.transport.mooncake import MooncakeTransport

_WITHHELD: Final = "all memory is withheld because clients of the previous run still map it"


@dataclass(frozen=True)
class DaemonSources:
    """Where the counts of the daemon's other parts come from.

    Attributes:
        connections: open connections of engines.
        accepted_connections: number of connections since the start, refused ones too.
        admin: counts of the admin process.
        loop_lag_s: maximum lag of the loop.
    """

    connections: Callable[[], int]
    accepted_connections: Callable[[], int]
    admin: Callable[[], AdminCounts]
    loop_lag_s: Callable[[], float]


def seen_by(stats: NodeStats, tenants: frozenset[str] | None) -> NodeStats:
    """What an engine that may use these tenants sees: of the others only what is in a sum.

    ``tenants``: None = any. Counts by model leave it out, because tenants may use one model.
    """
    if tenants is None:
        return stats
    return structs.replace(
        stats, lookups=[], spaces=[one for one in stats.spaces if one.tenant in tenants],
        sessions=[one for one in stats.sessions if one.tenant in tenants],
    )  # fmt: skip


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
        sources: of further counts; set before :meth:`stats` is called.
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
        self.others: ClusterSide | None = None
        self.sources: DaemonSources | None = None
        self._version = version_of()

    def registered(self) -> Mapping[str, int]:
        """The counts of the transport that registers memory; empty = there is none."""
        if self.others is None:
            return {}
        return self.others.stats().transports.get(MooncakeTransport.name, {})

    def unready(self) -> str:
        """Why no page can be stored; empty if pages can be stored."""
        return "" if self._table.slots.extents else _WITHHELD

    def stats(self) -> NodeStats:
        """A snapshot of all counters; it takes less than a turn whatever the size of the node."""
        assert self.sources is not None, "nothing asks before the node listens"
        counts, memory, others = self._desk.stats(), self._memory, self.others
        return NodeStats(
            node=counts.node, boot=counts.boot, core=counts.core, policy=counts.policy,
            host=counts.host, pages=counts.pages, spaces=counts.spaces,
            spaces_total=counts.spaces_total, sessions=counts.sessions,
            sessions_total=counts.sessions_total, session_bytes=counts.session_bytes,
            leases=counts.leases, puts=counts.puts, slots_ahead=counts.slots_ahead,
            slots_ahead_bytes=counts.slots_ahead_bytes, waiting_requests=counts.waiting_requests,
            waiting_bytes=counts.waiting_bytes, unwatched_processes=counts.unwatched_processes,
            counts=counts.counts, latency_bounds_s=counts.latency_bounds_s,
            latencies=counts.latencies, lookups=counts.lookups, ssd=counts.ssd,
            remote=counts.remote, self_check=counts.self_check,
            pid=os.getpid(), version=self._version, uptime_s=monotonic() - self._started_s,
            unready=self.unready(), populated_bytes=memory.populated_bytes(),
            missing_bytes=memory.missing_bytes(), memory_failures=memory.failures,
            connections=self.sources.connections(),
            accepted_connections=self.sources.accepted_connections(),
            mover=installed().mover, loop_lag_s=self.sources.loop_lag_s(),
            events=self._publication.stats(),
            cluster=others.stats() if others is not None else None, admin=self.sources.admin(),
        )  # fmt: skip

    def nodes(self) -> NodeList:
        """The nodes of the cluster."""
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

    def tiers(self) -> TierList:
        """Each tier's sizes and state."""
        slots, disk = self._table.slots.stats(), self._desk.disk
        host = HostTier(
            **structs.asdict(slots), populated_bytes=self._memory.populated_bytes(),
            state="ready" if slots.capacity_bytes else "withheld",
        )  # fmt: skip
        ssd = [SsdTier(**structs.asdict(disk.stats()))] if disk is not None else []
        return TierList(tiers=[host, *ssd])

    def policy(self) -> answers.Policy:
        """The present policies."""
        ssd = self._desk.disk.stats() if self._desk.disk is not None else None
        return answers.Policy(
            name=self._table.eviction.policy, known=list(POLICIES),
            configured=self._configured_policy,
            ssd=answers.SsdPolicy(
                write=ssd.write, sync=ssd.sync, admission=ssd.admission, wear=ssd.wear
            ) if ssd is not None else None,
        )  # fmt: skip
