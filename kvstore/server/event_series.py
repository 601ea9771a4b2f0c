"""The series of KV events, for Prometheus."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvstore.events.questions import ANSWER_COUNTS

_EVENTS: Final = {
    "event_batches": ("batches_sent", "Batches of KV events that were published."),
    "event_batches_dropped": (
        "batches_dropped", "Batches of KV events dropped because the queue was full.",
    ),
    "event_batches_lost": (
        "batches_lost", "Batches of KV events not sent to a slow follower, counted per follower.",
    ),
    "event_followers_cut": (
        "followers_cut", "Connections of followers of KV events that the node refused or closed.",
    ),
    "event_replays": ("replays_served", "Replays of earlier batches that were sent."),
    "event_replays_cut": (
        "replays_cut", "Replays of earlier batches that were not sent completely.",
    ),
    "event_snapshot_seconds": (
        "snapshots_s", "Total seconds spent on snapshots that were sent completely.",
    ),
}  # fmt: skip


def event_series(events: Mapping[str, Any]) -> Iterator[Metric]:
    """All series of a publisher's statistics."""
    for name, (of, help_text) in _EVENTS.items():
        yield CounterMetricFamily(f"kvstore_{name}", help_text, value=events[of])
    yield GaugeMetricFamily(
        "kvstore_event_followers",
        "Open connections of followers of KV events, live or replay.",
        value=events["followers"],
    )
    questions = CounterMetricFamily(
        "kvstore_event_questions",
        "Requests of followers for snapshots, audits and samples, by how they ended.",
        labels=["kind", "end"],
    )
    for name in ANSWER_COUNTS:
        questions.add_metric(name.split("_"), events[name])
    yield questions
