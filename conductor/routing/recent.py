"""The load of the last minutes: arrivals, and their needs. Pure."""

from collections import deque
from collections.abc import Collection
from typing import Final, NamedTuple

ARRIVALS_KEPT: Final = 4096
SAMPLES_KEPT: Final = 1024
SAMPLES_MAX: Final = 256
"""Of one model."""
WINDOW_S: Final = 300.0
SPAN_S_MIN: Final = 15.0
"""A rate is never taken over less: the first request of a day is no flood."""


class LoadSample(NamedTuple):
    """The needs of one request, in tokens.

    Attributes:
        new: computed tokens of its prompt.
        prefix: tokens of its prompt before them.
        output: of its answer.
    """

    new: int
    prefix: int
    output: int


class LoadShape(NamedTuple):
    """The recent load.

    Attributes:
        rate: requests a second, those that admission refused included.
        samples: the newest that have ended, served or not.
    """

    rate: float
    samples: tuple[LoadSample, ...]


class RecentLoad:
    """Recent arrivals and ended requests, of all models."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, str]] = deque(maxlen=ARRIVALS_KEPT)
        self._begun: float | None = None
        self._samples: deque[tuple[str, LoadSample]] = deque(maxlen=SAMPLES_KEPT)

    def came(self, model: str, at: float) -> None:
        """A request for a model has arrived."""
        if self._begun is None:
            self._begun = at
        self._arrivals.append((at, model))

    def ended(self, model: str, sample: LoadSample) -> None:
        """A request for a model has ended, served or not."""
        self._samples.append((model, sample))

    def shape(self, models: Collection[str], now: float) -> LoadShape:
        """The load of the last :data:`WINDOW_S`, or of the newest :data:`ARRIVALS_KEPT`.

        Args:
            models: names that count: of a model, and of its LoRA adapters.
            now: time.
        """
        first = max(self._begun if self._begun is not None else now, now - WINDOW_S)
        if len(self._arrivals) == ARRIVALS_KEPT:  # older ones were dropped
            first = max(first, self._arrivals[0][0])
        count = sum(model in models for at, model in self._arrivals if at >= first)
        samples = [sample for model, sample in self._samples if model in models]
        rate = count / max(now - first, SPAN_S_MIN)
        return LoadShape(rate, tuple(samples[-SAMPLES_MAX:]))
