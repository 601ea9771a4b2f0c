"""The node's statistics as Prometheus series; ``docs/operations.md`` lists them."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_SLOT_STATES: Final = ("free", "writing", "ready", "pinned", "limbo", "withheld")


class _Snapshot:
    """A collector that gives one snapshot's series."""

    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """All series."""
        stats = self._stats
        yield from _host(stats)
        yield _gauge(
            "kvstore_pages",
            "Keys in the index, in any tier, those being written too; a key counts once.",
            stats["pages"],
        )
        yield _gauge(
            "kvstore_sessions",
            "Engines with a process that is connected or still holds something.",
            stats["sessions_total"],
        )
        yield _gauge(
            "kvstore_connections", "Open connections of engines' processes.", stats["connections"]
        )
        yield _gauge(
            "kvstore_leases",
            "Leases that readers have not given back, expired ones too.",
            stats["leases"],
        )
        yield _gauge(
            "kvstore_open_puts",
            "Puts neither committed nor taken back, those of lost writers too.",
            stats["puts"],
        )
        yield _gauge(
            "kvstore_waiting_requests",
            "Requests waiting for pages, room or a sync.",
            stats["waiting_requests"],
        )
        yield _gauge(
            "kvstore_loop_lag_seconds",
            "How late the loop that owns the state was in its last turn of 20 ms.",
            stats["loop_lag_s"],
        )
        yield _counter(
            "kvstore_admin_restarts",
            "Times that the process which serves HTTP ended and was started again.",
            stats["admin"]["restarts"],
        )
        yield from _counters(stats["counts"])
        if ssd := stats.get("ssd"):
            yield from _ssd(ssd, stats["counts"])
        if stats["events"]:
            yield from _events(stats["events"])


def _events(events: Mapping[str, Any]) -> Iterator[Metric]:
    """What was published."""
    yield _counter(
        "kvstore_event_batches",
        "Batches of KV events that were published.",
        events["batches_sent"],
    )
    yield _counter(
        "kvstore_event_batches_dropped",
        "Batches of KV events that were lost because too many waited.",
        events["batches_dropped"],
    )


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
        "Memory of the host tier, by state of its slots; pinned is a part of ready.",
        labels=["state"],
    )
    for state in _SLOT_STATES:
        states.add_metric([state], host[f"{state}_bytes"])
    yield states
    yield _gauge(
        "kvstore_host_populated_bytes",
        "Memory of the host tier that was touched in advance.",
        stats["populated_bytes"],
    )
    yield _gauge(
        "kvstore_host_missing_bytes",
        "Memory of extents that have none for the moment.",
        stats["missing_bytes"],
    )
    yield _counter(
        "kvstore_host_memory_failures",
        "Times that memory of an extent could not be exchanged.",
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
    for code, value in sorted(ssd["errors"].items()):
        errors.add_metric([code], value)
    yield errors


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
    """The page table's counters; removals and refusals carry their cause as a label."""
    for prefix, help_text, label in (
        ("removed", "Pages of one shard that left the index, by cause.", "cause"),
        (
            "refused",
            "Requests that were refused, by error code, and connections (code connections).",
            "code",
        ),
    ):
        family = CounterMetricFamily(f"kvstore_{prefix}", help_text, labels=[label])
        for name, value in sorted(counts.items()):
            if name.startswith(f"{prefix}_"):
                family.add_metric([name.removeprefix(f"{prefix}_")], value)
        yield family
    for name, help_text in (
        ("lookup_pages", "Keys that lookups asked for; one that waits asks again."),
        ("hit_pages", "Keys that lookups found, on every shard they asked for."),
        ("stored_pages", "Pages of one shard that became READY by a put."),
        ("stored_bytes", "Bytes of pages that became READY by a put."),
        ("loaded_bytes", "Bytes of pages that readers got a lease for."),
        ("aborted_puts", "Puts that were taken back, lost ones too."),
        ("lost_puts", "Puts taken back while their writer may still be writing."),
        ("demoted_pages", "Pages of one shard that are on the SSDs since they were written there."),
        ("promoted_pages", "Pages of one shard that were loaded from the SSDs into memory."),
        ("evicted_to_disk", "Pages of one shard that left memory and stay on the SSDs."),
        (
            "not_admitted_pages",
            "Times that admission refused to write a page, or the rest of a chain, to the SSDs.",
        ),
        ("unwritten_pages", "Pages whose writing failed, or that left the store before it ended."),
        (
            "demotions_failed",
            "Pages evicted without being written first because writes to the SSDs had just failed.",
        ),
        ("disk_full_pages", "Pages that found no room on the SSDs."),
        ("reclaimed_pages", "Pages that were let go with their segment when it was reclaimed."),
        ("disk_kept_pages", "Pages to be carried over for a pin or a reservation."),
        ("disk_quota_pages", "Pages taken off the SSDs for their own space's quota."),
        (
            "carried_pages",
            "Pages that were carried over to another segment when theirs was reclaimed.",
        ),
        (
            "orphaned_bytes",
            "Bytes of records on the SSDs that the start left out: their heads were gone.",
        ),
        ("tombstone_keys", "Pages whose removal was written to the SSDs."),
        ("tombstone_keys_lost", "Pages whose removal could not be: a restart may find them."),
        ("expired_leases", "Leases that ran out before they were given back."),
    ):
        yield _counter(f"kvstore_{name}", help_text, counts.get(name, 0))


def _gauge(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, help_text, value=value)


def render_slab(slab: Mapping[str, Any]) -> bytes:
    """A client's :meth:`~kvstore.client.KVStore.slab_stats` in the Prometheus text format."""
    registry = CollectorRegistry()
    registry.register(_Slab(slab))
    return generate_latest(registry)


def render(stats: Mapping[str, Any]) -> bytes:
    """One snapshot in the Prometheus text format."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(stats))
    return generate_latest(registry)
