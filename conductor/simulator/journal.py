"""A journal of a dispatcher's inputs and decisions, in order; and its replay.

A journal is the proof that decisions depend on nothing else: :func:`replay` gives a new dispatcher
the same inputs and compares the effects.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from conductor.routing.admission import EVERYBODY, AdmissionRules
from conductor.routing.choices import Assign, Continue, Effect
from conductor.routing.columns import Matches, Prefix
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineInfo, EngineRegistry
from conductor.routing.moving import Restored
from conductor.routing.policy import POLICIES
from conductor.routing.requests import DispatchLimits, Request
from conductor.routing.scheduler import Scheduler
from conductor.simulator.skew import SkewedBook
from kvstore.protocol.errors import InvalidArgument


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
    """A request had its last token."""

    at: float
    number: int
    output_tokens: int
    restored: Restored | None = None


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


Line = (
    ArriveInput | LearnInput | PrefilledInput | BeganInput | EndedInput | FailedInput | LeftInput
    | HealthInput | Stepped
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

    def dispatcher(self) -> tuple[Dispatcher, EngineRegistry]:
        """A new one like it, and its engines."""
        registry = EngineRegistry(engines_max=len(self.engines))
        for info in self.engines:
            registry.register(info, 0.0)
        wait_s = math.inf if self.wait_s is None else self.wait_s
        limits = DispatchLimits(self.waiting_max, wait_s, self.tries)
        scheduler = Scheduler(POLICIES[self.policy])
        book = SkewedBook(self.skew) if self.skew else None
        dispatcher = Dispatcher(registry, scheduler, limits, book, self.rules, lends=self.lends)
        return dispatcher, registry


class Difference(NamedTuple):
    """A step that decided otherwise than before."""

    at: float
    before: list[list[str]]
    now: list[list[str]]


def replay(head: JournalHead, lines: Iterable[Line]) -> list[Difference]:
    """Give a new dispatcher the inputs of a journal.

    Returns:
        The first step that decides otherwise, if any; what follows it would have had other inputs.
    """
    dispatcher, registry = head.dispatcher()
    for line in lines:
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
                dispatcher.ended(line.number, line.output_tokens, line.at, line.restored)
            case FailedInput():
                dispatcher.failed(line.number, line.engine, line.why, line.at)
            case LeftInput():
                dispatcher.left(line.number, line.at)
            case HealthInput():
                set_health(registry, line.engine, line.at, ok=line.ok)
            case Stepped():
                effects = shown(dispatcher.step(line.at))
                if effects != line.effects:
                    return [Difference(line.at, line.effects, effects)]
    return []


def write_journal(path: Path, head: JournalHead, lines: Sequence[Line]) -> None:
    """Write a file of JSON lines.

    Raises:
        OSError: it cannot be written.
    """
    encoder = msgspec.json.Encoder()
    path.write_bytes(b"\n".join([encoder.encode(one) for one in (head, *lines)]) + b"\n")


def read_journal(path: Path) -> tuple[JournalHead, list[Line]]:
    """Read such a file.

    Raises:
        OSError: it cannot be read.
        InvalidArgument: it is no journal, or its policy is unknown.
    """
    first, *rest = path.read_bytes().splitlines() or [b""]
    try:
        head = msgspec.json.decode(first, type=JournalHead)
        decoder = msgspec.json.Decoder(Line)
        lines = [decoder.decode(line) for line in rest]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument("journal", f"{path}: {error}") from error
    if head.policy not in POLICIES:
        raise InvalidArgument("journal", f"{path}: {head.policy!r} is not a known policy")
    return head, lines


class Desk:
    """A dispatcher whose inputs and effects are written down, if a journal is given.

    Attributes:
        dispatcher: decides.
        registry: its engines.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        registry: EngineRegistry,
        find: Callable[[int], Matches],
        journal: list[Line] | None = None,
    ) -> None:
        """Take a new dispatcher.

        Args:
            dispatcher: decides.
            registry: its engines.
            find: the prefix of a request's prompt at each engine.
            journal: gets a line for each input and decision; None = nobody wants to know.
        """
        self.dispatcher = dispatcher
        self.registry = registry
        self._find = find
        self._journal = journal

    def arrive(self, request: Request) -> None:
        """A request arrives."""
        if self._journal is not None:
            self._journal.append(ArriveInput.of(request))
        self.dispatcher.arrive(request)

    def prefilled(
        self, number: int, now: float, hit_tokens: int, restored: Restored | None
    ) -> None:
        """The prefill engine of a pair has done its part, but for what it had, and fetched."""
        self._write(PrefilledInput(now, number, hit_tokens, restored))
        self.dispatcher.prefilled(number, now, hit_tokens, restored)

    def began(self, number: int, now: float, hit_tokens: int | None = None) -> None:
        """A request has its first token."""
        self._write(BeganInput(now, number, hit_tokens))
        self.dispatcher.began(number, now, hit_tokens)

    def ended(self, number: int, output_tokens: int, now: float, restored: Restored | None) -> None:
        """A request has its last token; what was fetched by the engine that served it alone."""
        self._write(EndedInput(now, number, output_tokens, restored))
        self.dispatcher.ended(number, output_tokens, now, restored)

    def failed(self, number: int, engine: str, why: str, now: float) -> None:
        """An engine failed a request."""
        self._write(FailedInput(now, number, engine, why))
        self.dispatcher.failed(number, engine, why, now)

    def left(self, number: int, now: float) -> None:
        """A request has ended."""
        self._write(LeftInput(now, number))
        self.dispatcher.left(number, now)

    def health(self, engine: str, now: float, *, ok: bool) -> None:
        """An engine fails, for good, or lives again."""
        self._write(HealthInput(now, engine, ok))
        set_health(self.registry, engine, now, ok=ok)

    def step(self, now: float) -> list[Effect]:
        """Let the dispatcher decide what it can decide now."""
        for number, _ in self.dispatcher.due(now):
            matches = self._find(number)
            self._write(LearnInput(number, dict(matches)))
            self.dispatcher.learn(number, matches)
        effects = self.dispatcher.step(now)
        if self._journal is not None:
            self._journal.append(Stepped(now, shown(effects)))
        return effects

    def _write(self, line: Line) -> None:
        if self._journal is not None:
            self._journal.append(line)


def set_health(registry: EngineRegistry, engine: str, now: float, *, ok: bool) -> None:
    """Let an engine be dead, or alive again."""
    known = registry.get(engine)
    assert known is not None
    if ok:
        known.health.succeeded(now)
    else:
        for _ in range(known.health.dead_after):
            known.health.failed(now)
