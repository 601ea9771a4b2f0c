"""Predicts how many tokens an answer will have, from those that have ended. Pure.

Means of observed lengths, from the general to the particular: all answers, those with a limit
(``max_tokens``) of this size, those of this tenant, those of this session. Each mean starts from
the one before it and gets more weight the more answers it has, as in a normal model with known
variance::

    estimate = (n * mean + PRIOR_WEIGHT * estimate before) / (n + PRIOR_WEIGHT)

A mean is exponential: a new answer never counts less than a fixed part of it. The number of
sessions and tenants is limited; those not seen for longest are removed first.
"""

from collections import OrderedDict
from typing import Final, TypeVar

import numpy as np

USUAL_TOKENS: Final = 256.0
"""Of an answer, before any has ended."""
_PRIOR_WEIGHT: Final = 4.0
"""Weight of the estimate before, in answers."""
_WEIGHT_MAX: Final = 256
_SESSION_WEIGHT_MAX: Final = 16
TENANTS_MAX: Final = 1024
SESSIONS_MAX: Final = 8192
TOKENS_MAX: Final = 1 << 24
"""An engine may say any number."""
_ERRORS_KEPT: Final = 256


Key = TypeVar("Key")


class _Mean:
    """A mean that forgets."""

    __slots__ = ("count", "mean")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0

    def add(self, value: float, weight_max: int) -> None:
        self.count = min(self.count + 1, weight_max)
        self.mean += (value - self.mean) / self.count

    def refine(self, estimate: float) -> float:
        return (self.count * self.mean + _PRIOR_WEIGHT * estimate) / (self.count + _PRIOR_WEIGHT)


class OutputLengths:
    """The observed lengths of answers."""

    def __init__(self) -> None:
        self._all = _Mean()
        self._limits: dict[int, _Mean] = {}  # by bits of the limit: at most 64
        self._tenants: OrderedDict[str, _Mean] = OrderedDict()
        self._sessions: OrderedDict[tuple[str, str], _Mean] = OrderedDict()
        self._errors = np.zeros(_ERRORS_KEPT, dtype=np.float64)
        self._lengths = np.zeros((2, _ERRORS_KEPT), dtype=np.float64)  # foretold, true
        self._seen = 0

    def predict(self, tenant: str, session: str, limit: int | None) -> float:
        """Tokens that an answer is expected to have, 1 to its limit.

        Args:
            tenant: on whose behalf; empty = unknown.
            session: conversation; empty = unknown.
            limit: ``max_tokens`` of the request; None = it has none.
        """
        estimate = self._all.refine(USUAL_TOKENS)
        for mean in (
            self._limits.get(_size(limit)),
            self._tenants.get(tenant) if tenant else None,
            self._sessions.get((tenant, session)) if session else None,
        ):
            if mean is not None:
                estimate = mean.refine(estimate)
        return max(1.0, min(estimate, limit if limit is not None else TOKENS_MAX))

    def learn(
        self, tenant: str, session: str, limit: int | None, predicted: float, tokens: int
    ) -> None:
        """An answer has ended.

        Args:
            tenant: as for :meth:`predict`.
            session: as for :meth:`predict`.
            limit: as for :meth:`predict`.
            predicted: the prediction when it arrived.
            tokens: its length; less than 1 is ignored.
        """
        if tokens < 1:
            return
        tokens = min(tokens, TOKENS_MAX)
        at = self._seen % _ERRORS_KEPT
        self._errors[at] = abs(predicted - tokens)
        self._lengths[:, at] = predicted, tokens
        self._seen += 1
        self._all.add(tokens, _WEIGHT_MAX)
        self._limits.setdefault(_size(limit), _Mean()).add(tokens, _WEIGHT_MAX)
        if tenant:
            _newest(self._tenants, tenant, TENANTS_MAX).add(tokens, _WEIGHT_MAX)
        if session:
            key = (tenant, session)
            _newest(self._sessions, key, SESSIONS_MAX).add(tokens, _SESSION_WEIGHT_MAX)

    def gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Errors of the newest 256 predictions, as metrics; nothing before the first."""
        kept = min(self._seen, _ERRORS_KEPT)
        if not kept:
            return {"output_tokens_error": {}, "output_tokens_bias": {}}
        foretold, true = self._lengths[:, :kept].sum(axis=1).tolist()
        return {
            "output_tokens_error": {
                (str(one),): float(np.quantile(self._errors[:kept], one)) for one in (0.5, 0.9)
            },
            "output_tokens_bias": {(): foretold / true},
        }

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._tenants) <= TENANTS_MAX
        assert len(self._sessions) <= SESSIONS_MAX


def _size(limit: int | None) -> int:
    return min(limit, TOKENS_MAX).bit_length() if limit is not None else -1


def _newest(means: OrderedDict[Key, _Mean], key: Key, most: int) -> _Mean:
    """The mean of a key, which is now the one that was seen last."""
    mean = means.setdefault(key, _Mean())
    means.move_to_end(key)
    if len(means) > most:
        means.popitem(last=False)
    return mean
