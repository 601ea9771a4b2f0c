"""Pages that nodes load from disk and copy from each other for waiting requests. Pure.

As the Conductor does it (:mod:`conductor.front.bringing`), with the same planner: a waiting request
is looked at now and then, and has a wish at the node of the engine that will most likely serve it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from conductor.routing.bringing import (
    BringKind,
    BringLimits,
    BringPlanner,
    Cancel,
    Start,
    Wish,
    likely,
)
from conductor.routing.desk import Desk
from conductor.routing.engines import Health, Role
from conductor.routing.requests import KnownRequest
from conductor.simulator.caching import Caching
from conductor.simulator.links import Link
from conductor.simulator.trace import BLOCK_TOKENS, TracedRequest
from conductor.simulator.transfers import Transfers

PERIOD_S: Final = 0.05
"""Seconds between two looks; a request has waited at least so long."""
_LOOK_S: Final = 1.0
"""A request that waits is looked at again so often."""
_LOOKED_MAX: Final = 2
"""In each period."""
JOBS_MAX: Final = 4
"""Wishes that one node carries out at a time."""


@dataclass(slots=True)
class BroughtCounts:
    """What became of those who waited.

    Attributes:
        looks: at requests that waited.
        begun: wishes that were carried out.
        come: number of begun wishes that ended.
        come_bytes: bytes of the ended wishes.
        given_up: number of begun wishes that were cancelled.
    """

    looks: int = 0
    begun: int = 0
    come: int = 0
    come_bytes: int = 0
    given_up: int = 0


class _Look(NamedTuple):
    again_at: float
    wish: Wish | None


class Prefetching:
    """The wishes of those who wait.

    Args:
        desk: knows who waits, and the engines.
        caching: who has what.
        transfers: over which it comes.
        bytes_max: of all that is brought at a time.
        block_bytes: of the KV of a block, by engine.
        request: a request by its number.

    Attributes:
        brought: what became of the wishes so far.
    """

    def __init__(
        self, desk: Desk, caching: Caching, transfers: Transfers, bytes_max: float,
        block_bytes: Mapping[str, float], request: Callable[[int], TracedRequest],
    ) -> None:  # fmt: skip
        self.brought = BroughtCounts()
        self._desk = desk
        self._caching = caching
        self._transfers = transfers
        self._planner = BringPlanner(BringLimits(bytes_max=int(bytes_max), jobs_max=JOBS_MAX))
        self._block_bytes = block_bytes
        self._request = request
        self._looks: dict[int, _Look] = {}
        self._moving: dict[int, tuple[int, Start]] = {}  # by number of the start

    @property
    def moving(self) -> list[int]:
        """Numbers of the transfers."""
        return [transfer for transfer, _ in self._moving.values()]

    def look(self, now: float) -> None:
        """Start the prefetches that are useful now, and cancel those that no longer are."""
        looked = 0
        for known in self._desk.dispatcher.unassigned:
            number = known.request.number
            look = self._looks.get(number)
            waits = now - known.request.arrived >= PERIOD_S
            if waits and (look is None or look.again_at <= now) and looked < _LOOKED_MAX:
                looked += 1
                self.brought.looks += 1
                self._looks[number] = _Look(now + _LOOK_S, self._wish(known))
        wishes = [one.wish for one in self._looks.values() if one.wish is not None]
        for effect in self._planner.step(wishes):
            if isinstance(effect, Cancel):
                self._cancel(effect)
            else:
                self._start(effect)

    def _start(self, start: Start) -> None:
        wish = start.wish
        self.brought.begun += 1
        own: tuple[Link, ...] = (("disk", wish.node),)
        far: tuple[Link, ...] = (("out", wish.source), ("in", wish.node))
        links = own if wish.kind is BringKind.LOAD else far
        transfer = self._transfers.start(links, wish.size_bytes, lambda: self._has_come(start))
        self._moving[start.number] = transfer, start

    def _has_come(self, start: Start) -> None:
        wish = start.wish
        self.brought.come += 1
        self.brought.come_bytes += wish.size_bytes
        self._caching.brought(self._request(wish.request), wish.node, wish.tokens // BLOCK_TOKENS)
        self._ended(start)

    def _cancel(self, effect: Cancel) -> None:
        transfer, start = self._moving[effect.number]
        self._transfers.stop(transfer)
        self.brought.given_up += 1
        self._ended(start)

    def _ended(self, start: Start) -> None:
        del self._moving[start.number]
        self._planner.ended(start.number)
        look = self._looks.get(start.wish.request)
        if look is not None:
            self._looks[start.wish.request] = look._replace(wish=None)

    def _wish(self, known: KnownRequest) -> Wish | None:
        dispatcher, request = self._desk.dispatcher, self._request(known.request.number)
        loads = {
            engine.info.id: dispatcher.in_flight(engine.info.id) / engine.info.max_running
            for engine in self._desk.registry.of_model(known.request.model)
            if engine.info.role is not Role.DECODE
            and engine.health.state is Health.ALIVE
            and engine.info.id not in known.excluded
        }
        name = likely(known.bound, self._caching.matches(request), loads)
        if not name:
            return None
        found = self._caching.sources(request, name)
        source, missing = (name, found.disk) if found.disk else (found.peer, found.more)
        if source is None or not missing:
            return None
        blocks = found.start + found.host + missing
        size = int(missing * self._block_bytes[name])
        return Wish(request.number, name, source, blocks * BLOCK_TOKENS, size)

    def went(self, number: int, engine: str | None) -> None:
        """A request waits no more: it has an engine, or has left (None)."""
        self._looks.pop(number, None)
        for effect in self._planner.went(number, engine):
            self._cancel(effect)
