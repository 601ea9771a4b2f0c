"""Estimates that stay wrong whatever the fits learn, to test policies with them. Pure."""

import numpy as np
import numpy.typing as npt

from conductor.costs.book import CostBook, EngineCosts, Machine
from conductor.costs.prior import PrefillLine


class SkewedCosts(EngineCosts):
    """Costs that are off by a factor from what was fitted; only the lasting bias corrects it.

    Args:
        machine: its prior is used before anything was measured.
        factor: more than 0.
    """

    def __init__(self, machine: Machine, factor: float) -> None:
        assert factor > 0
        super().__init__(machine)
        self._factor = factor

    @property
    def prefill_line(self) -> PrefillLine:
        """What prompts are thought to take."""
        return PrefillLine(*(self._factor * one for one in super().prefill_line))

    def step_seconds(self, batch: float, context_tokens: float) -> float:
        """Seconds that a decode step is thought to take; see :class:`EngineCosts`."""
        return self._factor * super().step_seconds(batch, context_tokens)

    @property
    def step_factors(self) -> npt.NDArray[np.float64]:
        """Of the terms of a decode step; see :class:`EngineCosts`."""
        factors: npt.NDArray[np.float64] = self._factor * super().step_factors
        return factors


class SkewedBook(CostBook):
    """The costs of all engines, of which every other one seems slower, and those between faster.

    Args:
        skew: by which part estimates are off, 0 to less than 1: the estimates of the first engine
            that is asked for are ``1 + skew`` times the truth, the second's ``1 - skew`` times, and
            so on.
    """

    def __init__(self, skew: float) -> None:
        assert 0 <= skew < 1
        super().__init__()
        self._skew = skew
        self._skewed: dict[str, SkewedCosts] = {}

    def of(self, engine_id: str, machine: Machine) -> EngineCosts:
        """The costs of an engine."""
        known = self._skewed.get(engine_id)
        if known is None or known.machine != machine:
            sign = -1 if len(self._skewed) % 2 else 1
            known = self._skewed[engine_id] = SkewedCosts(machine, 1 + sign * self._skew)
        return known
