"""How long loads of pages take: measured per tier, with the other loads in flight. Pure."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from kvstore.engine.fit import OnlineFit

TIERS: Final = ("host", "ssd", "remote")
"""In the assumed order of the pages of a hit: the first ones in the node's memory, then those on
its disk, and last those at other nodes."""
_LEFT_MIN: Final = 0.2
"""Minimum share assumed to be left of an unfinished load, however long it has taken."""
_LATE: Final = 2.0
"""A load that was given up counts as this multiple of the time until then. Requests wait as long as
computing takes; counted as that, a load would not seem slower."""

STUCK_S: Final = 30.0
"""A load whose request stopped waiting this long ago may never end: it no longer counts."""


class TierPart(NamedTuple):
    """The pages of a hit in one tier.

    Attributes:
        tier: one of :data:`TIERS`.
        pages: number of pages.
        work: work per page: its bytes; at other nodes, the seconds that the node expects for it
            (the node knows over which link it comes).
        guess_s: the node's estimate of seconds per page; used until loads were measured.
    """

    tier: str
    pages: int
    work: float
    guess_s: float


class _Flight(NamedTuple):
    """An unfinished load.

    Attributes:
        terms: terms of the fit, for each tier of the load.
        expected: expected seconds, for each tier of the load.
    """

    began: float
    terms: Mapping[str, tuple[float, float, float]]
    expected: Mapping[str, float]

    @property
    def expected_s(self) -> float:
        return sum(self.expected.values())

    def left(self, now: float) -> float:
        """The approximate share that is still to come."""
        passed = (now - self.began) / self.expected_s if self.expected_s > 0 else 1.0
        return max(_LEFT_MIN, 1.0 - passed)


class LoadEnd(NamedTuple):
    """The measured and the expected duration of a load, in seconds."""

    expected_s: float
    seconds: float


class LoadCosts:
    """Expected seconds of loads, and the loads in flight.

    For each tier the seconds are a constant, a factor for the load's own work and one for the work
    in flight when it starts. All three are fitted: a tier that serves one load after the other gets
    the same factor for both, one that serves many at once gets 0 for the others' work.
    """

    def __init__(self) -> None:
        self._fits = {tier: OnlineFit((0.0, 1.0, 1.0)) for tier in TIERS}
        self._flights: dict[int, _Flight] = {}
        self._stuck: dict[int, _Flight] = {}
        self._late: dict[int, float] = {}  # job in flight → when its request stopped waiting
        self._any_ends = True

    @property
    def in_flight(self) -> int:
        """Unfinished loads that are not given up."""
        return len(self._flights)

    def in_flight_of(self, tier: str) -> int:
        """Those that read from a tier."""
        return sum(tier in flight.terms for flight in self._flights.values())

    @property
    def stuck(self) -> int:
        """Loads that were given up and have not ended; they still hold their blocks."""
        return len(self._stuck)

    @property
    def any_ends(self) -> bool:
        """Whether a load has ended since a request last stopped waiting for one."""
        return self._any_ends

    def give_up(self, now: float) -> int:
        """Give up the loads that may never end; returns their number."""
        found = [job for job, since in self._late.items() if now - since >= STUCK_S]
        for job in found:
            del self._late[job]
            self._stuck[job] = self._flights.pop(job)
        return len(found)

    def is_known(self, tier: str) -> bool:
        """Whether enough loads of a tier were measured."""
        return self._fits[tier].is_known

    def ahead(self, tier: str, now: float) -> float:
        """The remaining work in flight in a tier."""
        return sum(
            flight.terms[tier][1] * flight.left(now)
            for flight in self._flights.values()
            if tier in flight.terms
        )

    def seconds(self, part: TierPart, pages: float, ahead: float) -> float:
        """Expected seconds for the first ``pages`` of a part, with ``ahead`` in flight."""
        if pages <= 0:
            return 0.0
        fit = self._fits[part.tier]
        if fit.is_known:
            return fit.seconds((1.0, pages * part.work, ahead))
        # Others are ahead until it is known that they do not matter.
        return part.guess_s * (pages + (ahead / part.work if part.work else 0.0))

    def began(self, job: int, parts: Mapping[TierPart, int], now: float) -> None:
        """A load starts.

        Args:
            job: number of the job.
            parts: number of pages of each part that the job loads.
            now: monotonic seconds.
        """
        terms: dict[str, tuple[float, float, float]] = {}
        expected: dict[str, float] = {}
        for part, pages in parts.items():
            if pages:
                ahead = self.ahead(part.tier, now)
                terms[part.tier] = (1.0, pages * part.work, ahead)
                expected[part.tier] = self.seconds(part, pages, ahead)
        self._flights[job] = _Flight(now, terms, expected)

    def late(self, job: int, now: float) -> None:
        """The request of a load has stopped waiting for it: it takes longer than until now."""
        flight = self._flights.get(job)
        if flight is None:
            return
        self._late.setdefault(job, now)
        self._any_ends = False
        if _LATE * (now - flight.began) > flight.expected_s:
            self._learn(flight, _LATE * (now - flight.began))

    def ended(self, job: int, seconds: float, *, whole: bool) -> LoadEnd | None:
        """A load has ended.

        Args:
            job: number of the job; an unknown one is ignored.
            seconds: seconds from the job's submission to its end; 0.0 = not measured.
            whole: all pages were loaded. Otherwise nothing is learned: a failure takes any time.

        Returns:
            The measurement; None if there is none.
        """
        flight = self._flights.pop(job, None) or self._stuck.pop(job, None)
        self._late.pop(job, None)
        self._any_ends = self._any_ends or flight is not None
        if flight is None or not whole or seconds <= 0:
            return None
        self._learn(flight, seconds)
        return LoadEnd(flight.expected_s, seconds)

    def _learn(self, flight: _Flight, seconds: float) -> None:
        """Attribute to the slowest tier of a load the time that the others do not explain."""
        last_first = [tier for tier in reversed(TIERS) if tier in flight.expected]
        slowest = max(last_first, key=flight.expected.__getitem__, default=None)
        if slowest is None or not flight.terms[slowest][1]:
            return
        others = flight.expected_s - flight.expected[slowest]
        self._fits[slowest].note(flight.terms[slowest], max(seconds - others, 0.1 * seconds))
