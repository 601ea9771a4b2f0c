"""Counters of an adapter: sums that can be added over steps and ranks. Pure."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, get_args

from kvstore.engine.load_choice import COUNTED
from kvstore.protocol.errors import DeviceCause, DeviceUnavailable

SERIES: Final = {
    "lookups": "Lookups of the scheduler.",
    "lookup_seconds": "Seconds of the engine's scheduler spent in lookups.",
    "passed_over": "Requests whose lookup was put off, because the step's lookups took too long.",
    "hit_tokens": "Tokens found beyond the engine's own prefix cache.",
    "disk_hit_tokens": "Hit tokens that only the node's disk had.",
    "remote_hit_tokens": "Hit tokens that only other nodes had.",
    "fetch_hints": "Requests whose router named a node that has their pages.",
    "hints_ignored": "Hints that are unknown, of another version, or wrong.",
    "slower_tokens": "Tokens found but not loaded, because computing them is faster.",
    "room_waits": "Requests that waited for room, because too many loads were in flight.",
    "room_wait_seconds": "Seconds that requests waited for room.",
    "stuck_loads": "Loads that were given up, and hold blocks of the engine until they end.",
    "load_expected_seconds": "Seconds that whole loads were expected to take.",
    "load_measured_seconds": "Seconds that whole loads took, on the slowest rank.",
    "load_error_seconds": "Absolute error of the expected load time, summed over loads.",
    "waits": "Requests that waited for pages another client was writing, or for other nodes.",
    "loads": "Loads that ended.",
    "loaded_tokens": "Tokens whose KV was loaded and verified in time; each rank counts its own.",
    "loaded_bytes": "Bytes loaded and verified.",
    "load_seconds": "Seconds from the submission of a load to its end.",
    "load_failed_tokens": "Tokens that could not be loaded and were computed instead.",
    "load_timeouts": "Loads whose request stopped waiting for them.",
    "unwaited_loads": "Layer-wise loads that failed: the engine did not wait for all layers.",
    "stores": "Stores that ended.",
    "stored_pages": "Pages that were stored.",
    "existing_pages": "Pages that were already stored or being written.",
    "skipped_pages": "Pages not stored in a step, because too many stores were in flight.",
    "draft_skipped_pages": "Pages not stored, because their KV of the draft may be wrong.",
    "stored_bytes": "Bytes that were stored.",
    "store_seconds": "Seconds from the submission of a store to its end.",
    "store_failures": "Stores that were refused or failed, completely or in part.",
    "corrupt_pages": "Pages that failed their digest and were computed instead.",
    "slab_pages": "Pages loaded from the worker's own slab.",
    "slab_promoted_pages": "Pages copied to the slab after a load.",
    "slab_evicted_pages": "Pages evicted from the slab.",
    "slab_errors": "Pages that failed their digest in the slab, and failures of its device.",
    "troubles": "Reads that missed because the node was down, slow, or refused them.",
}
"""Name → help text of each series."""
CHOICES: Final = {f"choices_{kind}_{reason}": (kind, reason) for kind, reason in COUNTED}
"""Name → kind and reason of each choice: labels of one series."""
CHOICES_TEXT: Final = "Hits by what was done with them (load, part or compute) and why."
DEVICE_FAILURES: Final = {f"device_failures_{cause}": cause for cause in get_args(DeviceCause)}
"""Name → cause of each failure of a device: labels of one series."""
DEVICE_FAILURES_TEXT: Final = "Loads and stores that failed on the KV memory's device, and why."
_SLAB: Final = {
    "slab_pages": "pages_hit", "slab_promoted_pages": "pages_promoted",
    "slab_evicted_pages": "pages_evicted", "slab_errors": "errors",
}  # fmt: skip
"""Series → name in the slab's statistics."""
_OF_TROUBLE: Final = {"corrupt": "corrupt_pages"}
"""Error code → its own series."""


class AdapterCounts:
    """Sums since the last :meth:`take`."""

    def __init__(self, series: Mapping[str, str] = SERIES) -> None:
        self._series = series
        self._sums: Counter[str] = Counter()
        self._seen: Counter[str] = Counter()

    def add(self, name: str, value: float = 1) -> None:
        """Add to a series."""
        assert name in self._series or name in CHOICES or name in DEVICE_FAILURES, name
        if value:
            self._sums[name] += value  # type: ignore[assignment]

    def note_troubles(
        self, troubles: Counter[str], device_failures: Counter[DeviceCause]
    ) -> None:  # fmt: skip
        """Add the errors that a store's client counted since the last call."""
        found = [
            (code, _OF_TROUBLE.get(code, "troubles"), count)
            for code, count in list(troubles.items())
            if code != DeviceUnavailable.code  # they are counted by cause
        ]
        for cause, count in list(device_failures.items()):
            found.append((name := f"device_failures_{cause}", name, count))
        for seen, series, count in found:
            new = count - self._seen[seen]
            self._seen[seen] = count
            self.add(series, new)

    def note_slab(self, stats: Mapping[str, Any]) -> None:
        """Add the counts of a slab since the last call."""
        for series, name in _SLAB.items():
            count = stats.get(name, 0)
            new = count - self._seen[series]
            self._seen[series] = count
            self.add(series, new)

    def take(self) -> dict[str, float]:
        """Return the sums and reset them."""
        sums, self._sums = self._sums, Counter()
        return dict(sums)
