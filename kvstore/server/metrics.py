"""The node's statistics as Prometheus series; ``docs/operations/metrics.md`` lists them.

The admin process makes the text, and reads there what the kernel knows of the node's process; the
loop that owns the state only hands over its numbers.
"""

import platform
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kvstore.wire import PROTOCOL_MAJOR, PROTOCOL_MINOR

_SLOT_STATES: Final = ("free", "writing", "ready", "pinned", "limbo", "withheld", "retiring")
_LATENCIES: Final = {
    "lookup": "Seconds from a lookup's arrival to its answer, including waits.",
    "acquire": "Seconds from the arrival of a request for pages to its answer, including loads.",
    "put": "Seconds from the grant of a put's slots to its commit; the engine writes meanwhile.",
    "wait": "Seconds from the arrival of a request of any kind that had to wait to its answer.",
    "disk_load": "Seconds from the decision to read a page from the SSDs until it is READY.",
}
COUNTED: Final = {
    "lookup_pages": "Keys in answered lookups; a lookup that waits counts once.",
    "hit_pages": "Keys in answered lookups that were found on every shard asked for, in any tier.",
    "stored_pages": "Pages of one shard that became READY by a put.",
    "stored_bytes": "Bytes of pages that became READY by a put.",
    "loaded_bytes": "Bytes of pages that readers got a lease for.",
    "aborted_puts": "Puts that were aborted, including lost ones.",
    "lost_puts": "Puts that were aborted while their engine may still be writing.",
    "expired_leases": "Leases that expired before they were given back.",
    "contradicting_pages": "Pages refused because their key already follows another page.",
    "closed_spaces": "Idle spaces that were closed to make room for new ones.",
    "retired_extents":
        "Extents that got new memory because an unwatched process may touch the old.",
    "demoted_pages": "Pages of one shard that were written from memory to the SSDs.",
    "promoted_pages": "Pages of one shard that were loaded from the SSDs into memory.",
    "evicted_to_disk": "Pages of one shard that were evicted from memory and stay on the SSDs.",
    "not_admitted_pages":
        "Times that admission refused to write a page, or the rest of a chain, to the SSDs.",
    "unwritten_pages": "Pages whose write failed, or that left the store before it ended.",
    "demotions_failed":
        "Pages evicted without being written, because writes to the SSDs had just failed.",
    "disk_full_pages": "Pages that found no room on the SSDs.",
    "reclaimed_pages": "Pages that left the SSDs with their segment when it was reclaimed.",
    "carried_pages": "Pages that were carried over to another segment when theirs was reclaimed.",
    "disk_kept_pages": "Pages chosen to be carried over for a pin or a reservation.",
    "disk_quota_pages": "Pages removed from the SSDs because their space was over its quota.",
    "disk_seals_failed": "Segment files that got no index; a start reads the whole file instead.",
    "disk_drops_failed": "Segment files that could not be deleted.",
    "orphaned_bytes":
        "Bytes of records on the SSDs that the start left out because their heads were gone.",
    "recovery_refused_shards":
        "Shards on the SSDs that the start left out because they do not fit this node.",
    "tombstone_keys": "Pages whose removal was written to the SSDs.",
    "tombstone_keys_lost":
        "Pages whose removal could not be written to the SSDs; a restart may find them.",
}  # fmt: skip
"""Counts of the node's state that are series of their own, and what each counts."""
_CAUSES: Final = (
    "cleared", "corrupt", "evicted", "expired", "head_lost", "operator", "quota", "read_once",
    "reclaimed", "retired", "unreadable",
)  # fmt: skip
"""Of removals; each is a series from the start, because a first one must be an increase."""
_CODES: Final = (
    "capacity", "connections", "durability_unavailable", "invalid_argument", "layout_mismatch",
    "protocol", "tier_unavailable", "transfer_timeout",
)  # fmt: skip
"""Of refusals, likewise."""
_SSD_CODES: Final = ("capacity", "page_corrupt", "tier_unavailable")
"""Of failed jobs of the SSD tier, likewise."""
_EVENTS: Final = {
    "event_batches": ("batches_sent", "Batches of KV events that were published."),
    "event_batches_dropped": (
        "batches_dropped", "Batches of KV events that were lost because too many waited.",
    ),
    "event_batches_lost": (
        "batches_lost", "Batches of KV events that a slow follower lost, once per follower.",
    ),
    "event_followers_cut": (
        "followers_cut", "Connections of followers of KV events that were refused or closed.",
    ),
    "event_replays": ("replays_served", "Requests for earlier batches that were answered."),
    "event_replays_cut": (
        "replays_cut", "Requests for earlier batches that were not answered to the end.",
    ),
}  # fmt: skip


class _Snapshot:
    """A collector that gives one snapshot's series."""

    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """All series."""
        stats = self._stats
        yield _build(stats)
        yield _gauge(
            "kvstore_ready",
            "1 = the node has memory to store pages in, as /readyz says.",
            float(not stats["unready"]),
        )
        yield from _host(stats)
        yield from _open(stats)
        yield _gauge(
            "kvstore_loop_lag_seconds",
            "How late the loop that owns the state ran a timer, worst of the last 15 to 30 s.",
            stats["loop_lag_s"],
        )
        yield _counter(
            "kvstore_admin_restarts",
            "Restarts of the process that serves HTTP.",
            stats["admin"]["restarts"],
        )
        yield from _latencies(stats)
        yield _lookups(stats["lookups"])
        yield from _counters(stats["counts"])
        if ssd := stats.get("ssd"):
            yield from _ssd(ssd, stats["counts"])
            yield from _wear(ssd["wear"])
        if events := stats["events"]:
            for name, (of, help_text) in _EVENTS.items():
                yield _counter(f"kvstore_{name}", help_text, events[of])
            yield _gauge(
                "kvstore_event_followers",
                "Open connections that follow KV events or ask for earlier ones.",
                events["followers"],
            )


def _build(stats: Mapping[str, Any]) -> Metric:
    labels = {
        "version": stats["version"],
        "python": platform.python_version(),
        "protocol": f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}",
        "core": stats["core"],
        "mover": stats["mover"],
    }
    family = GaugeMetricFamily(
        "kvstore_build_info", "Always 1; the labels say which versions run.", labels=list(labels)
    )
    family.add_metric(list(labels.values()), 1)
    return family


def _open(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """What is there or under way now."""
    for name, of, help_text in (
        ("pages", "pages",
         "Keys in the index, in any tier, including those being written; a key counts once."),
        ("spaces", "spaces_total", "Spaces that are open."),
        ("sessions", "sessions_total",
         "Engines with a process that is connected or still holds something."),
        ("session_bytes", "session_bytes",
         "Slot bytes that engines read, write or have left behind."),
        ("connections", "connections", "Open connections of engines' processes."),
        ("unwatched_processes", "unwatched_processes",
         "Processes of engines whose end the kernel does not report."),
        ("leases", "leases", "Leases that readers have not given back, including expired ones."),
        ("open_puts", "puts", "Puts neither committed nor aborted, also of lost engines."),
        ("waiting_requests", "waiting_requests", "Requests that wait for pages, room or a sync."),
        ("waiting_bytes", "waiting_bytes", "Bytes of the requests that wait."),
    ):  # fmt: skip
        yield _gauge(f"kvstore_{name}", help_text, stats[of])
    yield _counter(
        "kvstore_accepted_connections",
        "Connections to the socket, including refused ones.",
        stats["accepted_connections"],
    )


def _latencies(stats: Mapping[str, Any]) -> Iterator[Metric]:
    bounds = [*map(str, stats["latency_bounds_s"]), "+Inf"]
    for name, help_text in _LATENCIES.items():
        latency = stats["latencies"][name]
        buckets = list(zip(bounds, accumulate(latency["buckets"]), strict=True))
        yield HistogramMetricFamily(
            f"kvstore_{name}_seconds", help_text, buckets=buckets, sum_value=latency["sum_s"]
        )


def _lookups(lookups: list[dict[str, Any]]) -> Metric:
    family = CounterMetricFamily(
        "kvstore_lookup_tier_pages",
        "Keys in answered lookups, by where they were found (ssd: for some shard on the SSDs only)"
        " and by model (the first 32 models, and other).",
        labels=["tier", "model"],
    )
    for one in lookups:
        for tier, of in (("host", "host"), ("ssd", "ssd"), ("miss", "missed")):
            family.add_metric([tier, one["model"]], one[f"{of}_pages"])
    return family


def _host(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """Memory: room, by use, and what is missing of it."""
    host = stats["host"]
    yield _gauge(
        "kvstore_host_capacity_bytes",
        "Size of the host-memory tier, used or not, without withheld memory.",
        host["capacity_bytes"],
    )
    states = GaugeMetricFamily(
        "kvstore_host_bytes",
        "Memory of the host tier by state of its slots. pinned is part of ready; retiring is in"
        " extents that get new memory, whatever the slots' state; withheld is beyond the capacity.",
        labels=["state"],
    )
    for state in _SLOT_STATES:
        states.add_metric([state], host[f"{state}_bytes"])
    yield states
    yield _gauge(
        "kvstore_host_populated_bytes",
        "Memory of the host tier that was touched, so that the kernel has allocated it.",
        stats["populated_bytes"],
    )
    yield _gauge(
        "kvstore_host_missing_bytes",
        "Memory of extents that could not be allocated yet.",
        stats["missing_bytes"],
    )
    yield _counter(
        "kvstore_host_memory_failures",
        "Times that new memory for an extent could not be allocated; the node tries again.",
        stats["memory_failures"],
    )


def _ssd(ssd: Mapping[str, Any], counts: Mapping[str, int]) -> Iterator[Metric]:
    """The SSD tier: room, traffic, wear, trouble."""
    room = GaugeMetricFamily(
        "kvstore_ssd_bytes",
        "Room on the SSDs: capacity; used by segment files, with live and dead records; in flight.",
        labels=["use"],
    )
    for use in ("capacity", "used", "live", "dead", "in_flight"):
        room.add_metric([use], ssd[f"{use}_bytes"])
    yield room
    for name, help_text in (
        ("written_bytes", "Bytes of records of pages written to the SSDs for the first time."),
        (
            "carried_bytes",
            "Bytes of records rewritten because their segment was reclaimed.",
        ),
        ("read_bytes", "Bytes of records of pages that were read from the SSDs and verified."),
        ("syncs", "Segment files that were synced."),
        ("reclaimed_segments", "Segment files that were reclaimed."),
    ):
        yield _counter(f"kvstore_ssd_{name}", help_text, ssd.get(name, 0))
    for name in ("checked", "corrupt"):
        found = counts.get(f"disk_{name}_records", 0)
        yield _counter(
            f"kvstore_ssd_{name}_records", f"Records that verify read again: {name}.", found
        )
    refused = CounterMetricFamily(
        "kvstore_ssd_refused_pages", "Pages not written to the SSDs, by reason.", labels=["reason"]
    )
    refused.add_metric(["quota"], counts.get("disk_refused_quota", 0))
    yield refused
    for name, of, help_text in (
        ("backlog_pages", "backlog_pages", "Pages that wait to be written to the SSDs."),
        ("loads", "loads", "Pages that are being read from the SSDs into memory."),
        ("tombstone_keys_waiting", "tombstone_keys_waiting",
         "Pages whose removal is not written to the SSDs yet."),
    ):  # fmt: skip
        yield _gauge(f"kvstore_ssd_{name}", help_text, ssd[of])
    yield _gauge("kvstore_ssd_segments", "Segment files in all directories.", ssd["segments"])
    yield _gauge(
        "kvstore_ssd_degraded",
        "1 = writes fail, or a sync has failed since the start.",
        float(ssd["degraded"]),
    )
    yield _gauge(
        "kvstore_ssd_failed_segments",
        "Segment files that could not be synced.",
        len(ssd["failed_segments"]),
    )
    errors = CounterMetricFamily(
        "kvstore_ssd_errors", "Jobs of the SSD tier that failed, by error code.", labels=["code"]
    )
    for code, value in sorted({**dict.fromkeys(_SSD_CODES, 0), **ssd["errors"]}.items()):
        errors.add_metric([code], value)
    yield errors


def _wear(wear: Mapping[str, int]) -> Iterator[Metric]:
    """What is written for ordinary pages, against the endurance budget."""
    for name, of, help_text in (
        ("day_bytes", "today_bytes",
         "Bytes written to the SSDs for ordinary pages since the day began, including those"
         " carried over; a day is 24 h of the machine's time since boot. Falls back to 0."),
        ("day_forecast_bytes", "forecast_bytes",
         "The same bytes for a whole day, at the mean rate."),
        ("day_budget_bytes", "budget_bytes",
         "The most such bytes per day (ssd.bytes_per_day_max); 0 = no limit."),
    ):  # fmt: skip
        yield _gauge(f"kvstore_ssd_{name}", help_text, wear[of])


class _Slab:
    """A collector that gives the series of one client's slab."""

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
            "1 = the slab is out of use because its device failed.",
            float(bool(slab["broken"])),
        )
        for name, help_text in (
            ("pages_hit", "Pages loaded from the slab."),
            ("pages_promoted", "Pages copied to the slab."),
            ("pages_evicted", "Pages evicted from the slab to make room for others."),
            ("pages_refused", "Pages not copied: no room, and read for the first time."),
            (
                "pages_forgotten",
                "Copies removed: wrong, not allowed to stay, or cleared.",
            ),
            ("pages_failed", "Pages whose copy failed its digest or was abandoned."),
            ("errors", "Pages that failed in the slab, and failures of its device."),
        ):
            yield _counter(f"kvstore_slab_{name}", help_text, slab[name])


def _counters(counts: Mapping[str, int]) -> Iterator[Metric]:
    """The node's counts; removals and refusals carry their cause as a label, from 0 on."""
    for prefix, help_text, label, known in (
        ("removed", "Pages of one shard that left the index, by cause.", "cause", _CAUSES),
        (
            "refused",
            "Requests that were refused, by error code, and connections (code connections).",
            "code",
            _CODES,
        ),
    ):
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
    """A client's :meth:`~kvstore.client.store.KVStore.slab_stats` in the Prometheus text format."""
    registry = CollectorRegistry()
    registry.register(_Slab(slab))
    return generate_latest(registry)


def render(stats: Mapping[str, Any]) -> bytes:
    """One snapshot in the Prometheus text format, with what ``/proc`` has on the node's process."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(stats))
    ProcessCollector(pid=lambda: stats["pid"], registry=registry)
    return generate_latest(registry)
