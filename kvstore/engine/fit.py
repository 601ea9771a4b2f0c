"""A small running fit: seconds as a sum of terms, from measurements that may be wrong. Pure."""

from collections.abc import Sequence
from operator import mul
from typing import Final

SAMPLES_MIN: Final = 3
"""Samples after which a fit is used."""
_FADE: Final = 0.85
"""Weight of a sample relative to the next one: a change is adopted after about six."""
_RIDGE: Final = 0.03
"""How strongly the terms are drawn towards proportionality if the samples do not separate them."""
_CLIP: Final = 4.0
"""A sample beyond this multiple of the expected value, in either direction, counts as this
multiple: one outlier moves the fit little. The second one in a row on the same side is accepted,
and all earlier samples are discarded."""
_TERM_MIN: Final = 1e-9
_TERM_MAX: Final = 1e15
_SOLVE_AFTER: Final = 4
"""Samples after which a new one triggers a new solution; a query always does."""


class OnlineFit:
    """Least squares over the last samples, errors relative to the expected seconds.

    The expected seconds are the sum of ``terms[i] * factor[i]``. Term 0 is a constant, 1 for each
    sample. No factor is below 0. Its state is a few sums, regardless of the number of samples.

    Args:
        shares: for each term its factor relative to the others', if the samples do not say.

    Attributes:
        samples: number of samples.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        terms = len(shares)
        assert shares[0] == 0.0, shares
        self.samples = 0
        self._shares = tuple(shares)
        self._sides = [[0.0] * terms for _ in range(terms)]
        self._right = [0.0] * terms
        self._work = 0.0
        self._seconds = 0.0
        self._factors = [0.0] * terms
        self._unsolved = 0
        self._strange = 0

    @property
    def is_known(self) -> bool:
        """Whether there were enough samples."""
        return self.samples >= SAMPLES_MIN

    def note(self, terms: Sequence[float], seconds: float) -> None:
        """Add a sample.

        Args:
            terms: the first is 1; none is below 0, and one after the first is above.
            seconds: the measured duration, above 0.
        """
        assert terms[0] == 1.0, terms
        assert len(terms) == len(self._right)
        assert seconds > 0, seconds
        expected = seconds
        if self.is_known:
            if self._unsolved >= _SOLVE_AFTER:
                self._solve()
            expected = max(self._sum(terms), 1e-9)
            strange = (seconds > expected * _CLIP) - (seconds < expected / _CLIP)
            if strange and strange == self._strange:
                self._forget()
                expected = seconds
            seconds = min(max(seconds, expected / _CLIP), expected * _CLIP)
            self._strange = strange
        weight = 1.0 / (expected * expected)
        terms = [min(term, _TERM_MAX) if term >= _TERM_MIN else 0.0 for term in terms]
        for row, left in zip(self._sides, terms, strict=True):
            for place, right in enumerate(terms):
                row[place] = row[place] * _FADE + weight * left * right
        self._right = [
            old * _FADE + weight * left * seconds
            for old, left in zip(self._right, terms, strict=True)
        ]
        work = float(sum(map(mul, terms, self._shares)))
        self._work = self._work * _FADE + work / expected
        self._seconds = self._seconds * _FADE + seconds / expected
        self.samples += 1
        self._unsolved += 1
        if self.samples <= SAMPLES_MIN:
            self._solve()

    def _forget(self) -> None:
        self._sides = [[0.0] * len(row) for row in self._sides]
        self._right = [0.0] * len(self._right)
        self._work = self._seconds = 0.0

    def seconds(self, terms: Sequence[float]) -> float:
        """The expected duration for these terms; 0.0 before the first sample."""
        if self._unsolved:
            self._solve()
        return self._sum(terms)

    def _sum(self, terms: Sequence[float]) -> float:
        return float(sum(map(mul, terms, self._factors)))

    def _solve(self) -> None:
        """Ridge regression towards factors in the ratio of the shares; none below 0."""
        self._unsolved = 0
        one = self._seconds / self._work if self._work else 0.0
        prior = [one * share for share in self._shares]
        scale = [max(row[place], 1e-30) * _RIDGE for place, row in enumerate(self._sides)]
        used = list(range(len(prior)))
        while used:
            matrix = [
                [self._sides[i][j] + (scale[i] if i == j else 0.0) for j in used]
                + [self._right[i] + scale[i] * prior[i]]
                for i in used
            ]
            found = _solved(matrix)
            below = [at for at, value in enumerate(found) if value < 0]
            if not below:
                break
            used.pop(min(below, key=found.__getitem__))
        self._factors = [0.0] * len(prior)
        for place, value in zip(used, found if used else (), strict=True):
            self._factors[place] = value


def _solved(matrix: list[list[float]]) -> list[float]:
    """Solve a positive definite system, given as rows with the right side last."""
    size = len(matrix)
    for at in range(size):
        pivot = matrix[at][at]
        for row in matrix[at + 1 :]:
            share = row[at] / pivot
            for place in range(at, size + 1):
                row[place] -= share * matrix[at][place]
    found = [0.0] * size
    for at in reversed(range(size)):
        rest = sum(matrix[at][place] * found[place] for place in range(at + 1, size))
        found[at] = (matrix[at][size] - rest) / matrix[at][at]
    return found
