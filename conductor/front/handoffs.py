"""Metrics of handoffs between the engines of pairs."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from conductor.routing.decisions import HandoffReport
from kvstore.handoff.states import FailureCode

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_CODES: Final = frozenset((*FailureCode, ""))
"""Codes of failed pushes that are labels; an engine may say any."""


class HandoffMetrics:
    """Handoffs of KV between the engines of pairs: transfer method and final states."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._count = Counter(
            "kvstore_conductor_handoffs",
            "Handoffs between engines of pairs, by transfer method and each side's final state.",
            ("way", "side", "state", "code"), registry=registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "kvstore_conductor_handoff_state_seconds",
            "Seconds that pushes of KV were in each state, as each side says.",
            ("side", "state"), buckets=SECONDS, registry=registry,
        )  # fmt: skip

    def ended(self, way: str, side: str, report: HandoffReport | None, why: str) -> None:
        """A handoff has ended at one side.

        Args:
            way: how the KV went.
            side: ``prefill`` or ``decode``.
            report: what the engine says; None = nothing.
            why: in this case, the code of the failure; empty = it has not failed.
        """
        if report is None:
            self._count.labels(way, side, "failed" if why else "success", why).inc()
            return
        code = report.code if report.code in _CODES else "other"
        self._count.labels(way, side, report.state, code).inc()
        for state, seconds in report.seconds.items():
            self._seconds.labels(side, state).observe(seconds)
