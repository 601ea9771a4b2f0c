"""The load of the last minutes: how many requests came, and what they needed. Pure."""

from collections import deque
from collections.abc import Collection
from typing import Final, NamedTuple

ARRIVALS_KEPT: Final = 4096
SAMPLES_KEPT: Final = 1024
SAMPLES_MAX: Final = 256
"""Of one model."""
WINDOW_S: Final = 300.0


class LoadSample(NamedTuple):
    """What one request needed, in tokens.

    Attributes:
        new: of its prompt, that were computed.
        prefix: of its prompt, before them.
        output: of its answer.
    """

    new: int
    prefix: int
    output: int


class LoadShape(NamedTuple):
    """The recent load.

    Attributes:
        rate: requests a second, those that were refused included.
        samples: the newest that have ended, served or not.
    """

    rate: float
    samples: tuple[LoadSample, ...]


class RecentLoad:
    """What came, and what has ended, of all models."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._arrivals: deque[tuple[float, str]] = deque(maxlen=ARRIVALS_KEPT)
        self._samples: deque[tuple[str, LoadSample]] = deque(maxlen=SAMPLES_KEPT)

    def came(self, model: str, at: float) -> None:
        """A request for a model has come."""
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
        kept = [(at, model) for at, model in self._arrivals if at > now - WINDOW_S]
        seconds = now - kept[0][0] if kept else 0.0
        count = sum(model in models for _, model in kept)
        samples = [sample for model, sample in self._samples if model in models]
        rate = count / seconds if seconds > 0 else 0.0
        return LoadShape(rate, tuple(samples[-SAMPLES_MAX:]))
