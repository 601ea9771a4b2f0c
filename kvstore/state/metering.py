"""A node's own measurements: latencies, and the tiers in which lookups found pages.

Callers with a clock pass times in nanoseconds. Both are bounded: buckets are fixed, and only the
first models are counted separately, because clients choose their names.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from kvstore.protocol.counts import Latency, Lookups
from kvstore.protocol.page import KEY_BYTES

BOUNDS_S: Final[tuple[float, ...]] = (
    0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0,
    2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of a histogram's buckets; a last one has what took longer."""
_BOUNDS_NS: Final = tuple(round(bound * 1e9) for bound in BOUNDS_S)
_FIRST_NS: Final = 50_000
"""The first of them, below which most durations are."""
MODELS_MAX: Final = 32
"""Maximum models whose lookups are counted separately."""
OTHER: Final = "other"
"""The name for all further models."""
MODEL_CHARACTERS_MAX: Final = 128
LATENCIES: Final = ("lookup", "acquire", "put", "wait", "disk_load", "peer_fetch", "loop_turn")


class Histogram:
    """A histogram of durations.

    Attributes:
        counts: of each bucket of :data:`BOUNDS_S`, and of longer durations.
        sum_ns: sum of all durations.
    """

    __slots__ = ("counts", "sum_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS_NS) + 1)
        self.sum_ns = 0

    def observe(self, took_ns: int) -> None:
        """Count one duration."""
        self.counts[bisect_left(_BOUNDS_NS, took_ns) if took_ns > _FIRST_NS else 0] += 1
        self.sum_ns += took_ns

    def stats(self) -> Latency:
        """A snapshot."""
        return Latency(count=sum(self.counts), sum_s=self.sum_ns / 1e9, buckets=self.counts.copy())


@dataclass(slots=True)
class ModelLookups:
    """Keys in lookups of one model, by the tier in which they were found."""

    model: str
    host_pages: int = 0
    ssd_pages: int = 0
    missed_pages: int = 0


class Meter:
    """The measures of one node.

    Attributes:
        lookup: from a lookup's arrival to its answer.
        acquire: from an acquire's arrival to its answer.
        put: from the grant of a put's slots to its commit.
        wait: from arrival to answer of requests that had to wait.
        disk_load: from the decision to read a page from disk until it is READY in memory.
        peer_fetch: from the decision to read pages from a peer until they are READY.
        loop_turn: how long one message, deadline or completion delayed all others.
    """

    def __init__(self) -> None:
        self.lookup, self.acquire, self.put = Histogram(), Histogram(), Histogram()
        self.wait, self.disk_load, self.loop_turn = Histogram(), Histogram(), Histogram()
        self.peer_fetch = Histogram()
        #: The longest recent turn in nanoseconds, and its request, or a description.
        self._longest: tuple[int, object] = (0, "")
        self._models: dict[str, ModelLookups] = {}

    def note_turn(self, took_ns: int, what: object) -> None:
        """Record the duration of a turn, which blocks all others; ``what``: request, or words."""
        self.loop_turn.observe(took_ns)
        if took_ns > self._longest[0]:
            self._longest = took_ns, what

    def take_longest(self) -> tuple[int, str]:
        """The longest turn since the last call, in nanoseconds, and what it did."""
        (took_ns, what), self._longest = self._longest, (0, "")
        keys = len(getattr(what, "keys", b"")) // KEY_BYTES
        name = what if isinstance(what, str) else type(what).__name__
        return took_ns, f"{name} of {keys} keys" if keys else name

    def found(self, model: str, host: int, ssd: int, missed: int) -> None:
        """Count the keys of an answered lookup: in memory, on disk, missed."""
        name = model[:MODEL_CHARACTERS_MAX]
        if name not in self._models and len(self._models) >= MODELS_MAX:
            name = OTHER
        found = self._models.get(name)
        if found is None:
            found = self._models[name] = ModelLookups(name)
        found.host_pages += host
        found.ssd_pages += ssd
        found.missed_pages += missed

    def latencies(self) -> dict[str, Latency]:
        """A snapshot of each histogram."""
        return {name: getattr(self, name).stats() for name in LATENCIES}

    def lookups(self) -> list[Lookups]:
        """Keys in answered lookups, for each model."""
        return [
            Lookups(
                model=one.model, host_pages=one.host_pages, ssd_pages=one.ssd_pages,
                missed_pages=one.missed_pages,
            )
            for one in self._models.values()
        ]  # fmt: skip
