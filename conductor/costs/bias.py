"""How far the estimates of an engine are off for good, whatever the fit has learned. Pure.

A fit has few terms, and takes an outlier for a usual error. Where the terms do not fit an engine
(other clients use it, its card is throttled for long prompts), or where outliers are the rule, its
estimates stay too low or too high. This factor follows what measured seconds are of estimated ones,
it included, so it ends where both are equal in the mean.
"""

from typing import Final

_WEIGHT: Final = 0.1
"""Of the newest measurement."""
_OFF_MAX: Final = 0.5
"""One that is further off counts as if it were so far: a pause of the engine is no bias."""
_FACTOR_MIN, _FACTOR_MAX = 1 / 3, 3.0


class LastingBias:
    """The bias of one kind of estimates of one engine.

    Attributes:
        factor: by which they are multiplied, a third to three.
    """

    def __init__(self) -> None:
        """Start without bias."""
        self.factor = 1.0

    def observe(self, thought_s: float, seconds: float) -> None:
        """Learn from one measurement; what cannot be one (0 or less, not finite) is ignored.

        Args:
            thought_s: what was estimated, with the factor.
            seconds: what was measured.
        """
        if 0.0 < thought_s < float("inf") and 0.0 < seconds < float("inf"):
            off = min(_OFF_MAX, max(-_OFF_MAX, seconds / thought_s - 1.0))
            self.restore(min(_FACTOR_MAX, max(_FACTOR_MIN, self.factor * (1.0 + _WEIGHT * off))))

    def restore(self, factor: float) -> bool:
        """Go on with this factor; False if it cannot be one."""
        if not _FACTOR_MIN <= factor <= _FACTOR_MAX:
            return False
        self.factor = factor
        return True
