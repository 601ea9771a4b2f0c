"""Which part of the newest requests is served within the objectives, as measured. Pure.

A request is late if its first token comes too late, if it waits for an engine for longer than that,
if it leaves without an answer, or if the mean time between its tokens is too long. Of a request
whose answer is not streamed only an end is known; it counts for nothing. Of a stream whose client
reads slowly only a late first token counts.
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
    """The newest requests of each model; a request that is not among them is ignored.

    Args:
        targets: objectives of the requests.

    Attributes:
        targets: the objectives.
    """

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self._models: dict[str, dict[int, _Seen]] = {}

    def _of(self, number: int) -> dict[int, _Seen]:
        """Those among which a request is; none if it is nowhere."""
        return next((seen for seen in self._models.values() if number in seen), {})

    def came(self, model: str, number: int, at: float) -> None:
        """A request waits; a second call does nothing."""
        seen = self._models.setdefault(model, {})
        if number not in seen:
            seen[number] = _Seen(at)
            if len(seen) > REQUESTS_KEPT:
                del seen[min(seen)]

    def assigned(self, number: int) -> None:
        """It has an engine."""
        one = self._of(number).get(number)
        if one is not None:
            one.assigned = True

    def began(self, number: int, at: float) -> None:
        """It has its first token; a second call does nothing."""
        one = self._of(number).get(number)
        if one is not None and one.began is None:
            one.began = at
            one.in_time = at - one.came <= self.targets.ttft_s

    def ended(
        self, number: int, output_tokens: int, at: float, *, read_slowly: bool = False
    ) -> None:
        """It has all its tokens; ``read_slowly``: its client says how long they took."""
        seen = self._of(number)
        one = seen.get(number)
        if one is None:
            return
        if one.began is None or (read_slowly and one.in_time):
            del seen[number]
        elif at - one.began > self.targets.tbt_s * max(1, output_tokens - 1):
            one.in_time = False

    def left(self, number: int) -> None:
        """It has ended, in whatever way."""
        one = self._of(number).get(number)
        if one is not None and one.began is None:
            one.in_time = False

    def forget(self, model: str) -> None:
        """A model has no engines any more."""
        self._models.pop(model, None)

    def part(self, model: str, since: float, now: float, least: int) -> float | None:
        """The part of the requests for a model that is served in time.

        Args:
            model: model of the engines.
            since: only requests that came at this time, or later, count.
            now: time.
            least: with fewer that are known, None is returned.
        """
        late = now - self.targets.ttft_s
        found = [
            bool(one.in_time)
            for one in self._models.get(model, {}).values()
            if one.came >= since
            and (one.in_time is not None or (not one.assigned and one.came < late))
        ]
        return sum(found) / len(found) if len(found) >= least else None
