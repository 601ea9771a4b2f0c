"""A simulated engine with a simulated disk: seconds are counted, nobody waits for them."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from kvstore.client.results import Hit
from kvstore.engine.load_choice import LoadChooser, PromptsAhead, offer_of
from kvstore.engine.load_decisions import LoadDecisions, RequestLoad
from kvstore.engine.options import Loads
from kvstore.engine.pace import Pace, pairs_of

LOAD_TIMEOUT_S, LOAD_TIMEOUT_MIN_S, ROOM_WAIT_S = 2.0, 0.02, 0.2
"""The defaults of an adapter's options."""
PAGE_TOKENS = 64
PAGE_BYTES = 1 << 20


class Machine(NamedTuple):
    """What things take.

    Attributes:
        step_s: a step, besides its tokens.
        token_s: a token of a prompt.
        pair_s: a pair of a token and one before it.
        page_s: a page from disk.
        open_s: the beginning of a load.
        lanes: loads that run at a time; each as fast as if it were alone.
        budget: tokens of a step.
    """

    step_s: float = 0.002
    token_s: float = 1e-4
    pair_s: float = 0.0
    page_s: float = 0.001
    open_s: float = 0.002
    lanes: int = 1
    budget: int = 512

    def load_s(self, pages: int) -> float:
        return self.open_s + pages * self.page_s


class Arrival(NamedTuple):
    """A prompt of ``pages`` that are on disk and ``rest`` tokens more."""

    at: float
    pages: int
    rest: int = 32


@dataclass
class _Running:
    name: str
    arrival: Arrival
    left: int
    known: int = 0
    load: RequestLoad = field(default_factory=RequestLoad)


@dataclass
class Outcome:
    """What became of the prompts: seconds until each was complete, and what was counted."""

    waits: list[float] = field(default_factory=list)
    ended_at: float = 0.0
    loaded_pages: int = 0
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return sum(self.waits)


class Simulation:
    """One engine: steps one after the other, loads beside them."""

    def __init__(self, machine: Machine, rule: Loads = Loads.FASTER) -> None:
        self.machine = machine
        self.pace = Pace()
        self.chooser = LoadChooser(self.pace, rule)
        self.outcome = Outcome()
        self.decisions = LoadDecisions(self.chooser, ROOM_WAIT_S, self._count)
        self.now = 0.0
        self._waiting: list[_Running] = []
        self._running: list[_Running] = []
        self._loading: list[tuple[float, int, _Running, int, float]] = []
        self._lanes = [0.0] * machine.lanes
        self._numbers = count(1)

    def run(self, arrivals: Sequence[Arrival]) -> Outcome:
        """Serve prompts, in the order of arrival."""
        coming = [
            _Running(str(next(self._numbers)), one, one.pages * PAGE_TOKENS + one.rest)
            for one in sorted(arrivals, key=lambda one: one.at)
        ]
        while coming or self._waiting or self._running or self._loading:
            self._end_loads()
            while coming and coming[0].arrival.at <= self.now:
                self._waiting.append(coming.pop(0))
            self._waiting = [one for one in self._waiting if not self._admit(one)]
            if self._running:
                self._step()
                continue
            events = [one[0] for one in self._loading[:1]]
            events += [one.arrival.at for one in coming[:1]]
            events += [one.load.room_until for one in self._waiting]
            self.now = max(self.now, min(events))
        self.outcome.ended_at = self.now
        return self.outcome

    def _admit(self, one: _Running) -> bool:
        """Load or compute; False = it waits for room."""
        if self.decisions.waits_for_room(one.load, self.now):
            return False
        ahead = PromptsAhead()
        for other in self._running:
            ahead.joins(other.name, other.left, other.known)
        pages = one.arrival.pages
        guess_s = pages * PAGE_BYTES / 1e9
        hit = Hit(pages, tiers={"host": 0, "ssd": pages}, load_seconds=guess_s)
        offer = offer_of(hit, 0, PAGE_TOKENS, PAGE_BYTES, ahead.beside(one.name))
        choice = self.decisions.decide(one.load, offer, self.now)
        if choice is None:
            return False
        if not choice.pages:
            self.decisions.computes(one.load, self.now)
            self._running.append(one)
            return True
        job = next(self._numbers)
        self.decisions.began(job, one.load, self.now)
        lane = min(range(len(self._lanes)), key=self._lanes.__getitem__)
        began = max(self.now, self._lanes[lane])
        end = began + self.machine.load_s(choice.pages)
        late = self.now + min(LOAD_TIMEOUT_S, max(LOAD_TIMEOUT_MIN_S, choice.compute_s))
        # A load that is late is cancelled: it ends with the page that is being read.
        is_late = end > late
        self._lanes[lane] = min(end, max(began, late) + self.machine.page_s) if is_late else end
        at, pages = (late, 0) if is_late else (end, choice.pages)
        heapq.heappush(self._loading, (at, job, one, pages, at - self.now))
        self.outcome.loaded_pages += pages
        return True

    def _end_loads(self) -> None:
        while self._loading and self._loading[0][0] <= self.now:
            at, job, one, pages, seconds = heapq.heappop(self._loading)
            if not pages:
                self.decisions.late(job, at)
            self.decisions.ended(job, seconds, whole=pages > 0)
            one.known = pages * PAGE_TOKENS
            one.left -= one.known
            self._running.append(one)

    def _step(self) -> None:
        room, tokens, pairs = self.machine.budget, 0, 0.0
        for one in self._running:
            some = min(room, one.left)
            pairs += pairs_of(some, one.known)
            one.known, one.left = one.known + some, one.left - some
            room, tokens = room - some, tokens + some
        seconds = self.machine.step_s + tokens * self.machine.token_s + pairs * self.machine.pair_s
        self.pace.note_step(tokens, seconds, pairs)
        self.now += seconds
        for one in self._running:
            if not one.left:
                self.outcome.waits.append(self.now - one.arrival.at)
        self._running = [one for one in self._running if one.left]

    def _count(self, name: str, value: float) -> None:
        self.outcome.counts[name] = self.outcome.counts.get(name, 0) + value
