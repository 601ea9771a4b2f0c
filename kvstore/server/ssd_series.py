"""The series of the SSD tier, for Prometheus."""

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvstore.protocol.counts import SsdCounts, WearCounts

_CODES: Final = ("capacity", "page_corrupt", "tier_unavailable")
"""Error codes of failed jobs of the SSD tier; exported from the start."""


def ssd_series(ssd: SsdCounts, counts: Mapping[str, int]) -> Iterator[Metric]:
    """The SSD tier: space, traffic and failures."""
    room = GaugeMetricFamily(
        "kvstore_ssd_bytes",
        "Bytes on the SSDs: capacity; used by segment files; live and dead records; in flight.",
        labels=["use"],
    )
    for use, size_bytes in (
        ("capacity", ssd.capacity_bytes), ("used", ssd.used_bytes), ("live", ssd.live_bytes),
        ("dead", ssd.dead_bytes), ("in_flight", ssd.in_flight_bytes),
    ):  # fmt: skip
        room.add_metric([use], size_bytes)
    yield room
    for name, value, help_text in (
        ("written_bytes", ssd.written_bytes,
         "Bytes of records of pages written to the SSDs for the first time."),
        ("carried_bytes", ssd.carried_bytes,
         "Bytes of records rewritten because their segment was reclaimed."),
        ("read_bytes", ssd.read_bytes,
         "Bytes of records of pages that were read from the SSDs and verified."),
        ("syncs", ssd.syncs, "Segment files that were synced."),
        ("reclaimed_segments", ssd.reclaimed_segments, "Segment files that were reclaimed."),
    ):  # fmt: skip
        yield CounterMetricFamily(f"kvstore_ssd_{name}", help_text, value=value)
    for name in ("checked", "corrupt"):
        found = counts.get(f"disk_{name}_records", 0)
        yield CounterMetricFamily(
            f"kvstore_ssd_{name}_records", f"Records read by verify: {name}.", value=found
        )
    refused = CounterMetricFamily(
        "kvstore_ssd_refused_pages", "Pages not written to the SSDs, by reason.", labels=["reason"]
    )
    refused.add_metric(["quota"], counts.get("disk_refused_quota", 0))
    yield refused
    for name, value, help_text in (
        ("backlog_pages", ssd.backlog_pages, "Pages waiting to be written to the SSDs."),
        ("loads", ssd.loads, "Pages being read from the SSDs into memory."),
        ("tombstone_keys_waiting", ssd.tombstone_keys_waiting,
         "Removed keys whose tombstones are not written to the SSDs yet."),
    ):  # fmt: skip
        yield GaugeMetricFamily(f"kvstore_ssd_{name}", help_text, value=value)
    yield GaugeMetricFamily(
        "kvstore_ssd_segments", "Segment files in all directories.", value=ssd.segments
    )
    yield GaugeMetricFamily(
        "kvstore_ssd_degraded",
        "1 = writes fail, or a sync has failed since the start.",
        value=float(ssd.degraded),
    )
    yield GaugeMetricFamily(
        "kvstore_ssd_failed_segments",
        "Segment files that could not be synced.",
        value=len(ssd.failed_segments),
    )
    errors = CounterMetricFamily(
        "kvstore_ssd_errors", "Jobs of the SSD tier that failed, by error code.", labels=["code"]
    )
    for code, value in sorted({**dict.fromkeys(_CODES, 0), **ssd.errors}.items()):
        errors.add_metric([code], value)
    yield errors
    yield from _wear(ssd.wear)


def _wear(wear: WearCounts) -> Iterator[Metric]:
    """Bytes written for ordinary pages, and the endurance budget."""
    for name, value, help_text in (
        ("day_bytes", wear.today_bytes,
         "Bytes of ordinary pages written to the SSDs in the current day, including those carried"
         " over; a day is 24 h counted from the machine's boot. Resets to 0 each day."),
        ("day_forecast_bytes", wear.forecast_bytes,
         "Forecast of kvstore_ssd_day_bytes for the whole day, at the mean rate so far."),
        ("day_budget_bytes", wear.budget_bytes,
         "Maximum of kvstore_ssd_day_bytes (ssd.bytes_per_day_max); 0 = no limit."),
    ):  # fmt: skip
        yield GaugeMetricFamily(f"kvstore_ssd_{name}", help_text, value=value)
