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
    "lookup": "From a lookup's arrival to its answer, waiting included.",
    "acquire": "From the arrival of a request for pages to its answer, waiting and loads included.",
    "put": "From the grant of a put's slots to its commit: the engine writes meanwhile.",
    "wait": "From the arrival of a request that had to wait, of whatever kind, to its answer.",
    "disk_load": "From the decision to read a page from the SSDs until it is READY in memory.",
}
COUNTED: Final = {
    "lookup_pages": "Keys that answered lookups had asked for; a lookup that waits counts once.",
    "hit_pages": "Keys of answered lookups that were found on every shard asked for, in any tier.",
    "stored_pages": "Pages of one shard that became READY by a put.",
    "stored_bytes": "Bytes of pages that became READY by a put.",
    "loaded_bytes": "Bytes of pages that readers got a lease for.",
    "aborted_puts": "Puts that were taken back, lost ones too.",
    "lost_puts": "Puts taken back while their writer may still be writing.",
    "expired_leases": "Leases that ran out before they were given back.",
    "contradicting_pages": "Pages of puts refused because their key follows another page already.",
    "closed_spaces": "Idle spaces that were closed to make room for new ones.",
    "retired_extents": "Extents taken out of use because an unwatched process may touch them.",
    "demoted_pages": "Pages of one shard that are on the SSDs since they were written there.",
    "promoted_pages": "Pages of one shard that were loaded from the SSDs into memory.",
    "evicted_to_disk": "Pages of one shard that left memory and stay on the SSDs.",
    "not_admitted_pages":
        "Times that admission refused to write a page, or the rest of a chain, to the SSDs.",
    "unwritten_pages": "Pages whose writing failed, or that left the store before it ended.",
    "demotions_failed":
        "Pages evicted without being written first because writes to the SSDs had just failed.",
    "disk_full_pages": "Pages that found no room on the SSDs.",
    "reclaimed_pages": "Pages that were let go with their segment when it was reclaimed.",
    "carried_pages": "Pages that were carried over to another segment when theirs was reclaimed.",
    "disk_kept_pages": "Pages to be carried over for a pin or a reservation.",
    "disk_quota_pages": "Pages taken off the SSDs for their own space's quota.",
    "disk_seals_failed": "Segment files that got no index; a start reads all of them instead.",
    "disk_drops_failed": "Segment files that could not be deleted.",
    "orphaned_bytes":
        "Bytes of records on the SSDs that the start left out: their heads were gone.",
    "recovery_refused_shards":
        "Shards of spaces on the SSDs that the start left out: they do not fit this node.",
    "tombstone_keys": "Pages whose removal was written to the SSDs.",
    "tombstone_keys_lost": "Pages whose removal could not be: a restart may find them.",
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
        "batches_lost", "Batches of KV events that one follower each lost because it was slow.",
    ),
    "event_followers_cut": (
        "followers_cut", "Connections of followers of KV events that were refused or closed.",
    ),
    "event_replays": ("replays_served", "Requests of followers for earlier batches, answered."),
    "event_replays_cut": (
        "replays_cut", "Requests of followers for earlier batches, not answered to the end.",
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
            "Times that the process which serves HTTP ended and was started again.",
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
        "mover": stats["mover"],
    }
    family = GaugeMetricFamily(
        "kvstore_build_info", "Always 1; its labels say what runs.", labels=list(labels)
    )
    family.add_metric(list(labels.values()), 1)
    return family


def _open(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """What is there or under way now."""
    for name, of, help_text in (
        ("pages", "pages",
         "Keys in the index, in any tier, those being written too; a key counts once."),
        ("spaces", "spaces_total", "Spaces that are open."),
        ("sessions", "sessions_total",
         "Engines with a process that is connected or still holds something."),
        ("session_bytes", "session_bytes",
         "Slot bytes that engines read, write or have left behind, by their leases and puts."),
        ("connections", "connections", "Open connections of engines' processes."),
        ("unwatched_processes", "unwatched_processes",
         "Processes of engines whose end the kernel does not tell."),
        ("leases", "leases", "Leases that readers have not given back, expired ones too."),
        ("open_puts", "puts", "Puts neither committed nor taken back, those of lost writers too."),
        ("waiting_requests", "waiting_requests", "Requests waiting for pages, room or a sync."),
        ("waiting_bytes", "waiting_bytes", "Bytes of the requests that wait."),
    ):  # fmt: skip
        yield _gauge(f"kvstore_{name}", help_text, stats[of])
    yield _counter(
        "kvstore_accepted_connections",
        "Connections to the socket, those that were refused too.",
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
        "Keys that answered lookups had asked for, by where they were found (ssd: on the SSDs only,"
        " for some shard) and by model: the first 32 models, and other.",
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
        "Memory that the host tier has for pages, used or not; withheld memory is not counted.",
        host["capacity_bytes"],
    )
    states = GaugeMetricFamily(
        "kvstore_host_bytes",
        "Memory of the host tier, by state of its slots; pinned is a part of ready, retiring: of"
        " extents that get new memory, whatever their slots are; withheld is beyond the capacity.",
        labels=["state"],
    )
    for state in _SLOT_STATES:
        states.add_metric([state], host[f"{state}_bytes"])
    yield states
    yield _gauge(
        "kvstore_host_populated_bytes",
        "Memory of the host tier that the kernel has given, because it was touched.",
        stats["populated_bytes"],
    )
    yield _gauge(
        "kvstore_host_missing_bytes",
        "Memory that extents should have and that could not be had yet.",
        stats["missing_bytes"],
    )
    yield _counter(
        "kvstore_host_memory_failures",
        "Times that an extent could not be given new memory; it is tried again.",
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
            "Bytes of records written once more because their segment was reclaimed.",
        ),
        ("read_bytes", "Bytes of records of pages read from the SSDs and found whole."),
        ("syncs", "Segment files that were synced."),
        ("reclaimed_segments", "Segment files whose room was given back."),
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
         "Pages taken out whose removal is not written to the SSDs yet."),
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
         "Bytes written to the SSDs for ordinary pages, carried over too, since the day began (of"
         " 24 h, by the machine's time since boot); goes back to 0."),
        ("day_forecast_bytes", "forecast_bytes",
         "Such bytes that a whole day comes to, at the mean rate since the first one."),
        ("day_budget_bytes", "budget_bytes", "Such bytes that a day may have; 0 = no limit."),
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
            ("pages_evicted", "Pages that left the slab for others."),
            ("pages_refused", "Pages not let in: no room, and read for the first time."),
            ("pages_forgotten", "Pages taken out because they were wrong or may not stay."),
            ("pages_failed", "Pages whose copy did not verify or was given up."),
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
