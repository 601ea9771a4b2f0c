"""The work of an engine for one request, and the delay that its answer tolerates. Pure."""

from dataclasses import dataclass
from typing import Final, NamedTuple

_LATE_S: Final = 1.0
"""A prompt that is overdue by this, and by as long as it should take, no longer holds others up."""
_LONGEST: Final = 0.1
"""The time between tokens of a request is the mean of this longest part of its intervals."""
_LONGEST_MIN: Final = 10.0
"""Intervals in it; shorter answers are over before many prompts come."""


@dataclass(slots=True)
class DecodingRequest:
    """A request that decodes.

    Attributes:
        tokens: tokens of the request's prompt.
        since: time at which it began to decode.
        batch_s: requests that decoded at the engine's slowest rank, multiplied by seconds, up to
            then.
        context_s: their tokens likewise.
        is_reported: whether the engine has reported that it began.
        bears_s: seconds of prompts after which it is late; 0 = none makes it so.
        stalled_s: seconds for which the engine had computed prompts then.
        rank: data-parallel rank to which it was sent; None = the engine chooses one, or has no
            others.
    """

    tokens: int
    since: float
    batch_s: float
    context_s: float
    is_reported: bool
    bears_s: float
    stalled_s: float
    rank: int | None = None


class ComingPrompt(NamedTuple):
    """A prompt that is computed elsewhere and decodes at an engine.

    Attributes:
        tokens: tokens of the prompt.
        moved: number of these tokens that the engine does not have.
    """

    tokens: int
    moved: int


@dataclass(slots=True)
class ComputingPrompt:
    """A prompt that an engine has.

    Attributes:
        new_tokens: tokens that the engine computes.
        prefix_tokens: tokens of the prompt before these.
        seconds: seconds that the prompt is expected to take, with the fetch.
        fetch_s: seconds until the fetch has ended, during which nothing else is computed there.
        got_at: time at which the engine got the prompt, and began to fetch.
        since: the same time; of a late prompt, the time since which it is expected to be computed.
        is_reported: whether the engine reports its first token.
    """

    new_tokens: int
    prefix_tokens: int
    seconds: float
    fetch_s: float
    got_at: float
    since: float
    is_reported: bool = True

    @property
    def counts_s(self) -> float:
        """Seconds after which it counts as computed, whatever we have heard."""
        return self.seconds + (max(_LATE_S, self.seconds) if self.is_reported else 0.0)


class Answer(NamedTuple):
    """What is expected of an answer.

    Attributes:
        tokens: tokens of the answer; 0 = nobody waits for one after the other.
        tbt_s: maximum seconds between two tokens, as the mean of the longest tenth.
    """

    tokens: float
    tbt_s: float

    def bears_s(self, step_s: float) -> float:
        """Seconds for which prompts may stall it before it is late, if steps take ``step_s``."""
        longest = max(_LONGEST_MIN, _LONGEST * self.tokens) if self.tokens else 0.0
        return longest * max(0.0, self.tbt_s - step_s)


NO_ANSWER: Final = Answer(0.0, 0.0)
"""Nothing makes it late."""
