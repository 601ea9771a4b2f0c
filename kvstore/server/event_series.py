"""The series of KV events, for Prometheus."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvstore.protocol.counts import EventCounts


def event_series(events: EventCounts) -> Iterator[Metric]:
    """All series of a publisher's statistics."""
    for name, count, help_text in (
        ("event_batches", events.batches_sent,
         "Batches of KV events that were published."),
        ("event_batches_dropped", events.batches_dropped,
         "Batches of KV events dropped because the queue was full."),
        ("event_batches_lost", events.batches_lost,
         "Batches of KV events not sent to a slow follower, counted per follower."),
        ("event_followers_cut", events.followers_cut,
         "Connections of followers of KV events that the node refused or closed."),
        ("event_replays", events.replays_served,
         "Replays of earlier batches that were sent."),
        ("event_replays_cut", events.replays_cut,
         "Replays of earlier batches that were not sent completely."),
        ("event_snapshot_seconds", events.snapshots_s,
         "Total seconds spent on snapshots that were sent completely."),
    ):  # fmt: skip
        yield CounterMetricFamily(f"kvstore_{name}", help_text, value=count)
    yield GaugeMetricFamily(
        "kvstore_event_followers",
        "Open connections of followers of KV events, live or replay.",
        value=events.followers,
    )
    questions = CounterMetricFamily(
        "kvstore_event_questions",
        "Requests of followers for snapshots, audits and samples, by how they ended.",
        labels=["kind", "end"],
    )
    for kind, end, count in (
        ("snapshots", "served", events.snapshots_served),
        ("snapshots", "cut", events.snapshots_cut),
        ("snapshots", "refused", events.snapshots_refused),
        ("audits", "served", events.audits_served),
        ("audits", "cut", events.audits_cut),
        ("audits", "refused", events.audits_refused),
    ):
        questions.add_metric([kind, end], count)
    yield questions
