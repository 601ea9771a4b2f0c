"""Registration of engines and nodes, health probes, and subscriptions to their events.

When an engine registers, its properties are read from ``GET /v1/engine``; fields in the
registration override them, so that engines without this route can be used. Engines may register
every few seconds: without a change this does nothing except revive a dead engine.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from conductor.config import (
    ConductorConfig,
    Endpoint,
    EngineEntry,
    Model,
    Name,
    NodeEntry,
    Running,
    Space,
    Tokens,
    check_endpoint,
)
from conductor.front.openai import BadRequestError
from conductor.front.upstream import EngineError, Upstream
from conductor.routing.engines import EngineInfo, EngineRegistry, Health, Role
from conductor.routing.prefixes import engine_worker, node_worker
from kvstore.index.followers import Followers, Source
from kvstore.index.reading import UnreadableError, read

_log = logging.getLogger(__name__)

NODES_MAX: Final = 1024
_MAX_RUNNING_DEFAULT: Final = 8
_ROLES: Final = {
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "mono": Role.MIXED,
    "mixed": Role.MIXED,
}


class _Described(msgspec.Struct):
    """The answer of ``GET /v1/engine``; all fields are optional."""

    role: str | None = None
    model: Model | None = None
    page_tokens: Tokens | None = None
    space: Space | None = None
    events: Endpoint | None = None
    events_replay: Endpoint | None = None
    node: Name | None = None
    max_running: Running | None = None


_DESCRIBED: Final = msgspec.json.Decoder(_Described)


class Membership:
    """Registers and removes engines and nodes, and probes engines."""

    def __init__(
        self,
        config: ConductorConfig,
        registry: EngineRegistry,
        upstream: Upstream,
        followers: Followers,
        changed: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """Connect the parts; send nothing yet.

        Args:
            config: :meth:`run` registers its ``engines`` and ``nodes``.
            registry: the engines; updated here.
            upstream: client for engines.
            followers: followers of events.
            changed: called after each change that may affect waiting requests.
            clock: seconds, monotonic.
        """
        self._config = config
        self._registry = registry
        self._upstream = upstream
        self._followers = followers
        self._changed = changed
        self._clock = clock
        self.nodes: dict[str, NodeEntry] = {}
        self._wake = asyncio.Event()

    async def register(self, entry: EngineEntry) -> EngineInfo:
        """Add or revive an engine.

        Raises:
            BadRequestError: its properties are invalid or contradict the entry; names the field.
            EngineError: it does not answer, and the entry is incomplete.
        """
        if self._registry.full and self._registry.get(entry.id) is None:
            raise BadRequestError("id", "too many engines are registered")
        info = _combine(entry, await self._describe(entry), self._config.index.page_tokens)
        before = self._registry.register(info, self._clock())
        if info.events is None:
            self._followers.drop(engine_worker(info.id))
        else:
            self._followers.follow(
                Source(
                    engine_worker(info.id),
                    info.domain,
                    info.page_tokens,
                    info.events,
                    info.events_replay,
                )
            )
        if before != info:
            _log.info("engine %s is %s at %s, model %s", info.id, info.role, info.url, info.model)
        self._wake.set()
        self._changed()
        return info

    async def _describe(self, entry: EngineEntry) -> _Described:
        url = f"{entry.url}/v1/engine"
        try:
            raw = await self._upstream.get(entry.id, url, self._config.health.probe_timeout_s)
            return read(_DESCRIBED.decode, raw)
        except (EngineError, UnreadableError) as error:
            if entry.model is not None:
                return _Described()
            raise EngineError(entry.id, f"GET /v1/engine failed: {error}") from error

    def remove(self, engine_id: str) -> bool:
        """Remove an engine; returns False if it is unknown."""
        if self._registry.remove(engine_id) is None:
            return False
        self._followers.drop(engine_worker(engine_id))
        self._changed()
        return True

    def add_node(self, node: NodeEntry) -> None:
        """Follow a node's events, if it is not followed at these endpoints already.

        Raises:
            BadRequestError: there are too many nodes.
        """
        if node.id not in self.nodes and len(self.nodes) >= NODES_MAX:
            raise BadRequestError("id", "too many nodes are registered")
        self.nodes[node.id] = node
        worker = node_worker(node.id)
        self._followers.follow(
            Source(
                worker,
                worker,
                self._config.index.page_tokens,
                node.events,
                node.events_replay,
                node.events_token or "",
            )
        )

    def remove_node(self, node_id: str) -> bool:
        """Remove a node; returns False if it is unknown."""
        if self.nodes.pop(node_id, None) is None:
            return False
        self._followers.drop(node_worker(node_id))
        return True

    def worked(self, engine_id: str) -> None:
        """A request or probe succeeded."""
        self._judge(engine_id, well=True)

    def broke(self, engine_id: str) -> None:
        """A request or probe failed."""
        self._judge(engine_id, well=False)

    def _judge(self, engine_id: str, *, well: bool) -> None:
        engine = self._registry.get(engine_id)
        if engine is None:
            return
        before = engine.health.state
        if well:
            engine.health.succeeded(self._clock())
        else:
            engine.health.failed(self._clock())
            self._wake.set()
        if engine.health.state is not before:
            _log.warning("engine %s is %s", engine_id, engine.health.state)
            self._changed()

    async def run(self) -> None:
        """Register the configured engines and nodes, then probe engines until cancelled."""
        for node in self._config.nodes:
            self.add_node(node)
        async with asyncio.TaskGroup() as tasks:
            for entry in self._config.engines:
                tasks.create_task(self._take_up(entry))
            while True:
                self._wake.clear()
                now = self._clock()
                for engine in self._registry.due(now):
                    engine.health.probe_started(now)
                    tasks.create_task(self._probe(engine.info))
                next_at = self._registry.next_probe_at()
                wait_s = None if next_at is None else max(0.0, next_at - self._clock())
                try:
                    async with asyncio.timeout(wait_s):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    async def _take_up(self, entry: EngineEntry) -> None:
        """Register a configured engine as soon as it answers."""
        health = self._config.health
        pause_s = health.probe_s
        while self._registry.get(entry.id) is None:
            try:
                await self.register(entry)
            except (EngineError, BadRequestError) as error:
                _log.warning("engine %s of the configuration: %s", entry.id, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, health.backoff_s_max)

    async def _probe(self, info: EngineInfo) -> None:
        timeout_s = self._config.health.probe_timeout_s
        try:
            await self._upstream.get(info.id, f"{info.url}/health", timeout_s)
        except EngineError as error:
            _log.info("probe: %s", error)
            well = False
        else:
            well = True
        engine = self._registry.get(info.id)
        if engine is not None and engine.info.url == info.url:
            self._judge(info.id, well=well)

    def states(self) -> dict[tuple[str, ...], float]:
        """State of each engine for the metrics: (engine, role, state) → 1 or 0."""
        return {
            (engine.info.id, str(engine.info.role), str(state)): float(engine.health.state is state)
            for engine in self._registry
            for state in Health
        }


def _combine(entry: EngineEntry, said: _Described, page_tokens_default: int) -> EngineInfo:
    """Combine the registration, the engine's answer and defaults, in this order.

    Raises:
        BadRequestError: the fields are invalid or contradict each other; names the field.
    """
    if said.role is not None and _ROLES.get(said.role) is not entry.role:
        raise BadRequestError("role", f"registered as {entry.role}, the engine says {said.role}")
    model = entry.model or said.model
    if not model:
        raise BadRequestError("model", "neither the registration nor the engine names one")
    space = entry.space or said.space
    events = entry.events or said.events
    events_replay = entry.events_replay or said.events_replay
    for field, endpoint in (("events", events), ("events_replay", events_replay)):
        try:
            check_endpoint(field, endpoint)
        except ValueError as error:
            raise BadRequestError(field, str(error).removeprefix(f"{field}: ")) from error
    return EngineInfo(
        id=entry.id,
        role=entry.role,
        url=entry.url,
        model=model,
        page_tokens=entry.page_tokens or said.page_tokens or page_tokens_default,
        domain=space or f"model:{model}",
        events=events,
        events_replay=events_replay,
        node=entry.node or said.node,
        max_running=entry.max_running or said.max_running or _MAX_RUNNING_DEFAULT,
    )
