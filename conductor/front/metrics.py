"""The Conductor's metrics for Prometheus."""

import contextlib
import platform
from collections import deque
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

from conductor.front.handoffs import SECONDS, HandoffMetrics
from conductor.routing.decisions import Decision
from kvstore.config.machine import version_of
from kvstore.index.face import INDEX_FAULTS, PrefixIndex

_OWN_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)

_ERRORS_KEPT: Final = 256
_PARTS: Final = (0.5, 0.9)
Snapshot = Callable[[], dict[str, dict[tuple[str, ...], float]]]
"""Values read at a scrape: name → label values → value."""

_GAUGES: Final = {
    "queue_length": ("Requests waiting for an engine.", ()),
    "engine_state": (
        "1 for the current state of each engine, 0 for the others.", ("engine", "role", "state"),
    ),
    "engine_gap": (
        "1 for each reason why the Conductor ignores an engine's KV, else 0; GET /v1/engines"
        " says what to do.",
        ("engine", "gap"),
    ),
    "node_readable": ("1 if the last request to a node's admin API was answered.", ("node",)),
    "node_source": (
        "Always 1; source: the node was registered, or was found in etcd or Redis (membership).",
        ("node", "source"),
    ),
    "membership_state": (
        "1 for the current state of the membership in etcd or Redis, else 0; all 0 without such a"
        " membership.",
        ("state",),
    ),
    "membership_nodes": ("Nodes of the cluster according to etcd or Redis.", ()),
    "membership_left_out": (
        "Records in etcd or Redis whose nodes are not followed, because the record is unusable or"
        " cannot be read.",
        (),
    ),
    "node_unnamed_sessions": (
        "Sessions on a node without an engine's name, so they cannot be matched to an engine.",
        ("node",),
    ),
    "engine_in_flight": ("Requests in flight at each engine.", ("engine",)),
    "local_tokenizer": (
        "1 = prompts of a kind are tokenised locally; 0 = disabled, as an engine's differed.",
        ("model", "kind"),
    ),
    "journal_written": ("1 while the journal of decisions is written.", ()),
    "engine_others": (
        "Requests at an engine that this Conductor did not send, of engines that export them.",
        ("engine", "state"),
    ),
    "cost_error": (
        "Relative error of the cost estimates for the last 256 prompts, decode steps, fetches and"
        " handoffs, before the costs were updated with them.",
        ("engine", "what", "quantile"),
    ),
    "ttft_error": (
        "Relative error of the predicted time to first token of the last 256 streams, predicted"
        " when engines were assigned.",
        ("quantile",),
    ),
    "cost_factor": (
        "Fitted value of each cost term, as a multiple of the initial estimate.",
        ("engine", "what", "term"),
    ),
    "cost_bias": (
        "Factor that corrects a lasting bias of the fitted costs, 1/3 to 3; 1 = no bias.",
        ("engine", "what"),
    ),
    "output_tokens_error": (
        "Error of the predicted output length of the last 256 answers, in tokens.",
        ("quantile",),
    ),
    "output_tokens_bias": (
        "Predicted output tokens of the last 256 answers, as a multiple of the actual ones.", (),
    ),
    "admission_load": (
        "Load found by the newest request: queued prompts as a fraction of its time-to-first-token"
        " objective, and how full the decoding engines are, or will be when it decodes.",
        ("model", "side"),
    ),
    "tenants_over_share": ("Tenants that have recently used more than their fair share.", ()),
    "advice_rate": (
        "Requests per second: arrived recently (rate), servable in time (served), and servable by"
        " prefill and by decode alone (prefill, decode).",
        ("model", "what"),
    ),
    "advice_short": (
        "Engines that the current load lacks, if all of them had this hardware.",
        ("model", "role", "hardware"),
    ),
    "advice_gain": (
        "Requests per second served in time after adding, removing or switching one engine, as a"
        " multiple of the current ones; 0 = none is served now.",
        ("model", "change", "role", "hardware", "was"),
    ),
    "engine_lent": (
        "1 for a mixed engine that currently only computes prompts (role prefill) or only decodes"
        " (role decode).",
        ("engine", "role"),
    ),
    "bring_bytes": ("Estimated bytes of prefetches in progress at nodes.", ()),
    "costs_file_faults": ("Failures to read or write costs.file.", ()),
    "index_up": ("1 while the prefix index can be read, else 0.", ()),
    "index_entries": ("Pages in the prefix index; a page of several workers counts once.", ()),
    "index_undecided": (
        "Pages that counted as absent because the index's table changed while it was read.", (),
    ),
    "index_holder_sets": ("Distinct sets of workers that have a page, in the index.", ()),
    "index_expected": ("Pages that a worker is expected to have soon.", ()),
    "index_resident_bytes": ("Largest resident memory of the index process.", ()),
    "index_drift": (
        "Pages on which a node and the index differed in the last audit: missing from the index, or"
        " stale in it.",
        ("worker", "kind"),
    ),
    "events_current": (
        "1 while all batches of a worker are applied, so its pages count, else 0.",
        ("worker",),
    ),
    "events_waiting": (
        "Blocks of a worker that do not count yet: their parent or their tokens are unknown.",
        ("worker",),
    ),
    "index_worker_pages": (
        "Pages of each worker in the prefix index, by medium.", ("worker", "medium"),
    ),
    "events_connected": ("1 while a worker's events are connected, else 0.", ("worker",)),
    "events_lag_seconds": (
        "Seconds from the publication of a worker's newest batch until it was applied.",
        ("worker",),
    ),
}  # fmt: skip
_COUNTS: Final = {
    "brought": (
        "Jobs requested from nodes, by outcome: load pages for a waiting request, copy them to"
        " another node for it, or replicate a popular prefix.",
        ("kind", "outcome"),
    ),
    "lendings": ("Changes of the set of lent mixed engines of a model.", ("model",)),
    "advice_faults": ("Failures to compute advice; each is a bug.", ()),
    "admission": (
        "Requests that were admitted, let through to measure (probe), or refused because the prompt"
        " would be computed too late (prefill), the decoding engines would be full (decode), or it"
        " waited too long (late).",
        ("class", "outcome"),
    ),
    "faults": ("Connections and requests that were refused or failed, by cause.", ("cause",)),
    "index_restarts": ("Restarts of the index process.", ()),
    "index_faults": (
        "Faults of the index process: it ended (ended); it was starting or not reading, so the"
        " expected pages of a prompt were left out (backlog).",
        ("cause",),
    ),
    "events_resyncs": (
        "Times that all pages of a node were read again, after a gap or an audit.",
        ("worker",),
    ),
    "trace_requests": (
        "Requests for decisions.trace_file: written, dropped because the disk was slow, not written"
        " because of an error, or of unknown length.",
        ("outcome",),
    ),
    "index_dropped": ("Pages left out of the prefix index because it was full.", ()),
    "events_batches": ("Batches of a worker's events that were applied.", ("worker",)),
    "events_gaps": (
        "Gaps in the sequence of a worker's batches: seen; lost, because a replay could not fill"
        " them.",
        ("worker", "outcome"),
    ),
    "events_restarts": ("Detected restarts of a worker's publisher.", ("worker",)),
    "events_unmapped": (
        "Blocks of a worker's events that could not be mapped to pages.", ("worker",),
    ),
    "events_skipped": (
        "Events of a worker that were not applied: of an unknown kind, with extra keys of an"
        " unknown form, or with too many media or KV groups.",
        ("worker",),
    ),
    "events_faults": (
        "Protocol violations and failures of a worker's publisher, by cause.", ("worker", "cause"),
    ),
}  # fmt: skip
"""Counters; those of a worker restart at 0 when its address changes."""


def index_gauges(index: PrefixIndex) -> dict[str, dict[tuple[str, ...], float]]:
    """State of the index and of all followed workers."""
    table, report = index.present()
    workers = report.workers
    return {
        "index_up": {(): float(table is not None)},
        "index_restarts": {(): float(index.restarts)},
        "index_faults": {
            (cause,): float(index.fault_counts.get(cause, 0)) for cause in INDEX_FAULTS
        },
        "index_undecided": {(): float(table.undecided if table is not None else 0)},
        "index_entries": {(): float(report.entries)},
        "index_holder_sets": {(): float(report.sets)},
        "index_dropped": {(): float(report.dropped)},
        "index_expected": {(): float(report.expected)},
        "index_resident_bytes": {(): float(report.resident_bytes)},
        "index_worker_pages": {
            (one.worker, medium): float(count)
            for one in workers
            for medium, count in one.pages.items()
        },
        "index_drift": {
            (one.worker, kind): float(count)
            for one in workers
            for kind, count in (("missing", one.missing), ("stale", one.stale))
        },
        "events_connected": {(one.worker,): float(one.connected) for one in workers},
        "events_current": {(one.worker,): float(one.current) for one in workers},
        "events_lag_seconds": {(one.worker,): one.lag_s for one in workers},
        "events_batches": {(one.worker,): float(one.batches) for one in workers},
        "events_restarts": {(one.worker,): float(one.restarts) for one in workers},
        "events_resyncs": {(one.worker,): float(one.resyncs) for one in workers},
        "events_skipped": {(one.worker,): float(one.skipped) for one in workers},
        "events_unmapped": {(one.worker,): float(one.unmapped) for one in workers},
        "events_waiting": {(one.worker,): float(one.waiting) for one in workers},
        "events_faults": {
            (one.worker, cause): float(count)
            for one in workers
            for cause, count in one.faults.items()
        },
        "events_gaps": {
            (one.worker, outcome): float(count)
            for one in workers
            for outcome, count in (("seen", one.gaps), ("lost", one.gaps_lost))
        },
    }


class Metrics(Collector):
    """All metrics of one Conductor, in a separate registry.

    Attributes:
        handoffs: metrics of handoffs of pairs.
    """

    def __init__(self, snapshot: Snapshot, known: Callable[[str], object]) -> None:
        """Register all metrics.

        Args:
            snapshot: returns values kept by other objects; called at each scrape, on the event
                loop.
            known: the engine with an id; None = it was removed.
        """
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._snapshot = snapshot
        self._known = known
        self._ttft_errors: deque[float] = deque(maxlen=_ERRORS_KEPT)
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvstore_conductor_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            full_name = f"kvstore_conductor_{name}"
            return Histogram(full_name, text, buckets=buckets, registry=self.registry)

        self._requests = counter(
            "requests",
            "Completions by outcome and HTTP status (0: the client disconnected first).",
            "status", "outcome",
        )  # fmt: skip
        self._decisions = counter(
            "decisions", "Decisions: engines chosen for a request.", "policy", "plan"
        )
        self._retries = counter("retries", "Requests retried on another engine after a failure.")
        self._failures = counter(
            "engine_failures", "Requests that failed at an engine, retried or not.", "engine"
        )
        self._predicted = counter(
            "hit_tokens_predicted",
            "Cached prompt tokens of answered requests, as predicted by the index.",
        )
        self._measured = counter(
            "hit_tokens_measured",
            "Cached prompt tokens of answered requests, as reported by the engine.",
        )
        self._prompt = counter("prompt_tokens", "Prompt tokens of answered requests.")
        self._ttft = histogram(
            "ttft_seconds",
            "Seconds from a request's arrival to the first byte sent to its client.",
            SECONDS,
        )
        self._own = histogram(
            "own_seconds",
            "Seconds spent in the Conductor itself before the first byte.",
            _OWN_SECONDS,
        )
        self._queue = histogram(
            "queue_seconds", "Seconds that requests waited for an engine.", SECONDS
        )
        self.handoffs = HandoffMetrics(self.registry)
        self._lag = Gauge(
            "kvstore_conductor_loop_lag_seconds",
            "Delay of a timer on the event loop, maximum of the last second.",
            registry=self.registry,
        )
        said = "Always 1; the labels are the versions."
        build = Info("kvstore_conductor_build", said, registry=self.registry)
        build.info({"version": version_of(), "python": platform.python_version()})
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def loop_lag(self, seconds: float) -> None:
        """Record the lag of the event loop."""
        self._lag.set(seconds)

    def assigned(self, policy: str, plan: str) -> None:
        """Engines were chosen."""
        self._decisions.labels(policy, plan).inc()

    def failed(self, engine: str, *, retried: bool) -> None:
        """A request failed at an engine; it may be retried on another one."""
        if self._known(engine) is not None:
            self._failures.labels(engine).inc()
        if retried:
            self._retries.inc()

    def forget(self, engine: str) -> None:
        """An engine was removed: remove its series."""
        with contextlib.suppress(KeyError):
            self._failures.remove(engine)

    def refused(self, status: int, outcome: str) -> None:
        """A request was refused before a decision was made."""
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
            error = decision.ttft_error
            if error is not None:
                self._ttft_errors.append(error)
            self._prompt.inc(decision.prompt_tokens or 0)
            measured = decision.measured_hit_tokens
            if measured is not None:
                self._predicted.inc(decision.attempts[-1].predicted_hit_tokens)
                self._measured.inc(measured)

    def describe(self) -> Iterator[Metric]:
        """Nothing: the snapshot is only known at a scrape."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The values of the snapshot, and errors of predictions."""
        ordered = sorted(self._ttft_errors)
        errors: dict[tuple[str, ...], float] = {
            (str(part),): ordered[int(part * (len(ordered) - 1))] for part in _PARTS if ordered
        }
        values_of = self._snapshot()
        values_of["ttft_error"] = errors
        for name, values in values_of.items():
            kind = CounterMetricFamily if name in _COUNTS else GaugeMetricFamily
            text, labels = _COUNTS.get(name) or _GAUGES[name]
            family = kind(f"kvstore_conductor_{name}", text, labels=labels)
            for label_values, value in values.items():
                family.add_metric(label_values, value)
            yield family

    def text(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self.registry)
