"""What the connector counts, as plain sums that can be added over steps and ranks. Pure."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

SERIES: Final = {
    "lookups": "Lookups of the scheduler.",
    "lookup_seconds": "Time that lookups took of the engine's scheduler.",
    "hit_tokens": "Tokens that lookups found beyond the engine's own prefix cache.",
    "slower_tokens": "Tokens that were found, but would have been loaded slower than computed.",
    "waits": "Requests that waited for pages somebody else was writing.",
    "loads": "Loads that ended.",
    "loaded_tokens": "Tokens whose KV was loaded, verified and in time, of each rank.",
    "loaded_bytes": "Bytes that were loaded and verified.",
    "load_seconds": "Time from a load's submission to its end.",
    "load_failed_tokens": "Tokens that were to be loaded and were computed instead.",
    "load_timeouts": "Loads that a request did not wait for any longer.",
    "stores": "Stores that ended.",
    "stored_pages": "Pages that were stored.",
    "existing_pages": "Pages that were offered and were there already, or being written.",
    "skipped_pages": "Pages that were not offered: too many stores were in flight.",
    "stored_bytes": "Bytes that were stored.",
    "store_seconds": "Time from a store's submission to its end.",
    "store_failures": "Stores that were refused or lost, wholly or in part.",
    "corrupt_pages": "Pages that failed their digest and were computed instead.",
    "slab_pages": "Pages that were loaded from the worker's own slab.",
    "slab_promoted_pages": "Pages that were copied to the slab after a load.",
    "slab_evicted_pages": "Pages that left the slab for others.",
    "slab_errors": "Pages that failed their digest in the slab, and failures of its device.",
    "troubles": "Reads that became misses because the node was away, slow or refused.",
}
"""Series name → what it counts."""
_SLAB: Final = {
    "slab_pages": "pages_hit", "slab_promoted_pages": "pages_promoted",
    "slab_evicted_pages": "pages_evicted", "slab_errors": "errors",
}  # fmt: skip
"""Series → what the slab calls it."""


class AdapterCounts:
    """Sums since they were last taken."""

    def __init__(self, series: Mapping[str, str] = SERIES) -> None:
        self._series = series
        self._sums: Counter[str] = Counter()
        self._seen: Counter[str] = Counter()

    def add(self, name: str, value: float = 1) -> None:
        """Add to one of the series."""
        assert name in self._series, name
        if value:
            self._sums[name] += value  # type: ignore[assignment]

    def note_troubles(self, troubles: Counter[str]) -> None:
        """Take over what a store's client counted since this was last called."""
        for code, count in list(troubles.items()):
            new = count - self._seen[code]
            self._seen[code] = count
            self.add("corrupt_pages" if code == "corrupt" else "troubles", new)

    def note_slab(self, stats: Mapping[str, Any]) -> None:
        """Take over what a slab counted since this was last called."""
        for series, name in _SLAB.items():
            count = stats.get(name, 0)
            new = count - self._seen[series]
            self._seen[series] = count
            self.add(series, new)

    def take(self) -> dict[str, float]:
        """The sums, which start anew."""
        sums, self._sums = self._sums, Counter()
        return dict(sums)
