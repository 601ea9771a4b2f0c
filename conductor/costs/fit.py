"""Fits a sum of a few terms to measured seconds, as they come. Pure.

Recursive least squares of relative errors. Each term is in seconds and starts with the factor 1, so
that without measurements the prior holds; the first covariance says how far it may be off. Each
measurement is forgotten slowly, so that a change of the engine is learned; the covariance never
exceeds its first value, so that terms that are never seen keep the prior. An outlier (a pause of
the engine, a queue that nobody knew) moves the factors no more than a usual error does.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

_OFF: Final = 0.5
"""Usual relative error of the prior."""
_NOISE: Final = 0.15
"""Usual relative error of one measurement."""
_FORGET: Final = 0.99
_OUTLIER: Final = 3.0
"""Errors of more than so many usual ones count as if they were so many."""
_SPREAD_STEP: Final = 1.1
"""It grows with a larger error and shrinks with a smaller one, so that half of all are larger."""
_SPREAD_MIN, _SPREAD_MAX = 0.02, 10.0
_FACTOR_MIN, _FACTOR_MAX = 0.02, 50.0
_ERRORS_KEPT: Final = 256


class FitState(msgspec.Struct, frozen=True):
    """What is kept of a fit over restarts.

    Attributes:
        factors: of the terms.
        covariance: of the factors, row by row.
        spread: median relative error.
        count: measurements.
    """

    factors: list[float]
    covariance: list[float]
    spread: float
    count: int


class RobustFit:
    """Factors of a few terms.

    Attributes:
        factors: the present ones; float64 [terms]; replaced, never changed in place.
        count: measurements so far, those before a restart included.
    """

    def __init__(self, terms: int) -> None:
        self.factors = np.ones(terms)
        self.count = 0
        self._terms = terms
        self._seen = 0  # of these, since the start
        self._covariance = np.eye(terms) * _OFF**2
        self._spread = _OFF
        self._errors = np.zeros(_ERRORS_KEPT, dtype=np.float32)

    def seconds(self, terms: Sequence[float]) -> float:
        """The estimate for these terms."""
        total = 0.0
        for factor, term in zip(self.factors.tolist(), terms, strict=True):
            total += factor * term
        return total

    def observe(self, terms: Sequence[float], seconds: float) -> None:
        """Learn from one measurement; what cannot be one (0 or less, not finite) is ignored."""
        prior_s = sum(terms)
        if not (0.0 < seconds < np.inf) or not (0.0 < prior_s < np.inf):
            return
        error = (seconds - self.seconds(terms)) / seconds
        self._errors[self._seen % _ERRORS_KEPT] = min(abs(error), 1e3)
        self._seen += 1
        self.count += 1
        share = np.array(terms) / prior_s
        off = (seconds - self.seconds(terms)) / prior_s
        bound = _OUTLIER * self._spread
        larger = abs(off) > self._spread
        self._spread *= _SPREAD_STEP if larger else 1 / _SPREAD_STEP
        self._spread = min(_SPREAD_MAX, max(_SPREAD_MIN, self._spread))
        wide = self._covariance / _FORGET
        if np.trace(wide) > self._terms * _OFF**2:
            wide = self._covariance
        gain = wide @ share / (_NOISE**2 + float(share @ wide @ share))
        moved = self.factors + gain * min(bound, max(-bound, off))
        self.factors = np.clip(moved, _FACTOR_MIN, _FACTOR_MAX)
        narrow = wide - np.outer(gain, share @ wide)
        self._covariance = (narrow + narrow.T) / 2

    def error(self, quantile: float) -> float | None:
        """Relative error of estimates before they were learned from; None without any."""
        kept = min(self._seen, _ERRORS_KEPT)
        return float(np.quantile(self._errors[:kept], quantile)) if kept else None

    def state(self) -> FitState:
        """What :meth:`restore` needs."""
        return FitState(
            self.factors.tolist(), self._covariance.ravel().tolist(), self._spread, self.count
        )

    def restore(self, state: FitState) -> bool:
        """Go on where another left off; False if that cannot be such a state.

        Its errors are not kept: they say how good estimates are now.
        """
        if not _can_be(state, self._terms):
            return False
        self.factors = np.array(state.factors)
        self._covariance = np.array(state.covariance).reshape(self._terms, self._terms)
        self._spread, self.count = state.spread, state.count
        return True


def _can_be(state: FitState, terms: int) -> bool:
    """Whether a fit of so many terms could have left this state."""
    numbers = np.array([*state.factors, *state.covariance, state.spread], dtype=np.float64)
    if len(state.factors) != terms or len(state.covariance) != terms**2:
        return False
    if not np.isfinite(numbers).all() or state.count < 0:
        return False
    covariance = np.array(state.covariance).reshape(terms, terms)
    return bool(
        np.allclose(covariance, covariance.T)
        and np.linalg.eigvalsh(covariance).min() >= -1e-9
        and np.trace(covariance) <= 2 * terms * _OFF**2
        and _FACTOR_MIN <= min(state.factors) <= max(state.factors) <= _FACTOR_MAX
        and _SPREAD_MIN <= state.spread <= _SPREAD_MAX
    )
