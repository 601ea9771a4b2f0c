"""Metrics of one engine, in a separate registry (two engines may run in one process)."""

from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvstore.engine.counts import CHOICES, CHOICES_TEXT, SERIES

_OF_LOADS: Final = (
    "slower_tokens", "room_waits", "room_wait_seconds", "stuck_loads",
    "load_expected_seconds", "load_measured_seconds", "load_error_seconds",
)  # fmt: skip
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """Metrics of one engine, thread-safe; docs/engines/reference.md lists them."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"reference_engine_{name}", text, labels, registry=registry)

        self.requests = counter("requests", "Ended requests, by reason.", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens by source of K/V.", "source")
        self.output_tokens = counter("output_tokens", "Generated tokens.")
        self.preemptions = counter("preemptions", "Requests preempted, which lost their blocks.")
        self.restore_bytes = counter("restore_bytes", "Bytes restored from the store.")
        self.remote_tokens = counter(
            "remote_tokens", "Tokens restored from the store that only other nodes had."
        )
        self.restore_seconds = counter("restore_seconds", "Seconds requests waited for restores.")
        self.store_bytes = counter("store_bytes", "Bytes stored in the store.")
        self.store_seconds = counter(
            "store_seconds", "Seconds from the submission of puts to their end."
        )
        self.store_pages = counter(
            "store_pages", "Pages of puts on all ranks, by outcome.", "outcome"
        )
        self.store_errors = counter("store_errors", "Errors of the store, by code.", "code")
        self.load_choices = counter("load_choices", CHOICES_TEXT, "choice", "reason")
        self.loads = {name: counter(name, SERIES[name]) for name in _OF_LOADS}
        self.handoffs = counter(
            "handoffs", "Ended pushes, by last state and cause.", "state", "cause"
        )
        self.handoff_bytes = counter("handoff_bytes", "Bytes of KV and aux data that were pushed.")
        self.handoff_seconds = counter("handoff_seconds", "Seconds of ended pushes.", "state")
        self.step_seconds = Histogram(
            "reference_engine_step_seconds",
            "Seconds of one step.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.idle_seconds = counter("idle_seconds", "Seconds without anything to compute.")
        self.waiting = Gauge("reference_engine_waiting", "Waiting requests.", registry=registry)
        self.running = Gauge("reference_engine_running", "Requests with blocks.", registry=registry)
        self.free_blocks = Gauge("reference_engine_free_blocks", "Free blocks.", registry=registry)
        self.limbo_blocks = Gauge(
            "reference_engine_limbo_blocks",
            "Blocks of failed pushes in which bytes may still arrive.",
            registry=registry,
        )
        self.written_push_jobs = Gauge(
            "reference_engine_written_push_jobs",
            "Push jobs written by a transport other than TCP.",
            registry=registry,
        )
        self.ended_push_engines = Gauge(
            "reference_engine_ended_push_engines",
            "Transfer engines shut down because bytes might still arrive through them.",
            registry=registry,
        )
        self.aux_slots = Gauge(
            "reference_engine_aux_slots", "Slots in use for aux data of pushes.", registry=registry
        )

    def note_loads(self, sums: Mapping[str, float]) -> None:
        """Add what was counted of decisions about loads."""
        for name, value in sums.items():
            if name in CHOICES:
                self.load_choices.labels(*CHOICES[name]).inc(value)
            else:
                self.loads[name].inc(value)

    def text(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self.registry)
