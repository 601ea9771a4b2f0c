"""Which part of the newest requests is served within the objectives, as measured. Pure.

A request is late if its first token comes too late, if it waits for an engine for longer than that,
if it leaves without an answer, or if the mean time between its tokens is too long. Of a request
whose answer is not streamed only an end is known; it counts for nothing.
"""

from typing import Final

from conductor.routing.capacity import Targets

REQUESTS_KEPT: Final = 128
"""Newest requests that count."""


class _Seen:
    """A request: when it came and began, whether it has an engine, and whether it is in time."""

    __slots__ = ("assigned", "began", "came", "in_time")

    def __init__(self, came: float) -> None:
        self.came = came
        self.began: float | None = None
        self.assigned = False
        self.in_time: bool | None = None


class Attainment:
    """The newest requests of a model.

    Args:
        targets: their objectives.
    """

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._seen: dict[int, _Seen] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._seen

    def came(self, number: int, at: float) -> None:
        """A request waits; a second call does nothing."""
        if number not in self._seen:
            self._seen[number] = _Seen(at)
            if len(self._seen) > REQUESTS_KEPT:
                del self._seen[min(self._seen)]

    def assigned(self, number: int) -> None:
        """It has an engine."""
        self._seen[number].assigned = True

    def began(self, number: int, at: float) -> None:
        """It has its first token; a second call does nothing."""
        one = self._seen[number]
        if one.began is None:
            one.began = at
            one.in_time = at - one.came <= self._targets.ttft_s

    def ended(self, number: int, output_tokens: int, at: float) -> None:
        """It has all its tokens."""
        one = self._seen[number]
        if one.began is None:
            del self._seen[number]
        elif at - one.began > self._targets.tbt_s * max(1, output_tokens - 1):
            one.in_time = False

    def left(self, number: int) -> None:
        """It has ended, in whatever way."""
        one = self._seen[number]
        if one.began is None:
            one.in_time = False

    def part(self, since: float, now: float, least: int) -> float | None:
        """The part that is served in time.

        Args:
            since: only requests that came at this time, or later, count.
            now: time.
            least: with fewer that are known, None is returned.
        """
        late = now - self._targets.ttft_s
        found = [
            bool(one.in_time)
            for one in self._seen.values()
            if one.came >= since
            and (one.in_time is not None or (not one.assigned and one.came < late))
        ]
        return sum(found) / len(found) if len(found) >= least else None
