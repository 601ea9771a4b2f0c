"""A journal of a dispatcher's inputs and decisions, in order, and their replay. Pure.

A journal is the proof that decisions depend on nothing else: a new dispatcher that gets the same
inputs (:func:`repeat`) has the same effects. It has no content of prompts, only chain values of
their pages, but names of sessions and tenants.
"""

import math
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

from conductor.costs.book import CostBook
from conductor.routing.admission import EVERYBODY, AdmissionRules
from conductor.routing.choices import Assign, Continue, Effect
from conductor.routing.columns import Prefix
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineInfo, EngineRegistry, Health
from conductor.routing.moving import Restored
from conductor.routing.others import OtherRequests
from conductor.routing.policy import POLICIES
from conductor.routing.requests import DispatchLimits, Request
from conductor.routing.scheduler import Scheduler

_ENGINES_MAX: Final = 1024


class ArriveInput(msgspec.Struct, frozen=True, tag="arrive"):
    """A request arrived."""

    at: float
    number: int
    model: str
    tokens: int | None
    keys: list[int]
    session: str
    tenant: str
    service: str = ""
    output_max: int | None = None

    @classmethod
    def of(cls, one: Request) -> "ArriveInput":
        """Of the request as the dispatcher got it."""
        return cls(
            one.arrived, one.number, one.model, one.tokens, one.keys.tolist(), one.session,
            one.tenant, one.service, one.output_max,
        )  # fmt: skip

    def request(self) -> Request:
        """The same again."""
        return Request(
            number=self.number, model=self.model, arrived=self.at, tokens=self.tokens,
            keys=np.array(self.keys, dtype=np.uint64), session=self.session, tenant=self.tenant,
            service=self.service, output_max=self.output_max,
        )  # fmt: skip


class LearnInput(msgspec.Struct, frozen=True, tag="learn"):
    """How much of a prompt each engine had."""

    number: int
    matches: dict[str, Prefix]


class PrefilledInput(msgspec.Struct, frozen=True, tag="prefilled"):
    """A prefill engine had done its part."""

    at: float
    number: int
    hit_tokens: int | None = None
    restored: Restored | None = None


class BeganInput(msgspec.Struct, frozen=True, tag="began"):
    """A request had its first token."""

    at: float
    number: int
    hit_tokens: int | None = None


class EndedInput(msgspec.Struct, frozen=True, tag="ended"):
    """A request had its last token; ``read_slowly`` is absent in files of older versions."""

    at: float
    number: int
    output_tokens: int
    restored: Restored | None = None
    read_slowly: bool = False


class FailedInput(msgspec.Struct, frozen=True, tag="failed"):
    """An engine failed a request."""

    at: float
    number: int
    engine: str
    why: str


class LeftInput(msgspec.Struct, frozen=True, tag="left"):
    """A request had ended."""

    at: float
    number: int


class HealthInput(msgspec.Struct, frozen=True, tag="health"):
    """An engine failed, or lived again."""

    at: float
    engine: str
    ok: bool


class Stepped(msgspec.Struct, frozen=True, tag="step"):
    """The dispatcher decided; ``effects`` as :func:`shown` writes them."""

    at: float
    effects: list[list[str]]


class ReleasedInput(msgspec.Struct, frozen=True, tag="released"):
    """An engine had done its part of a request."""

    at: float
    number: int
    engine: str


class DetachedInput(msgspec.Struct, frozen=True, tag="detached"):
    """A place at an engine was to outlast its request."""

    number: int
    engine: str


class GivenBackInput(msgspec.Struct, frozen=True, tag="given_back"):
    """Such a place was free again."""

    at: float
    number: int
    engine: str


class UntoldInput(msgspec.Struct, frozen=True, tag="untold"):
    """Nobody would report when an engine has computed a prompt."""

    number: int
    engine: str


class ClosedInput(msgspec.Struct, frozen=True, tag="closed"):
    """Waiting and new requests were to be rejected."""


class ForgottenInput(msgspec.Struct, frozen=True, tag="forgotten"):
    """An engine was about to be removed; older files do not tell of one that came back at once."""

    engine: str


class EnginesInput(msgspec.Struct, frozen=True, tag="engines"):
    """Engines were registered, changed or removed, or their health changed.

    Attributes:
        engines: all engines, in order; None = the same as before.
        health: health of each engine.
    """

    engines: tuple[EngineInfo, ...] | None
    health: tuple[Health, ...]


class OthersInput(msgspec.Struct, frozen=True, tag="others"):
    """The requests of others changed; of all engines that report them."""

    others: dict[str, OtherRequests]


Line = (
    ArriveInput | LearnInput | PrefilledInput | BeganInput | EndedInput | FailedInput | LeftInput
    | HealthInput | ReleasedInput | DetachedInput | GivenBackInput | UntoldInput | ClosedInput
    | ForgottenInput | EnginesInput | OthersInput | Stepped
)  # fmt: skip


def shown(effects: Iterable[Effect]) -> list[list[str]]:
    """What is compared of decisions."""
    return [_shown(one) for one in effects]


def _shown(effect: Effect) -> list[str]:
    number = str(effect.request)
    if isinstance(effect, Assign):
        tokens = str(effect.usable_tokens)
        return ["assign", number, effect.prefill, effect.decode, effect.reason, tokens]
    if isinstance(effect, Continue):
        return ["continue", number, effect.decode]
    return ["reject", number, effect.code, effect.reason, str(effect.retry_after_s)]


class JournalHead(msgspec.Struct, frozen=True, tag="head"):
    """What a dispatcher was made of; the first line of a file. ``wait_s`` None = for ever.

    ``skew``: by which part its estimates are off; see :class:`SkewedBook`. ``lends``: whether mixed
    engines are lent.
    """

    policy: str
    engines: list[EngineInfo]
    waiting_max: int
    wait_s: float | None
    tries: int
    rules: AdmissionRules = EVERYBODY
    skew: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    lends: bool = False
    at_once: tuple[str, ...] = ()
    costs: bytes = b""

    def dispatcher(self, book: CostBook) -> tuple[Dispatcher, EngineRegistry]:
        """A new one like it, and its engines; ``book``: has the same skew, and gets the costs.

        Raises:
            UnusableCostsError: these cannot be read.
        """
        if self.costs:
            book.load(self.costs)
        registry = EngineRegistry(engines_max=max(len(self.engines), _ENGINES_MAX))
        for info in self.engines:
            registry.register(info, 0.0)
        wait_s = math.inf if self.wait_s is None else self.wait_s
        limits = DispatchLimits(self.waiting_max, wait_s, self.tries)
        scheduler = Scheduler(POLICIES[self.policy], self.at_once)
        dispatcher = Dispatcher(registry, scheduler, limits, book, self.rules, lends=self.lends)
        return dispatcher, registry


def repeat(line: Line, dispatcher: Dispatcher, registry: EngineRegistry) -> list[Effect] | None:
    """Give a dispatcher an input again; returns the effects of a step, else None."""
    match line:
        case ArriveInput():
            dispatcher.arrive(line.request())
        case LearnInput():
            dispatcher.learn(line.number, line.matches)
        case PrefilledInput():
            dispatcher.prefilled(line.number, line.at, line.hit_tokens, line.restored)
        case BeganInput():
            dispatcher.began(line.number, line.at, line.hit_tokens)
        case EndedInput():
            _repeat_end(line, dispatcher)
        case FailedInput():
            dispatcher.failed(line.number, line.engine, line.why, line.at)
        case LeftInput():
            dispatcher.left(line.number, line.at)
        case ReleasedInput() | DetachedInput() | GivenBackInput() | UntoldInput():
            _repeat_at_engine(line, dispatcher)
        case ClosedInput():
            dispatcher.close()
        case Stepped():
            return dispatcher.step(line.at)
        case _:
            _repeat_outside(line, dispatcher, registry)
    return None


def _repeat_end(line: EndedInput, dispatcher: Dispatcher) -> None:
    tokens, slowly = line.output_tokens, line.read_slowly
    dispatcher.ended(line.number, tokens, line.at, line.restored, read_slowly=slowly)


def _repeat_at_engine(
    line: ReleasedInput | DetachedInput | GivenBackInput | UntoldInput, dispatcher: Dispatcher
) -> None:
    """What becomes of a request's place at one engine."""
    match line:
        case ReleasedInput():
            dispatcher.released(line.number, line.engine, line.at)
        case DetachedInput():
            dispatcher.detach(line.number, line.engine)
        case GivenBackInput():
            dispatcher.give_back(line.number, line.engine, line.at)
        case UntoldInput():
            dispatcher.loads.untold(line.number, line.engine)


def _repeat_outside(
    line: HealthInput | ForgottenInput | EnginesInput | OthersInput,
    dispatcher: Dispatcher,
    registry: EngineRegistry,
) -> None:
    """What a dispatcher sees of its engines."""
    match line:
        case HealthInput():
            set_health(registry, line.engine, line.at, ok=line.ok)
        case ForgottenInput():
            dispatcher.forget(line.engine)
        case EnginesInput():
            _set_engines(line, dispatcher, registry)
        case OthersInput():
            known = {engine.info.id for engine in registry}
            for name in known | line.others.keys():
                running, waiting = line.others.get(name, (None, None))
                dispatcher.loads.tell_others(name, running, waiting, 0)


def _set_engines(line: EnginesInput, dispatcher: Dispatcher, registry: EngineRegistry) -> None:
    if line.engines is not None:
        before = [engine.info.id for engine in registry]
        for name in before:
            registry.remove(name)
        for info in line.engines:
            registry.register(info, 0.0)
        for name in before:
            if registry.get(name) is None:
                dispatcher.forget(name)
    for engine, state in zip(registry, line.health, strict=True):
        engine.health.succeeded(0.0)
        failures = {Health.ALIVE: 0, Health.SUSPECT: 1, Health.DEAD: engine.health.dead_after}
        for _ in range(failures[state]):
            engine.health.failed(0.0)
        assert engine.health.state is state


def set_health(registry: EngineRegistry, engine: str, now: float, *, ok: bool) -> None:
    """Let an engine be dead, or alive again."""
    known = registry.get(engine)
    assert known is not None
    if ok:
        known.health.succeeded(now)
    else:
        for _ in range(known.health.dead_after):
            known.health.failed(now)
