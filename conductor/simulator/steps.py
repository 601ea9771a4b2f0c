"""The true duration of an engine's steps; only the simulation knows it."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class StepTimes(Protocol):
    """What one engine's hardware needs for a model; seconds are those of the whole engine."""

    def prefill_seconds(self, new_tokens: float, prefix_tokens: float) -> float:
        """To compute tokens behind a prefix that is there."""
        ...

    def decode_step_seconds(self, batch: float, context_tokens: float) -> float:
        """Of one step that gives each of ``batch`` requests a token.

        Args:
            batch: requests, at least 1.
            context_tokens: tokens of all requests together.
        """
        ...


class Part(NamedTuple):
    """A prompt, or the rest of it: tokens to compute behind a prefix."""

    new: int
    prefix: int


class TrueSteps:
    """The step times of one engine, off by a factor from what the model of costs says."""

    def __init__(self, times: StepTimes, factor: float = 1.0) -> None:
        assert factor > 0
        self._times = times
        self._factor = factor

    def prompts(self, parts: Sequence[Part], steps: int, batch: int, context: int) -> float:
        """To compute prompts in ``steps`` steps, each of which gives a batch a token, too.

        Several prompts count as one with as many tokens and as much attention. The tokens of the
        batch are computed with the chunk; besides, each step reads their KV.

        Args:
            parts: at least one.
            steps: at least 1.
            batch: requests that decode meanwhile.
            context: tokens of all requests that decode, together.
        """
        new = sum(part.new for part in parts)
        attention = sum(part.new * (part.prefix + part.new / 2) for part in parts)
        prefix = max(0.0, attention / new - new / 2)
        seconds = self._times.prefill_seconds(new + steps * batch, prefix)
        if batch:
            decode = self._times.decode_step_seconds
            seconds += steps * max(0.0, decode(batch, context) - decode(batch, 0))
        return seconds * self._factor

    def decode(self, batch: int, context: float) -> float:
        """One step that gives a batch a token each."""
        return self._times.decode_step_seconds(batch, context) * self._factor
