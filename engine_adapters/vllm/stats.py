"""Exports the connector's counts in vLLM's logs and Prometheus series."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from kvstore.engine.counts import (
    CHOICES,
    CHOICES_TEXT,
    DEVICE_FAILURES,
    DEVICE_FAILURES_TEXT,
    SERIES,
)


@dataclass
class StoreStats(KVConnectorStats):  # type: ignore[misc]
    """Sums of one interval: series name → value."""

    def reset(self) -> None:
        """Reset the sums."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counts of another rank, side or step."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The values for vLLM's log: the series that changed, with short names."""
        return {f"kvstore {name}": round(value, 4) for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class StoreMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``kvstore:<series>_total`` counters: :data:`SERIES`, choices, and failures of devices."""

    def __init__(
        self, config: Any, metric_types: Any, labels: list[str], values: dict[int, list[object]]
    ) -> None:
        super().__init__(config, metric_types, labels, values)
        counter = metric_types[prometheus_client.Counter]
        self._series = {
            name: create_metric_per_engine(
                counter(name=f"kvstore:{name}", documentation=text, labelnames=labels), values
            )
            for name, text in SERIES.items()
        }
        choices = counter(
            name="kvstore:load_choices", documentation=CHOICES_TEXT,
            labelnames=[*labels, "choice", "reason"],
        )  # fmt: skip
        failures = counter(
            name="kvstore:device_failures", documentation=DEVICE_FAILURES_TEXT,
            labelnames=[*labels, "reason"],
        )  # fmt: skip
        labelled: dict[str, tuple[Any, tuple[str, ...]]] = {
            name: (choices, kind) for name, kind in CHOICES.items()
        }
        labelled |= {name: (failures, (cause,)) for name, cause in DEVICE_FAILURES.items()}
        self._series |= {
            name: {engine: series.labels(*one, *kind) for engine, one in values.items()}
            for name, (series, kind) in labelled.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the sums of one interval."""
        for name, value in Counter(transfer_stats_data).items():
            if name in self._series and value > 0:
                self._series[name][engine_idx].inc(value)
