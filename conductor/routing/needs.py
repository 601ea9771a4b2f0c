"""What the newest requests needed of the engines: who is overtaken, and how much. Pure."""

from bisect import bisect_left
from collections import OrderedDict, deque
from itertools import accumulate
from typing import Final

_NEWEST: Final = 256
"""Requests of one model whose needs are known."""
_KNOWN_MIN: Final = 8
"""With fewer, nobody is thought to be overtaken."""
_MODELS_MAX: Final = 64
"""Models, and LoRA adapters, of which something is known; those not asked for longest go first."""
_SPAN_S_MIN: Final = 1e-3


class RecentNeeds:
    """Seconds that the newest requests needed at the engine that needs the fewest, by model."""

    def __init__(self) -> None:
        """Start without any."""
        self._models: OrderedDict[str, deque[tuple[float, float]]] = OrderedDict()
        self._sums: dict[str, tuple[list[float], list[float]]] = {}

    def add(self, model: str, arrived: float, seconds: float) -> None:
        """A request that came at a time needs so many seconds; requests are added as they come."""
        if model not in self._models:
            self._models[model] = deque(maxlen=_NEWEST)
        self._models.move_to_end(model)
        self._models[model].append((arrived, seconds))
        self._sums.pop(model, None)
        if len(self._models) > _MODELS_MAX:
            gone, _ = self._models.popitem(last=False)
            self._sums.pop(gone, None)

    def less_than(self, model: str, seconds: float, now: float) -> float:
        """Seconds that those of a model need in one second which need less than so many each.

        0 if too few are known.
        """
        newest = self._models.get(model)
        if newest is None or len(newest) < _KNOWN_MIN:
            return 0.0
        if model not in self._sums:
            needs = sorted(one for _, one in newest)
            self._sums[model] = needs, [0.0, *accumulate(needs)]
        needs, sums = self._sums[model]
        span_s = max(_SPAN_S_MIN, now - newest[0][0])
        return sums[bisect_left(needs, seconds)] / span_s
