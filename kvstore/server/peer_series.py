"""The series of reads from other nodes, for Prometheus."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric


def peer_series(remote: Mapping[str, Any]) -> Iterator[Metric]:
    """Reads from peers that are under way, and how fast each peer gives pages."""
    size = GaugeMetricFamily(
        "kvstore_peer_bytes",
        "Slot bytes of reads from peers: in flight, and the most that may be.",
        labels=["use"],
    )
    size.add_metric(["in_flight"], remote["in_flight_bytes"])
    size.add_metric(["in_flight_max"], remote["in_flight_bytes_max"])
    yield size
    yield GaugeMetricFamily(
        "kvstore_peer_reads", "Reads from peers under way.", value=remote["jobs"]
    )
    yield GaugeMetricFamily(
        "kvstore_peer_unsettled_reads",
        "Reads from peers that have ended and whose bytes may still arrive.",
        value=remote["unsettled_jobs"],
    )
    rate = GaugeMetricFamily(
        "kvstore_peer_bytes_per_second",
        "How fast a peer gives pages, as measured last; 0 = it gave none yet.",
        labels=["peer"],
    )
    failed = CounterMetricFamily(
        "kvstore_peer_failed_reads", "Reads that did not bring all pages.", labels=["peer"]
    )
    for name, peer in remote["peers"].items():
        rate.add_metric([name], peer["bytes_per_s"])
        failed.add_metric([name], peer["failed_jobs"])
    yield rate
    yield failed
