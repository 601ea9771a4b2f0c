"""How many requests will be decoding at a future time. Pure.

Each request decodes from a start to an end, both of which are estimated when it is assigned, and
better when it has its first token. Late requests end at a memoryless rate: a part of them ends in
each typical stay.

Times are counted in steps of :data:`STEP_S`, up to :data:`HORIZON_S` ahead, so that a forecast
costs one look at each step, whatever the number of requests.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, exp, floor, inf
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]

STEP_S: Final = 0.5
HORIZON_S: Final = 300.0
"""Times further ahead are treated as this one."""
_STAY_WEIGHT: Final = 0.05
"""Of the newest in the moving average of stays."""


class Crowd(NamedTuple):
    """Requests that decode, and the tokens of their prompts and answers."""

    size: float = 0.0
    tokens: float = 0.0

    def plus(self, other: "Crowd", part: float = 1.0) -> "Crowd":
        """Both, of the other only a part."""
        return Crowd(self.size + part * other.size, self.tokens + part * other.tokens)


NOBODY: Final = Crowd()


@dataclass(slots=True)
class _Stay:
    """One request.

    Attributes:
        tokens: of its prompt and its answer.
        decodes: whether it has started.
        start: step in which it starts, if it has not and is not late.
        end: step in which it ends, if it is not late.
    """

    tokens: float
    decodes: bool = False
    start: int | None = None
    end: int | None = None


@dataclass(slots=True)
class _Moment:
    """The events of a step."""

    starts: dict[int, float] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)


class DecodeDemand:
    """The requests of one model.

    Attributes:
        now: those that decode.
        typical_s: how long a request decodes, moving average; 0 = none has come yet.
    """

    def __init__(self) -> None:
        self.now = NOBODY
        self.typical_s = 0.0
        self._late = NOBODY  # should have ended; or should have begun, and count as if they had
        self._due = NOBODY  # of these, those that have not begun
        self._stays: dict[int, _Stay] = {}
        self._moments: dict[int, _Moment] = {}
        self._passed = -(1 << 60)  # steps up to here are over

    def __len__(self) -> int:
        return len(self._stays)

    @property
    def due(self) -> Crowd:
        """Those that should decode, but do not: they wait for a place, or are late before that."""
        return self._due

    def comes(self, number: int, tokens: float, starts_at: float, stays_s: float) -> None:
        """A request will decode.

        Args:
            number: of the request, unknown until now.
            tokens: of its prompt and its answer.
            starts_at: when it is thought to begin.
            stays_s: for how long.
        """
        assert number not in self._stays
        tokens = round(tokens)  # so that sums are exact
        stay = self._stays[number] = _Stay(tokens)
        self.typical_s = self.typical_s or min(stays_s, HORIZON_S)
        starts_at = min(starts_at, self._time() + HORIZON_S)
        start, end = _step(starts_at), _step(starts_at + min(stays_s, HORIZON_S))
        if start <= self._passed:
            self._be_late(stay, Crowd(1, tokens))
            return
        stay.start, stay.end = start, max(end, start + 1)
        self._moment(stay.start).starts[number] = tokens
        self._moment(stay.end).ends[number] = tokens

    def decodes(
        self, number: int, tokens: float, stays_s: float, passed_s: float = 0.0
    ) -> None:  # fmt: skip
        """A request has started, with an estimated duration; it may be unknown until now.

        Args:
            number: of the request.
            tokens: of its prompt and its answer.
            stays_s: for how long it decodes.
            passed_s: for how long it has decoded already.
        """
        self.left(number)
        tokens = round(tokens)
        stay = self._stays[number] = _Stay(tokens, decodes=True)
        self.now = self.now.plus(Crowd(1, tokens))
        self.typical_s = self.typical_s or min(stays_s, HORIZON_S)
        self.typical_s += _STAY_WEIGHT * (min(stays_s, HORIZON_S) - self.typical_s)
        ends_at = self._time() + min(stays_s, HORIZON_S) - passed_s
        stay.end = max(self._passed + 1, _step(ends_at))
        self._moment(stay.end).ends[number] = tokens

    def left(self, number: int) -> None:
        """A request has ended, or will not start; an unknown one is ignored."""
        stay = self._stays.pop(number, None)
        if stay is None:
            return
        one = Crowd(1, stay.tokens)
        if stay.decodes:
            self.now = self.now.plus(one, -1)
        if stay.start is None and stay.end is None:
            self._late = self._late.plus(one, -1)
            self._due = self._due if stay.decodes else self._due.plus(one, -1)
        if stay.start is not None:
            self._drop(stay.start, number, "starts")
        if stay.end is not None:
            self._drop(stay.end, number, "ends")

    def pass_time(self, now: float) -> None:
        """Mark requests as late that should have started or ended by now."""
        step = _step(now)
        if self._passed < step - 2 * HORIZON_S / STEP_S:
            over = sorted(one for one in self._moments if one <= step)
        else:
            over = [one for one in range(self._passed + 1, step + 1) if one in self._moments]
        self._passed = max(self._passed, step)
        for one in over:
            moment = self._moments.get(one)
            if moment is None:
                continue  # all who end here began in a step that is over, too
            for number in (*moment.starts, *moment.ends):
                stay = self._stays[number]
                if stay.start is None and stay.end is None:
                    continue  # it began and ended in steps that are both over
                if stay.end is not None and stay.end != one:
                    self._drop(stay.end, number, "ends")
                stay.start = stay.end = None
                self._be_late(stay, Crowd(1, stay.tokens))
            self._moments.pop(one)

    def _drop(self, step: int, number: int, what: Literal["starts", "ends"]) -> None:
        moment = self._moments[step]
        del getattr(moment, what)[number]
        if not moment.starts and not moment.ends:
            del self._moments[step]

    def _be_late(self, stay: _Stay, one: Crowd) -> None:
        self._late = self._late.plus(one)
        if not stay.decodes:
            self._due = self._due.plus(one)

    def ahead(self, now: float, until: float) -> Iterator[tuple[float, Crowd]]:
        """Times from now on, and the requests that decode then.

        Args:
            now: time, to which :meth:`pass_time` was called.
            until: the last time.
        """
        punctual = Crowd(
            self.now.size - (self._late.size - self._due.size),
            self.now.tokens - (self._late.tokens - self._due.tokens),
        )
        step = self._passed
        at = now
        while True:
            left = exp(-(at - now) / max(STEP_S, self.typical_s))
            yield at, punctual.plus(self._late, left)
            if at >= until:
                return
            step += 1
            at = min(until, max(at, step * STEP_S))
            moment = self._moments.get(step)
            if moment is not None:
                came, went = _sum(moment.starts), _sum(moment.ends)
                punctual = punctual.plus(came).plus(went, -1)

    def forecast(self, now: float, until: float) -> tuple[Column, Column, Column]:
        """The same as :meth:`ahead` in columns: times, number of requests, and their tokens."""
        count = max(1, ceil(until / STEP_S) - self._passed)  # steps up to the one of `until`
        steps = np.arange(self._passed, self._passed + count + 1)
        times = np.minimum(until, np.maximum(now, steps * STEP_S))
        times[0] = now
        changes = np.zeros((2, len(steps)))
        for step, moment in self._moments.items():
            if self._passed < step <= self._passed + count:
                came, went = _sum(moment.starts), _sum(moment.ends)
                changes[:, step - self._passed] = came.size - went.size, came.tokens - went.tokens
        late = self._late
        changes[:, 0] = (
            self.now.size - (late.size - self._due.size),
            self.now.tokens - (late.tokens - self._due.tokens),
        )
        sizes, tokens = changes.cumsum(axis=1)  # exact: all are whole numbers
        if late != NOBODY:
            fading_s = max(STEP_S, self.typical_s)
            left = np.array([exp(-(at - now) / fading_s) for at in times.tolist()])
            sizes, tokens = sizes + left * late.size, tokens + left * late.tokens
        return times, sizes, tokens

    def at(self, now: float, when: float) -> Crowd:
        """The requests that will decode at a time, at most :data:`HORIZON_S` ahead."""
        return [crowd for _, crowd in self.ahead(now, min(when, now + HORIZON_S))][-1]

    def _time(self) -> float:
        return self._passed * STEP_S

    def _moment(self, step: int) -> _Moment:
        return self._moments.setdefault(step, _Moment())

    def check(self) -> None:
        """Assert the invariants."""
        decoding = [one for one in self._stays.values() if one.decodes]
        assert self.now.size == len(decoding)
        assert abs(self.now.tokens - sum(one.tokens for one in decoding)) < 1e-3
        late = [one for one in self._stays.values() if one.start is None and one.end is None]
        assert self._late.size == len(late)
        assert self._due.size == sum(not one.decodes for one in late)
        assert all(step > self._passed for step in self._moments)
        assert all(one.starts or one.ends for one in self._moments.values())


def _step(at: float) -> int:
    return floor(at / STEP_S) if at < inf else 1 << 60


def _sum(tokens: dict[int, float]) -> Crowd:
    return Crowd(len(tokens), sum(tokens.values()))
