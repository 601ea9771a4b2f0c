"""Exports the node's statistics as Prometheus series, listed in ``docs/operations/metrics.md``.

The admin process renders the text and reads the kernel's statistics of the node's process. The loop
that owns the state only provides its counters.
"""

import platform
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kvstore.protocol.counts import Lookups, NodeStats
from kvstore.protocol.wire import PROTOCOL_MAJOR, PROTOCOL_MINOR
from kvstore.server.event_series import event_series
from kvstore.server.nodes import node_list
from kvstore.server.peer_series import copy_series, node_series, peer_series
from kvstore.server.ssd_series import ssd_series
from kvstore.state.choice.conversations import KEEP_CAUSES

_LATENCIES: Final = {
    "lookup": "Seconds from a lookup's arrival to its answer, including waits.",
    "acquire": "Seconds from the arrival of a request for pages to its answer, including loads.",
    "put": "Seconds from the grant of a put's slots to its commit, while the engine writes.",
    "wait": "Seconds from arrival to answer, of requests of any kind that had to wait.",
    "disk_load": "Seconds from the decision to read a page from the SSDs until it is READY.",
    "peer_fetch": "Seconds from the decision to read pages from a peer until they are READY.",
    "loop_turn": "Seconds for which one message, deadline or completion blocked all others.",
}
COUNTED: Final = {
    "lookup_pages": "Keys in answered lookups; a lookup that waits counts once.",
    "hit_pages": "Keys in answered lookups that were found on every requested shard, in any tier.",
    "stored_pages": "Pages of one shard that were stored by puts.",
    "stored_ahead_pages": "Pages that were stored in a slot that had been reserved for them.",
    "stored_bytes": "Bytes of pages that were stored by puts.",
    "loaded_bytes": "Bytes of pages that were leased to engines.",
    "aborted_puts": "Aborted puts, including lost ones.",
    "lost_puts": "Puts that were aborted while their engine may still be writing.",
    "expired_leases": "Leases that expired before they were released.",
    "gave_way_pages": "Pages no longer kept, in favour of a tenant or space that keeps less.",
    "shortened_keeps": "Messages that asked to keep a conversation longer than the node allows.",
    "contradicting_pages": "Pages refused because their key is stored with another parent page.",
    "moved_extents": "Extents reassigned to another page size or tenant.",
    "unnamed_duplicates":
        "Sessions without an engine's name, because another live engine has the same address.",
    "closed_spaces": "Idle spaces that were closed so that others could be opened.",
    "retired_extents":
        "Extents that got new memory because an unwatched process may still access the old.",
    "demoted_pages": "Pages of one shard that were written from memory to the SSDs.",
    "promoted_pages": "Pages of one shard that were loaded from the SSDs into memory.",
    "evicted_to_disk": "Pages of one shard that were evicted from memory and stay on the SSDs.",
    "not_admitted_pages":
        "Times that admission refused to write a page or the rest of a chain to the SSDs.",
    "unwritten_pages": "Pages whose write failed, or that were dropped before it ended.",
    "demotions_failed":
        "Pages evicted without being written, because a write failed within the last five seconds.",
    "disk_full_pages": "Pages that were not written because the SSDs were full.",
    "reclaimed_pages": "Pages removed from the SSDs with their reclaimed segment.",
    "carried_pages": "Pages carried over from a reclaimed segment to another one.",
    "disk_kept_pages": "Pages carried over because of a pin or a reservation.",
    "disk_quota_pages": "Pages removed from the SSDs because their space was over its quota.",
    "disk_seals_failed":
        "Segment files whose footer could not be written; a start reads the whole file.",
    "disk_drops_failed": "Segment files that could not be deleted.",
    "orphaned_bytes": "Bytes of records that a start ignored: a page before them is missing.",
    "recovery_refused_shards":
        "Shards on the SSDs that the start ignored because they do not match this node.",
    "recovery_refused_records":
        "Records that the start ignored: they do not have the size of their shard's pages.",
    "locates": "Queries to the directory for peers that have the pages missing here.",
    "locates_refused": "Queries that were not sent because too many were unanswered.",
    "locates_timed_out": "Queries that the directory did not answer in time.",
    "located_by_engines":
        "Queries that were not needed because the engine named a peer that has the pages.",
    "peer_jobs": "Reads of consecutive pages from a peer.",
    "peer_fetched_pages": "Pages of one shard that were read from peers and verified.",
    "peer_fetched_bytes": "Bytes of pages that were read from peers and verified.",
    "peer_missing_pages": "Pages that a read from a peer did not deliver, for any reason.",
    "peer_retried_pages": "Missing pages that were requested again from another peer.",
    "peer_late_jobs": "Reads from peers that had not ended at their deadline.",
    "peer_unsettled_jobs":
        "Reads from peers that ended while bytes could still arrive; their slots were in LIMBO.",
    "brings": "Requests by peers asking this node to copy pages from them.",
    "spreads": "Requests by engines to copy stored pages to other nodes (replicas).",
    "spread_copies": "Nodes that got all pages of a request to copy stored pages.",
    "tombstone_keys": "Removed keys whose tombstones were written to the SSDs.",
    "tombstone_keys_lost":
        "Removed keys whose tombstones could not be written; a restart may find their pages again.",
}  # fmt: skip
"""Counters of the node's state that are exported as separate series, with their help texts."""
_CAUSES: Final = (
    "cleared", "corrupt", "evicted", "expired", "head_lost", "moved", "operator", "quota",
    "read_once", "reclaimed", "retired", "unreadable",
)  # fmt: skip
"""Causes of removals; exported from the start, so that the first removal is an increase."""
_CODES: Final = (
    "capacity", "connections", "durability_unavailable", "invalid_argument", "layout_mismatch",
    "protocol", "tier_unavailable", "transfer_timeout",
)  # fmt: skip
"""Error codes of refusals, likewise."""


class _Snapshot:
    """A collector with the series of one snapshot."""

    def __init__(self, stats: NodeStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """All series."""
        stats = self._stats
        yield _build(stats)
        yield _gauge(
            "kvstore_ready",
            "1 = the node has memory to store pages in, as /readyz says.",
            float(not stats.unready),
        )
        yield from _host(stats)
        yield from _open(stats)
        yield _gauge(
            "kvstore_loop_lag_seconds",
            "Delay of a timer on the event loop of the state, maximum of the last 15 to 30 s.",
            stats.loop_lag_s,
        )
        yield _counter(
            "kvstore_admin_restarts",
            "Restarts of the process that serves HTTP.",
            stats.admin.restarts,
        )
        checked = stats.self_check
        for of, count, help_text in (
            ("rounds", checked.rounds, "Times that the idle node has checked its whole state."),
            ("pages", checked.pages, "Keys that the idle node has checked."),
        ):
            yield _counter(f"kvstore_self_check_{of}", help_text, count)
        yield from _latencies(stats)
        yield _lookups(stats.lookups)
        yield from _counters(stats.counts)
        if stats.ssd is not None:
            yield from ssd_series(stats.ssd, stats.counts)
        if stats.remote is not None:
            yield from peer_series(stats.remote)
        if stats.cluster is not None:
            yield from node_series(node_list(stats))
            yield from copy_series(stats.cluster.copies)
        yield from event_series(stats.events)


def _build(stats: NodeStats) -> Metric:
    labels = {
        "version": stats.version,
        "python": platform.python_version(),
        "protocol": f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}",
        "core": stats.core,
        "mover": stats.mover,
    }
    family = GaugeMetricFamily(
        "kvstore_build_info", "Always 1; the labels are the versions.", labels=list(labels)
    )
    family.add_metric(list(labels.values()), 1)
    return family


def _open(stats: NodeStats) -> Iterator[Metric]:
    """The present state: pages, spaces, sessions, waiting requests."""
    for name, value, help_text in (
        ("pages", stats.pages,
         "Keys in the index, in any tier, including those being written; a key counts once."),
        ("spaces", stats.spaces_total, "Open spaces, including idle ones."),
        ("sessions", stats.sessions_total,
         "Engines with a process that is connected or still holds slots or leases."),
        ("session_bytes", stats.session_bytes,
         "Slot bytes that engines are reading, writing or have left in LIMBO."),
        ("connections", stats.connections, "Open connections of engines' processes."),
        ("unwatched_processes", stats.unwatched_processes,
         "Engine processes whose exit the kernel does not report to the node."),
        ("leases", stats.leases, "Leases that were not released yet, including expired ones."),
        ("open_puts", stats.puts,
         "Puts neither committed nor aborted, including those of lost engines."),
        ("slots_ahead_bytes", stats.slots_ahead_bytes,
         "Slots reserved for the next pages of puts."),
        ("waiting_requests", stats.waiting_requests,
         "Requests waiting for pages, slots or a sync."),
        ("waiting_bytes", stats.waiting_bytes, "Bytes of waiting requests."),
    ):  # fmt: skip
        yield _gauge(f"kvstore_{name}", help_text, value)
    yield _counter(
        "kvstore_accepted_connections",
        "Connections to the socket, including refused ones.",
        stats.accepted_connections,
    )


def _latencies(stats: NodeStats) -> Iterator[Metric]:
    bounds = [*map(str, stats.latency_bounds_s), "+Inf"]
    for name, help_text in _LATENCIES.items():
        latency = stats.latencies[name]
        buckets = list(zip(bounds, accumulate(latency.buckets), strict=True))
        yield HistogramMetricFamily(
            f"kvstore_{name}_seconds", help_text, buckets=buckets, sum_value=latency.sum_s
        )


def _lookups(lookups: Sequence[Lookups]) -> Metric:
    family = CounterMetricFamily(
        "kvstore_lookup_tier_pages",
        "Keys in answered lookups, by tier (ssd: some shard is only on the SSDs) and by model (the"
        " first 32 models, all others as other).",
        labels=["tier", "model"],
    )
    for one in lookups:
        family.add_metric(["host", one.model], one.host_pages)
        family.add_metric(["ssd", one.model], one.ssd_pages)
        family.add_metric(["miss", one.model], one.missed_pages)
    return family


def _host(stats: NodeStats) -> Iterator[Metric]:
    """The host-memory tier: size, use and missing memory."""
    host = stats.host
    yield _gauge(
        "kvstore_host_capacity_bytes",
        "Configured size of the host-memory tier, without withheld memory.",
        host.capacity_bytes,
    )
    states = GaugeMetricFamily(
        "kvstore_host_bytes",
        "Bytes of host memory by state of the slots. pinned is part of ready; retiring is in"
        " extents that will get new memory, in any state; withheld is not part of the capacity.",
        labels=["state"],
    )
    for state, size_bytes in (
        ("free", host.free_bytes), ("writing", host.writing_bytes), ("ready", host.ready_bytes),
        ("pinned", host.pinned_bytes), ("limbo", host.limbo_bytes),
        ("withheld", host.withheld_bytes), ("retiring", host.retiring_bytes),
    ):  # fmt: skip
        states.add_metric([state], size_bytes)
    yield states
    yield _gauge(
        "kvstore_host_populated_bytes",
        "Memory of the host tier that the kernel has allocated because it was touched.",
        stats.populated_bytes,
    )
    yield _gauge(
        "kvstore_host_missing_bytes",
        "Bytes of extents whose memory could not be allocated yet.",
        stats.missing_bytes,
    )
    yield _counter(
        "kvstore_host_memory_failures",
        "Failures to allocate new memory for an extent; the node retries.",
        stats.memory_failures,
    )


class _Slab:
    """A collector with the series of one client's slab."""

    def __init__(self, slab: Mapping[str, Any]) -> None:
        self._slab = slab

    def collect(self) -> Iterator[Metric]:
        """All series."""
        slab = self._slab
        room = GaugeMetricFamily("kvstore_slab_bytes", "Slab bytes by state.", labels=["state"])
        for state in ("capacity", "ready", "writing", "in_use", "pending"):
            room.add_metric([state], slab[f"{state}_bytes"])
        yield room
        yield _gauge(
            "kvstore_slab_broken",
            "1 = the slab is disabled because its device failed.",
            float(bool(slab["broken"])),
        )
        for name, help_text in (
            ("pages_hit", "Pages loaded from the slab."),
            ("pages_promoted", "Pages copied to the slab."),
            ("pages_evicted", "Pages evicted from the slab to free slots for others."),
            (
                "pages_refused",
                "Pages not copied because no slot was free and they were read for the first time.",
            ),
            (
                "pages_forgotten",
                "Copies removed because they were corrupt, must not be kept, or were cleared.",
            ),
            ("pages_failed", "Copies that failed their digest or were abandoned."),
            ("errors", "Failed pages in the slab, and failures of its device."),
        ):
            yield _counter(f"kvstore_slab_{name}", help_text, slab[name])


def _counters(counts: Mapping[str, int]) -> Iterator[Metric]:
    """The node's counters; removals and refusals have their cause as a label, from 0 on."""
    for prefix, help_text, label, known in (
        ("removed", "Pages of one shard that were dropped, by cause.", "cause", _CAUSES),
        ("refused", "Refused requests by error code, and refused connections (code connections).",
         "code", _CODES),
        ("not_kept_pages", "Pages not kept though asked for, by cause.", "cause", KEEP_CAUSES[1:]),
    ):  # fmt: skip
        family = CounterMetricFamily(f"kvstore_{prefix}", help_text, labels=[label])
        values = dict.fromkeys(known, 0) | {
            name.removeprefix(f"{prefix}_"): value
            for name, value in counts.items()
            if name.startswith(f"{prefix}_")
        }
        for name, value in sorted(values.items()):
            family.add_metric([name], value)
        yield family
    for name, help_text in COUNTED.items():
        yield _counter(f"kvstore_{name}", help_text, counts.get(name, 0))


def _gauge(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, help_text, value=value)


def render_slab(slab: Mapping[str, Any]) -> bytes:
    """Render a client's :meth:`~kvstore.client.store.KVStore.slab_stats` for Prometheus."""
    registry = CollectorRegistry()
    registry.register(_Slab(slab))
    return generate_latest(registry)


def render(stats: NodeStats) -> bytes:
    """Render one snapshot for Prometheus, with statistics of the node's process."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(stats))
    ProcessCollector(pid=lambda: stats.pid, registry=registry)
    return generate_latest(registry)
