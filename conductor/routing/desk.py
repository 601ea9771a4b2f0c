"""A dispatcher with a journal of its inputs and decisions. Pure."""

from collections.abc import Callable

from conductor.routing.choices import Effect
from conductor.routing.columns import Matches
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineInfo, EngineRegistry, Health
from conductor.routing.journal import (
    ArriveInput,
    BeganInput,
    ClosedInput,
    DetachedInput,
    EndedInput,
    EnginesInput,
    FailedInput,
    ForgottenInput,
    GivenBackInput,
    HealthInput,
    LearnInput,
    LeftInput,
    Line,
    OthersInput,
    PrefilledInput,
    ReleasedInput,
    Stepped,
    UntoldInput,
    set_health,
    shown,
)
from conductor.routing.moving import Restored
from conductor.routing.requests import Request


class Desk:
    """A dispatcher whose inputs and effects are written down, if a journal is given.

    Args:
        dispatcher: decides.
        registry: its engines.
        find: the prefix of a request, by number and model, at each engine.
        write: gets a line for each input and decision; None = nobody wants to know.

    Attributes:
        dispatcher: decides.
        registry: its engines.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        registry: EngineRegistry,
        find: Callable[[int, str], Matches],
        write: Callable[[Line], None] | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self.registry = registry
        self._find = find
        self._write = write or _nowhere
        self._writes = write is not None
        self._seen: tuple[int, list[EngineInfo], tuple[Health, ...]] = (-1, [], ())
        self._seen_others = 0

    def arrive(self, request: Request) -> None:
        """A request arrives."""
        if self._writes:
            self._write(ArriveInput.of(request))
        self.dispatcher.arrive(request)

    def prefilled(
        self, number: int, now: float, hit_tokens: int | None, restored: Restored | None
    ) -> None:
        """The prefill engine of a pair has done its part, but for what it had, and fetched."""
        self._write(PrefilledInput(now, number, hit_tokens, restored))
        self.dispatcher.prefilled(number, now, hit_tokens, restored)

    def began(self, number: int, now: float, hit_tokens: int | None = None) -> None:
        """A request has its first token."""
        self._write(BeganInput(now, number, hit_tokens))
        self.dispatcher.began(number, now, hit_tokens)

    def ended(
        self, number: int, output_tokens: int, now: float, restored: Restored | None, *,
        read_slowly: bool = False,
    ) -> None:  # fmt: skip
        """A request has its last token; see :meth:`Dispatcher.ended`."""
        self._write(EndedInput(now, number, output_tokens, restored, read_slowly))
        self.dispatcher.ended(number, output_tokens, now, restored, read_slowly=read_slowly)

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

    def released(self, number: int, engine: str, now: float) -> None:
        """An engine has done its part of a request."""
        self._write(ReleasedInput(now, number, engine))
        self.dispatcher.released(number, engine, now)

    def detach(self, number: int, engine: str) -> None:
        """A place at an engine is to outlast its request."""
        self._write(DetachedInput(number, engine))
        self.dispatcher.detach(number, engine)

    def give_back(self, number: int, engine: str, now: float) -> None:
        """Such a place is free again."""
        self._write(GivenBackInput(now, number, engine))
        self.dispatcher.give_back(number, engine, now)

    def untold(self, number: int, engine: str) -> None:
        """Nobody will report when an engine has computed a prompt."""
        self._write(UntoldInput(number, engine))
        self.dispatcher.loads.untold(number, engine)

    def forget(self, engine: str) -> None:
        """An engine is about to be removed."""
        self._write(ForgottenInput(engine))
        self.dispatcher.forget(engine)

    def close(self) -> None:
        """Waiting and new requests are to be rejected."""
        self._write(ClosedInput())
        self.dispatcher.close()

    def look(self) -> None:
        """Write down what others have changed of engines; to be called before each input."""
        if not self._writes:
            return
        changes, infos, health = self._seen
        now_health = tuple([engine.health.state for engine in self.registry])
        if changes != self.registry.changes or health != now_health:
            now_infos = [engine.info for engine in self.registry]
            changed_infos = None if now_infos == infos else tuple(now_infos)
            self._write(EnginesInput(changed_infos, now_health))
            self._seen = (self.registry.changes, now_infos, now_health)
        others = self.dispatcher.loads.others
        if self._seen_others != others.changes:
            found = {engine.info.id: others.reported(engine.info.id) for engine in self.registry}
            self._write(OthersInput({name: one for name, one in found.items() if one is not None}))
            self._seen_others = others.changes

    def step(self, now: float) -> list[Effect]:
        """Let the dispatcher decide what it can decide now."""
        for number, model in self.dispatcher.due(now):
            matches = self._find(number, model)
            if self._writes:
                self._write(LearnInput(number, dict(matches)))
            self.dispatcher.learn(number, matches)
        return self._written(self.dispatcher.step(now), now)

    def decided(self, now: float) -> list[Effect]:
        """What was decided by a step that failed then."""
        effects = self.dispatcher.decided()
        return self._written(effects, now) if effects else effects

    def _written(self, effects: list[Effect], now: float) -> list[Effect]:
        if self._writes:
            self._write(Stepped(now, shown(effects)))
        return effects


def _nowhere(_: Line) -> None:
    """Nobody wants to know."""
