"""What the Conductor counts and times, for Prometheus."""

import contextlib
from collections import Counter as Tally
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.decisions import Decision

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_OWN_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)

Snapshot = Callable[[], dict[str, dict[tuple[str, ...], float]]]
"""Gauges read at a scrape: name → label values → value."""

_GAUGES = {
    "faults": ("Connections and requests that were refused or broke, by cause.", ("cause",)),
    "queue_length": ("Requests waiting for an engine.", ()),
    "engine_state": ("1 for the state that each engine is in.", ("engine", "role", "state")),
    "engine_in_flight": ("Requests assigned to each engine.", ("engine",)),
    "index_entries": ("Pages in the prefix index.", ()),
    "index_worker_pages": ("Pages that each worker holds, by medium.", ("worker", "medium")),
    "index_dropped": ("Pages not indexed for want of room since the start.", ()),
    "events_connected": ("1 while a worker's events are connected.", ("worker",)),
    "events_batches": ("Batches of events applied since the start.", ("worker",)),
    "events_gaps": ("Gaps in the sequence since the start; filled or not.", ("worker", "outcome")),
    "events_restarts": ("Restarts of the publisher seen since the start.", ("worker",)),
    "events_unmapped": ("Blocks that could not be mapped to pages.", ("worker",)),
    "events_faults": ("What publishers did that they should not.", ("worker", "cause")),
    "events_lag_seconds": ("Publication to application of the newest batch.", ("worker",)),
}


class Metrics(Collector):
    """All metrics of one Conductor, in a registry of its own."""

    def __init__(self, snapshot: Snapshot) -> None:
        """Register everything.

        Args:
            snapshot: gives the gauges; called at each scrape, in the loop.
        """
        self._snapshot = snapshot
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvstore_conductor_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            full_name = f"kvstore_conductor_{name}"
            return Histogram(full_name, text, buckets=buckets, registry=self.registry)

        self._requests = counter(
            "requests", "Completions by status and outcome.", "status", "outcome"
        )
        self._decisions = counter("decisions", "Engines chosen.", "policy", "plan")
        self._retries = counter("retries", "Requests that an engine failed and another one got.")
        self._failures = counter("engine_failures", "Requests that an engine failed.", "engine")
        self._predicted = counter(
            "hit_tokens_predicted", "Prompt tokens believed cached where the request was sent."
        )
        self._measured = counter(
            "hit_tokens_measured", "Prompt tokens that the engine then did not compute."
        )
        self._prompt = counter("prompt_tokens", "Prompt tokens of answered requests.")
        self._ttft = histogram("ttft_seconds", "Arrival to first byte for the client.", _SECONDS)
        self._own = histogram(
            "own_seconds", "The Conductor's own share of the time to first byte.", _OWN_SECONDS
        )
        self._queue = histogram("queue_seconds", "Waiting for an engine.", _SECONDS)
        self._lag = Gauge(
            "kvstore_conductor_loop_lag_seconds",
            "How late the event loop ran a timer, worst of the last second.",
            registry=self.registry,
        )
        self.registry.register(self)

    def loop_lag(self, seconds: float) -> None:
        """Record how late the loop was."""
        self._lag.set(seconds)

    def assigned(self, policy: str, plan: str) -> None:
        """Engines were chosen."""
        self._decisions.labels(policy, plan).inc()

    def failed(self, engine: str, *, retried: bool) -> None:
        """An engine failed a request, which may now go elsewhere."""
        self._failures.labels(engine).inc()
        if retried:
            self._retries.inc()

    def forget(self, engine: str) -> None:
        """An engine was removed: its series ends."""
        with contextlib.suppress(KeyError):
            self._failures.remove(engine)

    def refused(self, status: int, outcome: str) -> None:
        """A request was refused before anything was decided about it."""
        self._requests.labels(str(status), outcome).inc()

    def ended(self, decision: Decision) -> None:
        """A request has ended."""
        self._requests.labels(str(decision.status or 0), decision.outcome).inc()
        self._queue.observe(decision.queue_s)
        if decision.ttft_s is not None:
            self._ttft.observe(decision.ttft_s)
        if decision.conductor_s is not None:
            self._own.observe(max(0.0, decision.conductor_s))
        if decision.outcome == "ok":
            self._prompt.inc(decision.prompt_tokens or 0)
            measured = decision.measured_hit_tokens
            if measured is not None:
                self._predicted.inc(decision.attempts[-1].predicted_hit_tokens)
                self._measured.inc(measured)

    def describe(self) -> Iterator[Metric]:
        """Nothing: the gauges are only known at a scrape."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The gauges, at a scrape."""
        for name, values in self._snapshot().items():
            text, labels = _GAUGES[name]
            family = GaugeMetricFamily(f"kvstore_conductor_{name}", text, labels=labels)
            for label_values, value in values.items():
                family.add_metric(label_values, value)
            yield family

    def text(self) -> bytes:
        """The scrape."""
        return generate_latest(self.registry)


def by_label(values: Tally[str]) -> dict[tuple[str, ...], float]:
    """A tally as one gauge with one label."""
    return {(label,): float(value) for label, value in values.items()}
