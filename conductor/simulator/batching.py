"""One simulated engine: chunked prompts, continuous batching, and room for KV.

It computes one group of prompts at a time (a long one, or several that fit in one chunk together),
first come, first served, and with each step gives every request that decodes a token. Steps of
equal length are one stretch, and one event: a stretch ends when a request has its last token, the
prompts are computed, or, at the end of its present step, somebody joins.

A request holds room for its prompt, and for its answer if it decodes here, from the start of its
first step to its end; so the engine never has to throw out what it has begun. Pure: the caller
passes the time, and calls :meth:`~BatchEngine.advance` at ``ends_at``.
"""

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from typing import Final, NamedTuple

from conductor.simulator.steps import Part, TrueSteps

_ROUNDING: Final = 1e-9
STRETCH_STEPS_MAX: Final = 128
"""Maximum equal steps: the context grows meanwhile."""
TBT_TAIL: Final = 0.1
"""The time between tokens of a request is the mean of this longest part of its intervals."""


@dataclass(slots=True)
class Work:
    """What an engine has to do for one request.

    Attributes:
        number: of the request.
        tokens: tokens of the prompt.
        output: tokens to generate here; 0 = the engine only computes the prompt.
        here: whether the prompt's KV is here already.
        prefix: tokens that it did not compute; known when it starts.
        first_s: time of the first token here; None = none yet.
        tbt_s: mean of the longest tenth of its intervals between tokens; 0 without any.
        joined: number of the engine's step that gave its first token.
        last: number of the step that gives its last token.
        factor: how much longer its prompt takes than the engine's others.
    """

    number: int
    tokens: int
    output: int
    here: bool = False
    prefix: int = 0
    first_s: float | None = None
    tbt_s: float = 0.0
    joined: int = -1
    last: int = -1
    factor: float = 1.0

    @property
    def room(self) -> int:
        """Tokens of KV that it needs."""
        return self.tokens + self.output


class Advanced(NamedTuple):
    """What a stretch has brought.

    Attributes:
        computed: requests whose prompts are computed; those without tokens to generate keep their
            room until :meth:`BatchEngine.release`.
        ended: requests that have got their last token; their room is free.
    """

    computed: list[Work]
    ended: list[Work]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of an engine.

    Attributes:
        room_tokens: tokens of KV.
        chunk_tokens: tokens that one step computes at most, the batch's tokens included.
        batch_max: requests that decode at once.
    """

    room_tokens: int
    chunk_tokens: int
    batch_max: int


@dataclass(slots=True)
class _Stretch:
    """Equal steps.

    Attributes:
        start: time of the first.
        steps: how many.
        step_s: seconds of one.
        chunk: tokens of prompts that each computes.
        full: tokens of prompts that all steps compute together.
        batch: requests that get a token with each.
    """

    start: float
    steps: int
    step_s: float
    chunk: int
    full: int
    batch: int

    @property
    def end(self) -> float:
        return self.start + self.steps * self.step_s


class BatchEngine:
    """The engine.

    Args:
        steps: how long its steps take.
        limits: its bounds.
        prefix: how many tokens of a prompt it need not compute, asked when it starts; fewer
            than the prompt has.

    Attributes:
        ends_at: when :meth:`advance` must be called; None = it is idle.
        reserved: tokens of KV that requests hold.
        generated: tokens generated.
        computed: tokens of prompts computed.
    """

    def __init__(
        self, steps: TrueSteps, limits: EngineLimits, prefix: Callable[[Work], int]
    ) -> None:
        self._steps = steps
        self._limits = limits
        self._prefix = prefix
        self._ready: deque[Work] = deque()  # whose prompts wait
        self._joining: deque[Work] = deque()  # whose KV is here
        self._joined: list[int] = []  # of these, who gets its first token with this stretch
        self._prompts: list[Work] = []  # the present group
        self._done = 0  # tokens of it
        self._running: dict[int, Work] = {}
        self._lasts: list[tuple[int, int]] = []  # (last step, number) of these; a heap
        self._context = 0  # tokens of these
        self._step = 0  # steps ended in which somebody decoded
        self._ends: list[int] = []  # of stretches of these, by step
        self._seconds: list[float] = []  # of one step of each
        self._held: dict[int, int] = {}  # room of each request
        self._stretch: _Stretch | None = None
        self.reserved = 0
        self._prompt_s = 0.0
        self.generated = 0
        self.computed = 0

    @property
    def ends_at(self) -> float | None:
        """See the class."""
        return self._stretch.end if self._stretch is not None else None

    def first_tokens(self) -> tuple[float, list[int]]:
        """When and for whom the stretch that has just begun has the first token here.

        Of requests whose KV was brought; each is told once.
        """
        if self._stretch is None or not self._joined:
            return 0.0, []
        numbers, self._joined = self._joined, []
        return self._stretch.start + self._stretch.step_s, numbers

    @property
    def batch(self) -> int:
        """Requests that decode."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for room or their turn, or whose prompt is being computed."""
        return len(self._ready) + len(self._joining) + len(self._prompts)

    def prompt_s(self, now: float) -> float:
        """Seconds up to now in which it computed prompts, decoding besides or not."""
        if self._stretch is None or not self._prompts:
            return self._prompt_s
        return self._prompt_s + now - self._stretch.start

    def fits(self, work: Work) -> bool:
        """Whether the engine could ever serve it."""
        return work.room <= self._limits.room_tokens

    def add(self, work: Work, now: float) -> None:
        """A request comes: with its prompt, or its KV; its turn comes with the next step."""
        assert self.fits(work)
        (self._joining if work.here else self._ready).append(work)
        stretch = self._stretch
        if stretch is None:
            self._begin(now)
        elif work.here or not self._prompts:
            passed = ceil((now - stretch.start) / stretch.step_s - _ROUNDING)
            stretch.steps = min(stretch.steps, max(1, passed))

    def holds(self, number: int) -> bool:
        """Whether a request holds room here."""
        return number in self._held

    def release(self, number: int) -> None:
        """Give the room of a request back whose prompt was computed here; unknown: nothing."""
        self.reserved -= self._held.pop(number, 0)

    def resume(self, now: float) -> None:
        """Begin the next stretch if there is something to do, and none has begun."""
        if self._stretch is None:
            self._begin(now)

    def advance(self, now: float) -> Advanced:
        """The stretch has ended; call :meth:`resume` then, to begin the next."""
        stretch = self._stretch
        assert stretch is not None
        assert abs(stretch.end - now) <= 1e-6 * max(1.0, now)
        self._stretch = None
        ended = self._decoded(stretch)
        computed: list[Work] = []
        if self._prompts:
            self._prompt_s += now - stretch.start
            computed = self._computed(stretch, now)
            ended += [work for work in computed if work.output == 1]
        return Advanced(computed, ended)

    def cancel(self, now: float) -> set[int]:
        """The engine dies and forgets everything; returns who had got a token here."""
        stretch = self._stretch
        begun = {number for number, work in self._running.items() if work.first_s is not None}
        if stretch is not None and stretch.start + stretch.step_s <= now:
            begun |= self._running.keys()
        for kept in (
            self._ready, self._joining, self._joined, self._prompts, self._running, self._lasts
        ):  # fmt: skip
            kept.clear()
        self._held.clear()
        self._done = self._context = self.reserved = 0
        self._stretch = None
        return begun

    def _decoded(self, stretch: _Stretch) -> list[Work]:
        """Give a token for each step to all that decode; returns those that got the last."""
        if not self._running:
            return []
        first = stretch.start + stretch.step_s
        for work in self._running.values():
            if work.first_s is None:
                work.first_s, work.joined = first, self._step + 1
        self._step += stretch.steps
        self._ends.append(self._step)
        self._seconds.append(stretch.step_s)
        self._context += stretch.steps * len(self._running)
        self.generated += stretch.steps * len(self._running)
        ended: list[Work] = []
        while self._lasts and self._lasts[0][0] <= self._step:
            last, number = heapq.heappop(self._lasts)
            assert last == self._step
            work = self._running.pop(number)
            self._context -= work.room
            work.tbt_s = self._between(work.joined, last)
            self.release(number)
            ended.append(work)
        return ended

    def _computed(self, stretch: _Stretch, now: float) -> list[Work]:
        """Account for a stretch of the group; returns its requests if all are computed."""
        tokens = min(stretch.steps * stretch.chunk, stretch.full)
        self._done += tokens
        self.computed += tokens
        if tokens < stretch.full:
            return []
        for work in self._prompts:
            if work.output:
                work.first_s, work.joined = now, self._step
                self.generated += 1
            if work.output == 1:
                self.release(work.number)
            elif work.output:
                self._run(work, self._step + work.output - 1, work.tokens + 1)
        computed, self._prompts = self._prompts, []
        self._done = 0
        return computed

    def _run(self, work: Work, last: int, context: int) -> None:
        work.last = last
        self._running[work.number] = work
        self._context += context
        heapq.heappush(self._lasts, (last, work.number))

    def _begin(self, now: float) -> None:
        """Begin the next stretch, if there is anything to do."""
        while self._joining and self._free():
            if not self._take(self._joining[0]):
                break
            work = self._joining.popleft()
            self._run(work, self._step + work.output, work.tokens)
            self._joined.append(work.number)
        if not self._prompts:
            self._group()
        batch = len(self._running)
        if self._prompts:
            self._compute(now, batch)
        elif batch:
            steps = min(STRETCH_STEPS_MAX, self._lasts[0][0] - self._step)
            context = self._context + batch * (steps - 1) / 2
            step_s = self._steps.decode(batch, context)
            self._stretch = _Stretch(now, steps, step_s, 0, 0, batch)

    def _group(self) -> None:
        """Take the first prompt, and those behind it that fit in its chunk."""
        left = self._chunk()
        while self._ready and self._free():
            work = self._ready[0]
            prefix = self._prefix(work)
            assert 0 <= prefix < work.tokens
            if (self._prompts and work.tokens - prefix > left) or not self._take(work):
                break
            work.prefix = prefix
            self._prompts.append(self._ready.popleft())
            left -= work.tokens - prefix
            if left <= 0:
                break

    def _compute(self, now: float, batch: int) -> None:
        """A stretch of steps with chunks of the group."""
        chunk = self._chunk()
        parts = self._left()
        full = sum(part.new for part in parts)
        steps = -(-full // chunk)
        step_s = self._steps.prompts(parts, steps, batch, self._context) / steps
        step_s *= fmean(work.factor for work in self._prompts)
        if batch:
            steps = min(steps, self._lasts[0][0] - self._step)
        self._stretch = _Stretch(now, steps, step_s, chunk, full, batch)

    def _chunk(self) -> int:
        """Tokens of prompts that a step computes: decoding comes first, but never alone."""
        return max(self._limits.chunk_tokens - len(self._running), self._limits.chunk_tokens // 8)

    def _left(self) -> list[Part]:
        """What is left of the group, the first prompts first."""
        parts: list[Part] = []
        done = self._done
        for work in self._prompts:
            new = work.tokens - work.prefix
            if done < new:
                parts.append(Part(new - done, work.prefix + done))
            done = max(0, done - new)
        return parts

    def _free(self) -> bool:
        return len(self._running) + len(self._prompts) < self._limits.batch_max

    def _take(self, work: Work) -> bool:
        """Reserve room for a request, if there is enough."""
        if self.reserved + work.room > self._limits.room_tokens:
            return False
        assert work.number not in self._held
        self._held[work.number] = work.room
        self.reserved += work.room
        return True

    def _between(self, joined: int, last: int) -> float:
        """Mean of the longest tenth of the steps after ``joined`` up to ``last``; 0 if none."""
        count = last - joined
        if count <= 0:
            return 0.0
        spans: list[tuple[float, int]] = []
        at, step = bisect_right(self._ends, joined), joined
        while step < last:
            end = min(self._ends[at], last)
            spans.append((self._seconds[at], end - step))
            step, at = end, at + 1
        spans.sort(reverse=True)
        wanted = left = max(1, ceil(count * TBT_TAIL))
        total = 0.0
        for seconds, steps in spans:
            taken = min(steps, left)
            total += taken * seconds
            left -= taken
            if not left:
                break
        return total / wanted

    def check(self) -> None:
        """Assert the invariants."""
        assert self.reserved == sum(self._held.values())
        assert 0 <= self.reserved <= self._limits.room_tokens
        assert len(self._running) + len(self._prompts) <= self._limits.batch_max
        assert len(self._lasts) == len(self._running)
        assert all(last > self._step for last, _ in self._lasts)
        assert self._context == sum(
            work.room - (work.last - self._step) for work in self._running.values()
        )
        assert (self._stretch is None) <= (not self._running and not self._prompts)
