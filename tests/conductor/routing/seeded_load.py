"""A seeded load on a few engines, in simulated time: what one dispatcher decided, as a log.

The load knows nothing of the dispatcher but :class:`Driven`. How long a half of a request takes,
whether it fails and whether its client leaves depends on its number and attempt only, so two
dispatchers that decide the same get the same inputs.

``recorded_decisions.json`` has the logs of the queue of 2026-11, in which a pair took the room of
both its engines when it was assigned.
"""

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from conductor.routing.choices import Candidate
from conductor.routing.columns import Prefix
from conductor.routing.engines import EngineInfo, EngineRegistry, LoraAdapter, Role

RECORDED = Path(__file__).with_name("recorded_decisions.json")
WAIT_S = 1.5
TRIES = 3
WAITING_MAX = 10
PROMPTS = 6
"""Prompts that requests share."""


class Started(NamedTuple):
    """A request was sent to engines; ``prefill == decode`` if one serves it alone."""

    number: int
    prefill: str
    decode: str
    usable_tokens: int
    reason: str
    ranks: Mapping[str, int | None]
    candidates: tuple[Candidate, ...]


class Continued(NamedTuple):
    """A decode engine has room for the KV of a request."""

    number: int
    decode: str


class Refused(NamedTuple):
    """A request was refused."""

    number: int
    code: str
    reason: str
    retry_after_s: int


Effect = Started | Continued | Refused


class Driven(Protocol):
    """A dispatcher, as the load sees it; ``now`` in simulated seconds."""

    def arrive(self, number: int, model: str, now: float) -> Iterable[Effect]:
        """A client sends a request."""

    def prefilled(self, number: int, engine: str, now: float) -> Iterable[Effect]:
        """The prefill engine of a pair has answered."""

    def released(self, number: int, engine: str, now: float) -> Iterable[Effect]:
        """An engine has ended its part."""

    def failed(self, number: int, engine: str, held: list[str], now: float) -> Iterable[Effect]:
        """An engine has failed a request, at which ``held`` still have it."""

    def leave(self, number: int, held: list[str], now: float) -> Iterable[Effect]:
        """A client has gone."""

    def tick(self, now: float) -> Iterable[Effect]:
        """Time has passed, or engines have changed."""

    def wake_at(self) -> float | None:
        """When the dispatcher wants to be called at the latest."""


class Spec(NamedTuple):
    """An engine of a load."""

    id: str
    role: str
    max_running: int
    model: str = "m"
    adapters: tuple[str, ...] = ()


ROOM = 500
"""Places of an engine that is never full, never fails and never goes."""
MIXED = [Spec("x0", "mixed", 2), Spec("x1", "mixed", 3), Spec("x2", "mixed", 4)]
PAIRS = [
    *(Spec(f"p{n}", "prefill", 2) for n in range(3)),
    *(Spec(f"d{n}", "decode", 2 + n) for n in range(3)),
]
EVERY = [
    *PAIRS, Spec("x0", "mixed", 2, adapters=("lora",)), Spec("x1", "mixed", 1),
    Spec("y0", "mixed", 2, "other"), Spec("q0", "prefill", 2, "other"),
]  # fmt: skip
ROOMY = [
    *(Spec(f"p{n}", "prefill", 2) for n in range(3)),
    *(Spec(f"d{n}", "decode", ROOM) for n in range(2)),
]
LOADS: dict[str, list[Spec]] = {"mixed": MIXED, "pairs": PAIRS, "every": EVERY, "roomy": ROOMY}
"""In ``roomy`` no decode engine is ever full."""
REQUESTS = 90


@dataclass
class _Sent:
    """A request that engines have."""

    started: Started
    held: list[str]
    attempt: int
    decode: str = ""


@dataclass
class SeededLoad:
    """One load on one dispatcher.

    Attributes:
        registry: the engines; the dispatcher's too.
        in_turn: whether the decode engine of a pair is asked when the prefill engine has answered
            and the dispatcher says so; else as soon as the prefill engine has answered.
        log: a line for each decision.
        most: the most requests that each engine ever had at once.
    """

    specs: list[Spec]
    seed: str
    in_turn: bool = False
    registry: EngineRegistry = field(default_factory=EngineRegistry)
    log: list[str] = field(default_factory=list)
    most: dict[str, int] = field(default_factory=dict)
    caches: dict[tuple[str, int], int] = field(default_factory=dict)
    _models: dict[int, str] = field(default_factory=dict)
    _sent: dict[int, _Sent] = field(default_factory=dict)
    _attempts: dict[int, int] = field(default_factory=dict)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: itertools.count = field(default_factory=itertools.count)  # type: ignore[type-arg]
    _now: float = 0.0

    def chance(self, *what: object) -> random.Random:
        """Numbers for this and nothing else."""
        return random.Random("/".join(map(str, (self.seed, *what))))

    def register(self, spec: Spec) -> None:
        adapters = dict.fromkeys(spec.adapters, LoraAdapter())
        self.registry.register(
            EngineInfo(
                id=spec.id, role=Role(spec.role), url="http://x", model=spec.model, page_tokens=4,
                domain="d", adapters=adapters, max_running=spec.max_running,
            ),
            self._now,
        )  # fmt: skip

    def prefixes(self, number: int) -> dict[str, Prefix]:
        """The prefix of a request at each engine, as of now."""
        prompt = number % PROMPTS
        found: dict[str, Prefix] = {}
        for engine in self.registry:
            local = self.caches.get((engine.info.id, prompt), 0)
            if local:
                node = max(0, local - 8)
                found[engine.info.id] = Prefix(local, node, local, local % 3 or None, 4)
        return found

    def run(self, driven: Driven) -> list[str]:
        """Drive the whole load; returns the log."""
        self.driven = driven
        for spec in self.specs:
            self.register(spec)
        chance = self.chance("arrivals")
        at = 0.0
        models = sorted({spec.model for spec in self.specs}) + sorted(
            {name for spec in self.specs for name in spec.adapters}
        )
        for number in range(1, REQUESTS + 1):
            at += chance.expovariate(25.0 if chance.random() < 0.7 else 1.5)
            model = "m" if chance.random() < 0.7 else chance.choice(models)
            self._at(at, lambda number=number, model=model: self._arrive(number, model))  # type: ignore[misc]
            if chance.random() < 0.06:
                self._at(at + chance.uniform(0.0, 2.0), lambda number=number: self._leave(number))  # type: ignore[misc]
        gone = chance.choice([spec for spec in self.specs if spec.max_running < ROOM])
        self._at(at * 0.4, lambda: self._remove(gone))
        self._at(at * 0.6, lambda: self._return(gone))
        while self._events or self.driven.wake_at() is not None:
            wake = self.driven.wake_at()
            if wake is not None and (not self._events or wake <= self._events[0][0]):
                self._now = max(wake, self._now)
                self._effects(self.driven.tick(self._now))
                continue
            self._now, _, event = heapq.heappop(self._events)
            event()
        assert not self._sent
        return self.log

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _arrive(self, number: int, model: str) -> None:
        self._models[number] = model
        self._effects(self.driven.arrive(number, model, self._now))

    def _leave(self, number: int) -> None:
        sent = self._sent.pop(number, None)
        self._effects(self.driven.leave(number, sent.held if sent else [], self._now))

    def _remove(self, spec: Spec) -> None:
        self.registry.remove(spec.id)
        self.log.append(f"{self._now:.3f} {spec.id} goes")
        self._effects(self.driven.tick(self._now))

    def _return(self, spec: Spec) -> None:
        self.register(spec)
        self._effects(self.driven.tick(self._now))

    def _effects(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Refused):
                self._sent.pop(effect.number, None)
                said = f"{effect.code} {effect.reason} {effect.retry_after_s}"
                self.log.append(f"{self._now:.3f} {effect.number} {said}")
            elif isinstance(effect, Continued):
                self._continue(effect)
            else:
                self._start(effect)

    def _start(self, started: Started) -> None:
        number, alone = started.number, started.prefill == started.decode
        attempt = self._attempts[number] = self._attempts.get(number, 0) + 1
        held = [started.prefill] if alone or self.in_turn else [started.prefill, started.decode]
        sent = self._sent[number] = _Sent(started, held, attempt, started.decode)
        seen = [
            (c.engine, str(c.health), c.in_flight, c.load, c.local_tokens, c.node_tokens,
             c.usable_tokens, c.peer_tokens, c.verdict)
            for c in started.candidates
        ]  # fmt: skip
        detail = repr((seen, started.reason, sorted(started.ranks.items())))
        digest = hashlib.sha256(detail.encode()).hexdigest()[:8]
        self.log.append(
            f"{self._now:.3f} {number} {started.prefill} {started.decode}"
            f" {started.usable_tokens} {digest}"
        )
        self._count()
        took = self.chance("prefill", number, attempt)
        self._part(number, sent, started.prefill, took, self._serve if alone else self._prefilled)

    def _count(self) -> None:
        for spec in self.specs:
            now = sum(spec.id in sent.held for sent in self._sent.values())
            self.most[spec.id] = max(now, self.most.get(spec.id, 0))

    def _part(
        self, number: int, sent: _Sent, engine: str, took: random.Random,
        then: Callable[[int, _Sent], None],
    ) -> None:  # fmt: skip
        """An engine works for a while, and then fails or has done its part."""
        roomy = any(one.id == engine and one.max_running == ROOM for one in self.specs)
        fails = took.random() < 0.12 and not roomy
        seconds = took.uniform(0.05, 1.4)

        def end() -> None:
            if self._sent.get(number) is not sent:
                return  # its client has gone
            health = self.registry.get(engine)
            if fails:
                if health is not None:
                    health.health.failed(self._now)
                del self._sent[number]
                self._effects(self.driven.failed(number, engine, sent.held, self._now))
                return
            if health is not None:
                health.health.succeeded(self._now)
            self.caches[engine, number % PROMPTS] = 16 + number
            then(number, sent)

        self._at(self._now + seconds, end)

    def _serve(self, number: int, sent: _Sent) -> None:
        del self._sent[number]
        self._effects(self.driven.released(number, sent.held[0], self._now))

    def _prefilled(self, number: int, sent: _Sent) -> None:
        sent.held.remove(sent.started.prefill)
        effects = self.driven.prefilled(number, sent.started.prefill, self._now)
        if not self.in_turn:
            self._decode(number, sent)
        self._effects(effects)

    def _continue(self, effect: Continued) -> None:
        sent = self._sent[effect.number]
        sent.decode = effect.decode
        sent.held.append(effect.decode)
        self._count()
        self._decode(effect.number, sent)

    def _decode(self, number: int, sent: _Sent) -> None:
        took = self.chance("decode", number, sent.attempt)
        self._part(number, sent, sent.decode, took, self._serve)
