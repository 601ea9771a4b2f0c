"""Corrects estimates of an engine that stay too low or too high after the fit. Pure.

A fit has few terms and limits the weight of outliers. If the terms do not describe an engine (other
clients use it, its card is throttled for long prompts), or if outliers are frequent, its estimates
keep a bias. A factor is raised while measurements exceed the corrected estimates, and lowered while
they are less, so that their mean ratio tends to 1.
"""

from typing import Final

_WEIGHT: Final = 0.1
"""Of the newest measurement."""
_OFF_MAX: Final = 0.5
"""Maximum relative error that counts: a pause of the engine is no bias."""
_FACTOR_MIN, _FACTOR_MAX = 1 / 3, 3.0


class LastingBias:
    """The bias of one kind of estimates of one engine.

    Attributes:
        factor: by which the estimates are multiplied, 1/3 to 3.
    """

    def __init__(self) -> None:
        self.factor = 1.0

    def observe(self, thought_s: float, seconds: float) -> None:
        """Learn from one measurement; values that are not positive and finite are ignored.

        Args:
            thought_s: estimate, the factor included.
            seconds: measured.
        """
        if 0.0 < thought_s < float("inf") and 0.0 < seconds < float("inf"):
            off = min(_OFF_MAX, max(-_OFF_MAX, seconds / thought_s - 1.0))
            self.restore(min(_FACTOR_MAX, max(_FACTOR_MIN, self.factor * (1.0 + _WEIGHT * off))))

    def restore(self, factor: float) -> bool:
        """Set the factor; False, and unchanged, if it is out of range."""
        if not _FACTOR_MIN <= factor <= _FACTOR_MAX:
            return False
        self.factor = factor
        return True
