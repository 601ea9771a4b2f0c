"""What the Conductor counts and times, for Prometheus."""

import contextlib
import platform
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.routing.decisions import Decision
from kvstore.config.machine import version_of

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_OWN_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)

Snapshot = Callable[[], dict[str, dict[tuple[str, ...], float]]]
"""Values read at a scrape: name → label values → value."""

_GAUGES: Final = {
    "queue_length": ("Requests waiting for an engine.", ()),
    "engine_state": (
        "1 for the state that each engine is in, 0 for the others.", ("engine", "role", "state"),
    ),
    "engine_in_flight": ("Requests assigned to each engine and not ended.", ("engine",)),
    "index_entries": ("Pages in the prefix index; one that several workers hold counts once.", ()),
    "index_worker_pages": (
        "Pages in the prefix index that each worker holds, by medium.", ("worker", "medium"),
    ),
    "events_connected": ("1 while a worker's events are connected, else 0.", ("worker",)),
    "events_lag_seconds": (
        "From publication to application of a worker's newest batch of events.", ("worker",),
    ),
}  # fmt: skip
_COUNTS: Final = {
    "faults": ("Connections and requests that were refused or broke, by cause.", ("cause",)),
    "index_dropped": ("Pages that the prefix index did not take for want of room.", ()),
    "events_batches": ("Batches of a worker's events that were applied.", ("worker",)),
    "events_gaps": (
        "Gaps in the numbers of a worker's batches: seen, and of these lost, because replay could"
        " not fill them.",
        ("worker", "outcome"),
    ),
    "events_restarts": ("Restarts of a worker's publisher that were seen.", ("worker",)),
    "events_unmapped": (
        "Blocks of a worker's events that could not be mapped to pages.", ("worker",),
    ),
    "events_skipped": (
        "Events of a worker that were not applied: of unknown kinds, with LoRA or extra keys, or of"
        " one medium too many.",
        ("worker",),
    ),
    "events_faults": (
        "What a worker's publisher did that it should not, by cause.", ("worker", "cause"),
    ),
}  # fmt: skip
"""Counters; those of a worker begin anew when its address changes."""


class Metrics(Collector):
    """All metrics of one Conductor, in a registry of its own."""

    def __init__(self, snapshot: Snapshot) -> None:
        """Register everything.

        Args:
            snapshot: gives what others keep; called at each scrape, in the loop.
        """
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._snapshot = snapshot
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvstore_conductor_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            full_name = f"kvstore_conductor_{name}"
            return Histogram(full_name, text, buckets=buckets, registry=self.registry)

        self._requests = counter(
            "requests",
            "Completions by HTTP status (0: the client left before one) and outcome.",
            "status", "outcome",
        )  # fmt: skip
        self._decisions = counter(
            "decisions", "Times that engines were chosen for a request.", "policy", "plan"
        )
        self._retries = counter(
            "retries", "Times that a request which an engine failed went to another one."
        )
        self._failures = counter(
            "engine_failures", "Requests that an engine failed, retried or not.", "engine"
        )
        self._predicted = counter(
            "hit_tokens_predicted",
            "Prompt tokens of answered requests that the index had where they were sent.",
        )
        self._measured = counter(
            "hit_tokens_measured",
            "Prompt tokens of answered requests that the engine did not compute, as it said.",
        )
        self._prompt = counter("prompt_tokens", "Prompt tokens of answered requests.")
        self._ttft = histogram(
            "ttft_seconds", "From a request's arrival to the first byte for its client.", _SECONDS
        )
        self._own = histogram(
            "own_seconds", "The Conductor's own share of the time to the first byte.", _OWN_SECONDS
        )
        self._queue = histogram(
            "queue_seconds", "How long requests waited for an engine.", _SECONDS
        )
        self._lag = Gauge(
            "kvstore_conductor_loop_lag_seconds",
            "How late the event loop ran a timer, worst of the last second.",
            registry=self.registry,
        )
        build = Info(
            "kvstore_conductor_build", "Always 1; its labels say what runs.", registry=self.registry
        )
        build.info({"version": version_of(), "python": platform.python_version()})
        ProcessCollector(registry=self.registry)
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
        """Nothing: what others keep is only known at a scrape."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """What others keep, at a scrape."""
        for name, values in self._snapshot().items():
            kind = CounterMetricFamily if name in _COUNTS else GaugeMetricFamily
            text, labels = _COUNTS.get(name) or _GAUGES[name]
            family = kind(f"kvstore_conductor_{name}", text, labels=labels)
            for label_values, value in values.items():
                family.add_metric(label_values, value)
            yield family

    def text(self) -> bytes:
        """The scrape."""
        return generate_latest(self.registry)
