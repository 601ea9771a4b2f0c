"""Measures how fast an engine computes prompts. Pure."""

from dataclasses import dataclass
from typing import Final

from kvstore.engine.fit import OnlineFit

MEASURED_TOKENS_MIN: Final = 32
"""Steps with fewer tokens are ignored."""
REPORT_S: Final = 1.0
"""Seconds between reports of the measured seconds per token to the node."""
STEPS_MAX: Final = 64
"""Maximum begun steps that wait for their report; an engine starts a few ahead."""
_WEIGHT: Final = 0.3
_BUDGET_FADE: Final = 0.98


class Pace:
    """The speed of prefill: an average, and what it depends on.

    A step takes a constant, a factor for its tokens, and one for the pairs of a token and one
    before it (attention): all fitted.

    Attributes:
        seconds_per_token: seconds per token of prefill; 0.0 while unknown.
        step_tokens: tokens of the largest recent step.
    """

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        self._fit = OnlineFit((0.0, 1.0, 0.0))
        self.step_tokens = 0.0
        self._report_at = 0.0

    def note_step(self, tokens: int, seconds: float, pairs: float = 0.0) -> bool:
        """Measure a step.

        Args:
            tokens: number of computed tokens.
            seconds: duration of the step in seconds.
            pairs: the number of tokens before each of its tokens, added up.

        Returns:
            False if it was ignored.
        """
        if tokens < MEASURED_TOKENS_MIN or seconds <= 0:
            return False
        known, now = self.seconds_per_token, seconds / tokens
        self.seconds_per_token = known + _WEIGHT * (now - known) if known else now
        self._fit.note((1.0, float(tokens), pairs), seconds)
        self.step_tokens = max(float(tokens), self.step_tokens * _BUDGET_FADE)
        return True

    def recompute_s(self, tokens: int, before: int = 0) -> float:
        """Estimated seconds to compute ``tokens``; infinite while unknown.

        Args:
            tokens: number of tokens, computed in steps as large as the largest recent step.
            before: number of tokens of the prompt before these tokens.
        """
        if not self.seconds_per_token:
            return float("inf")
        if tokens <= 0:
            return 0.0
        if not self._fit.is_known:
            return tokens * self.seconds_per_token
        steps = max(1.0, tokens / self.step_tokens)
        return self._fit.seconds((steps, float(tokens), pairs_of(tokens, before)))

    def wait_s(self, tokens: int, shortest_s: float, longest_s: float) -> float:
        """Maximum seconds to wait for ``tokens``: the time to compute them, within the limits."""
        return min(longest_s, max(shortest_s, self.recompute_s(tokens)))

    def report_due(self, now: float) -> bool:
        """Whether to report ``seconds_per_token`` to the node now."""
        if now < self._report_at:
            return False
        self._report_at = now + REPORT_S
        return True


@dataclass(slots=True)
class _BegunStep:
    tokens: int
    began: float
    pairs: float = 0.0


class MeasuredSteps:
    """The steps of prefill that an engine has begun, whose durations are its pace.

    An engine may begin steps before earlier ones are reported (asynchronous scheduling, pipeline
    stages). It computes one after the other: a step takes from the report of the step before it, if
    it began earlier, to its own.

    Args:
        pace: measured by each step.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._begun: dict[int, _BegunStep] = {}
        self._newest = _BegunStep(0, 0.0)
        self._last = 0
        self._reported_at = float("-inf")

    def begins(self, tokens: int, now: float) -> int:
        """A step begins.

        Args:
            tokens: of prefill that it computes; 0 = it measures nothing.
            now: monotonic seconds.

        Returns:
            The number that its report must have; 0 = it is no measure.
        """
        self._newest = _BegunStep(tokens, now)
        if tokens < MEASURED_TOKENS_MIN:
            return 0
        self._last += 1
        self._begun[self._last] = self._newest
        self._begun.pop(self._last - STEPS_MAX, None)
        return self._last

    def attends(self, pairs: float) -> None:
        """Of a request the newest step computes these; see :func:`pairs_of`."""
        self._newest.pairs += pairs

    def reported(self, number: int, now: float) -> bool:
        """A step is reported, with the number it began with, if any; whether it was a measure."""
        before, self._reported_at = self._reported_at, now
        step = self._begun.pop(number, None)
        if step is None:
            return False
        # Steps are reported in their order: nobody reports those before it any more.
        self._begun = {later: one for later, one in self._begun.items() if later > number}
        return self._pace.note_step(step.tokens, now - max(step.began, before), step.pairs)


def pairs_of(tokens: int, before: int) -> float:
    """Pairs of one of ``tokens`` and an earlier token; ``before`` tokens precede them."""
    return tokens * (before + tokens / 2)
