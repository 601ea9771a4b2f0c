"""Short prompts that an engine computes in one step share what each step costs. Pure.

A prompt has a constant, and takes at least as long as the weights are read. Several that fit into
one step have both once. So an engine that is busy gets short prompts for its next step until that
is full: one after another, they would take it twice as long.
"""

from typing import Final, NamedTuple

import numpy as np

from conductor.costs.prior import PrefillLine
from conductor.routing.columns import Column, CostInputs, StepColumns
from conductor.routing.groups import Rows
from kvstore.index.layout import Flags

STEP_TOKENS: Final = 2048
"""Tokens of prompts that every engine is thought to compute in one step; vLLM's default for small
accelerators. With so many the constant of a step is a few percent of its time."""


class PromptSteps(NamedTuple):
    """Seconds of the prompts that an engine has, computed in order and short ones together.

    Attributes:
        first_s: of the first step, which has begun.
        total_s: of all steps, the first one whole.
        last_s: of the last step; 0 = it has begun, or there is none.
        last_tokens: tokens of prompts that it computes.
        last_prompts: of how many prompts these are.
    """

    first_s: float = 0.0
    total_s: float = 0.0
    last_s: float = 0.0
    last_tokens: int = 0
    last_prompts: int = 0


def shared_s(line: PrefillLine, before: float, new_tokens: float) -> float:
    """Seconds by which a prompt takes less because its step computes ``before`` tokens anyway."""
    together = max(line.floor_s, line.token_s * (before + new_tokens))
    alone = max(line.floor_s, line.token_s * before)
    own = max(line.floor_s, line.token_s * new_tokens)
    return line.constant_s + own + alone - together


class LastSteps:
    """The last step of each engine that has not begun: the next prompt may be computed with it.

    Args:
        steps: at the beginning; copied.

    Attributes:
        seconds, tokens, prompts: of each; see :class:`~conductor.routing.columns.StepColumns`.
        may_be_open: False if no prompt fits into any of them.
    """

    def __init__(self, steps: StepColumns) -> None:
        self.seconds, self.tokens, self.prompts = (column.copy() for column in steps)
        # Tokens of prompts that each has room for; negative = there is none, or it is too full.
        self._room = np.where(steps.tokens > 0, STEP_TOKENS - steps.tokens, -1.0)
        self.may_be_open = bool((self._room > 0).any())

    def add(self, row: int, seconds: float, new_tokens: float, *, begins: bool) -> None:
        """An engine gets a prompt.

        Args:
            row: of the engine.
            seconds: that it takes there, behind the others.
            new_tokens: that are computed.
            begins: whether the engine has no other prompts, so that it begins at once.
        """
        if begins:
            return
        if self._room[row] < new_tokens:
            self.close(row)
        self.seconds[row] += seconds
        self.tokens[row] += new_tokens
        self._room[row] = STEP_TOKENS - self.tokens[row] if self.tokens[row] else -1.0
        self.prompts[row] += 1.0
        self.may_be_open = self.may_be_open or new_tokens < STEP_TOKENS

    def close(self, rows: Rows | int) -> None:
        """Other prompts come before the next ones of some engines."""
        self.seconds[rows] = self.tokens[rows] = self.prompts[rows] = 0.0
        self._room[rows] = -1.0

    def left(self, rows: Rows) -> Column:
        """Tokens of prompts that these steps have room for; 0 where there is none."""
        left: Column = np.maximum(self._room.take(rows), 0.0)
        return left

    def shared_s(
        self, rows: Rows, new_tokens: Column, alone_s: Column, costs: CostInputs[Column]
    ) -> Column | None:
        """How many seconds less a prompt takes at each of some engines; None = at none.

        See :func:`shared_s`.

        Args:
            rows: of the engines.
            new_tokens: that each of them computes.
            alone_s: seconds of a step with these alone, but for attention.
            costs: of these engines.
        """
        fits: Flags = new_tokens <= self._room.take(rows)
        if not np.count_nonzero(fits):
            return None
        before, floor_s, token_s = self.tokens.take(rows), costs.floor_s, costs.token_s
        together = np.maximum(floor_s, token_s * (before + new_tokens))
        others = np.maximum(floor_s, token_s * before)
        seconds: Column = np.where(fits, alone_s + others - together, 0.0)
        return seconds
