"""Lets nodes bring KV before an engine asks for it: for requests that wait, and for many requests.

What is brought is decided in :mod:`conductor.routing.bringing`. Nodes carry it out as jobs of their
admin APIs; a job that fails costs nothing but the bytes, because engines look for pages themselves.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from conductor.config import BringConfig, NodeEntry
from conductor.front.guarding import Guard
from conductor.front.nodes import Nodes
from conductor.front.operating import carry_out
from conductor.routing.bringing import (
    BringKind,
    BringLimits,
    BringPlanner,
    Cancel,
    HotPrefixes,
    Start,
    Wish,
    likely,
)
from conductor.routing.columns import NO_PREFIX
from conductor.routing.decisions import Brought
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineInfo, EngineRegistry, Health, Role
from conductor.routing.places import MEMORY, node_worker
from conductor.routing.prefixes import PrefixView
from conductor.routing.requests import KnownRequest
from kvstore.index.layout import Words

_PERIOD_S: Final = 0.05
_LOOK_S: Final = 1.0
"""A request that waits is looked at again so often."""
_LOOKED_MAX: Final = 2
"""In each period: a look takes milliseconds with a long prompt, and streams wait meanwhile."""
_KEYS_MAX: Final = 10_000
_REPLICATE: Final = "replicate"
_BRING: Final = "bringing KV"
_LOOK: Final = "what could be brought"
OUTCOMES: Final = ("done", "incomplete", "failed", "cancelled", "late", "refused")


class _Look(NamedTuple):
    """What was found of a request that waits, and when it is looked at again."""

    again_at: float
    wish: Wish | None
    engine: str


class Bringer:
    """Brings KV to nodes."""

    def __init__(
        self, config: BringConfig, registry: EngineRegistry, dispatcher: Dispatcher,
        prefixes: PrefixView, nodes: Nodes, timeout_s: float, clock: Callable[[], float],
        guard: Guard,
    ) -> None:  # fmt: skip
        """Connect the parts; send nothing yet.

        Args:
            config: what is done, and its bounds.
            registry: the engines.
            dispatcher: knows who waits.
            prefixes: knows who has what.
            nodes: the nodes.
            timeout_s: deadline of a request to one.
            clock: seconds, monotonic.
            guard: keeps failures here from requests and from the service.
        """
        self._config = config
        self._guard = guard
        self._registry = registry
        self._dispatcher = dispatcher
        self._prefixes = prefixes
        self._nodes = nodes
        self._timeout_s = timeout_s
        self._clock = clock
        limits = BringLimits(bytes_max=config.bytes_max, jobs_max=config.jobs_max)
        self._planner = BringPlanner(limits)
        self._hot = HotPrefixes(config.hot_rate, config.copies_max)
        self._looks: OrderedDict[int, _Look] = OrderedDict()  # of those who wait
        self._cancels: dict[int, asyncio.Event] = {}  # by number of what is carried out
        self._brought: dict[int, list[Brought]] = {}  # by request
        self._counts: Counter[tuple[str, str]] = Counter()
        self._replications: Counter[str] = Counter()  # under way, by node
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Look at those who wait, until cancelled; then nothing is under way any more."""
        if not (self._config.prefetches or self._config.replicates):
            return
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                while True:
                    await asyncio.sleep(_PERIOD_S)
                    if self._config.prefetches:
                        with self._guard.turn(_BRING):
                            self._act(self._planner.step(self._wishes(self._clock())))
            finally:
                self._tasks = None

    # Requests that wait

    def _wishes(self, now: float) -> list[Wish]:
        looked = 0
        for known in self._dispatcher.unassigned:
            number = known.request.number
            look = self._looks.get(number)
            waits = now - known.request.arrived >= self._config.after_s
            if waits and (look is None or look.again_at <= now) and looked < _LOOKED_MAX:
                looked += 1
                self._looks[number] = _Look(now + _LOOK_S, None, "")
                with self._guard.turn(_LOOK):  # of this one; others are looked at all the same
                    self._looks[number] = self._look(known, now)
        return [one.wish for one in self._looks.values() if one.wish is not None]

    def _look(self, known: KnownRequest, now: float) -> _Look:
        """What a request would find, and what could be brought for it."""
        number, model = known.request.number, known.request.model
        found = self._prefixes.find(number, model)
        loads = {
            engine.info.id: self._dispatcher.in_flight(engine.info.id) / engine.info.max_running
            for engine in self._registry.of_model(model)
            if engine.info.role is not Role.DECODE
            and engine.health.state is Health.ALIVE
            and engine.info.id not in known.excluded
        }
        name = likely(known.bound, found, loads)
        engine = self._registry.get(name)
        if engine is None or engine.info.node is None:
            return _Look(now + _LOOK_S, None, "")
        info, prefix = engine.info, found.get(name, NO_PREFIX)
        node = info.node or ""
        rows = self._prefixes.media(number, info)
        here = [one for one in rows if one.worker == node_worker(node)]
        memory = max((one.tokens for one in here if one.medium == MEMORY), default=0)
        far = max((one for one in rows if one.peer), key=lambda one: one.tokens, default=None)
        wish = None
        if prefix.node > max(memory, prefix.local):
            size_bytes = self._bytes(info, prefix.node - memory)
            wish = Wish(number, node, node, prefix.node, size_bytes)
        elif far is not None and far.tokens > prefix.usable:
            source = far.worker.removeprefix(node_worker(""))
            size_bytes = self._bytes(info, far.tokens - prefix.usable)
            wish = Wish(number, node, source, far.tokens, size_bytes)
        return _Look(now + _LOOK_S, wish, name)

    def _bytes(self, info: EngineInfo, tokens: int) -> int:
        return max(1, int(self._dispatcher.loads.costs(info).prior.kv_bytes(tokens)))

    def _act(self, effects: list[Start | Cancel] | list[Cancel]) -> None:
        for effect in effects:
            if isinstance(effect, Cancel):
                self._cancels[effect.number].set()
            else:
                self._start(effect)

    def _start(self, start: Start) -> None:
        begun = False
        try:
            begun = self._begin(start)
        finally:
            if not begun:
                self._planner.ended(start.number)

    def _begin(self, start: Start) -> bool:
        """Carry a wish out; returns False if it cannot be."""
        wish, tasks = start.wish, self._tasks
        engine = self._registry.get(self._looks[wish.request].engine)
        entry = self._entry(wish.source)
        pages = self._prefixes.pages(wish.request, engine.info) if engine is not None else None
        if engine is None or entry is None or pages is None or tasks is None:
            return False
        info, count = engine.info, wish.tokens // engine.info.page_tokens
        if not 0 < count <= len(pages):
            return False  # the engine has registered with other pages meanwhile
        keys = [bytes(one).hex() for one in pages[:count]]
        body: dict[str, object] = {"space": info.domain, "deadline_s": self._config.deadline_s}
        if wish.kind is BringKind.LOAD:
            path, body["keys"] = "/v1/prefetch", keys[:_KEYS_MAX]
        else:
            path, body["key"] = "/v1/replicate", keys[-1]
            body |= {"copies": 2, "node": wish.node}
        brought = Brought(wish.node, wish.source, wish.tokens)
        self._brought.setdefault(wish.request, []).append(brought)
        cancelled = self._cancels[start.number] = asyncio.Event()

        async def carry() -> None:
            brought.outcome = "failed"
            try:
                with self._guard.turn(_BRING):
                    brought.outcome = await carry_out(
                        entry, path, body, cancelled, self._timeout_s, self._config.deadline_s
                    )
            finally:
                del self._cancels[start.number]
                self._planner.ended(start.number)
            self._counts[str(wish.kind), brought.outcome] += 1
            look = self._looks.get(wish.request)
            if look is not None:
                self._looks[wish.request] = look._replace(wish=None)

        tasks.create_task(carry(), name="bring")
        return True

    def _entry(self, node: str) -> NodeEntry | None:
        """A node that can be asked: over HTTP it refuses who has no token."""
        found = self._nodes.get(node)
        entry = found.entry if found is not None else None
        if entry is None or entry.url is None:
            return None
        return entry if entry.operate_token or entry.url.startswith("unix:") else None

    # What becomes of requests

    def assigned(self, number: int, model: str, engine_id: str, keys: Words) -> None:
        """A request has an engine for its prompt.

        Args:
            number: of the request.
            model: requested model, or LoRA adapter.
            engine_id: the engine.
            keys: a chain value for each leading page of its prompt.
        """
        engine = self._registry.get(engine_id)
        self._went(number, engine.info.node if engine is not None else None)
        if self._config.replicates and engine is not None and len(keys):
            with self._guard.turn("copying prefixes"):
                pages, copies = self._hot.came(keys, self._clock())
                if copies:
                    self._replicate(number, model, engine.info, pages, copies)

    def left(self, number: int) -> list[Brought]:
        """A request has ended, or its client has gone; returns what was brought for it."""
        self._went(number, None)
        return self._brought.pop(number, [])

    def _went(self, number: int, node: str | None) -> None:
        self._looks.pop(number, None)
        with self._guard.turn(_BRING):
            self._act(self._planner.went(number, node))

    # Prefixes that many have

    def _replicate(
        self, number: int, model: str, info: EngineInfo, pages: int, copies: int
    ) -> None:
        """Let more nodes have the beginning of a prompt, as far as one has it."""
        wanted = pages * self._prefixes.key_tokens(model)
        found = self._prefixes.find(number, model)
        has = [
            (found.get(one.info.id, NO_PREFIX).node, one.info.node or "")
            for one in self._registry.of_model(model)
        ]
        tokens, node = max(has, default=(0, ""))
        entry, keys = self._entry(node), self._prefixes.pages(number, info)
        count = min(tokens, wanted) // info.page_tokens
        full = self._replications[node] >= self._config.jobs_max
        if entry is None or keys is None or full or self._tasks is None:
            return
        if not 0 < count <= len(keys):
            return
        body: dict[str, object] = {
            "space": info.domain, "key": bytes(keys[count - 1]).hex(), "copies": copies,
            "deadline_s": self._config.deadline_s,
        }  # fmt: skip

        async def carry() -> None:
            outcome, never = "failed", asyncio.Event()
            self._replications[node] += 1
            try:
                with self._guard.turn(_BRING):
                    outcome = await carry_out(
                        entry, "/v1/replicate", body, never, self._timeout_s,
                        self._config.deadline_s,
                    )  # fmt: skip
            finally:
                self._replications[node] -= 1
                if not self._replications[node]:
                    del self._replications[node]
            self._counts[_REPLICATE, outcome] += 1

        self._tasks.create_task(carry(), name="replicate")

    def gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        """What was brought, and is under way, as metrics."""
        return {
            "brought": {
                (kind, outcome): float(self._counts[kind, outcome])
                for kind in (*BringKind, _REPLICATE)
                for outcome in OUTCOMES
            },
            "bring_bytes": {(): float(self._planner.in_flight_bytes)},
        }
