"""Registration of engines, health probes, and subscriptions to their events.

When an engine registers, its properties are read from ``GET /v1/engine``. Without this route (vLLM)
its model and LoRA adapters are read from ``GET /v1/models``, and its space, shards, node and events
are those of its adapter's sessions at the registered nodes, whenever these appear or change. Fields
in the registration override both. The LoRA adapters are read again while the engine answers probes,
because engines load and unload them. Engines may register every few seconds: without a change this
does nothing except revive a dead engine.

What an engine lacks is logged once, and shown with it: its gaps.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from conductor.config import (
    ConductorConfig,
    EngineEntry,
)
from conductor.front.cluster import ClusterNodes
from conductor.front.guarding import Guard
from conductor.front.nodes import Nodes
from conductor.front.openai import BadRequestError
from conductor.front.registrations import NO_SPACE, Registration, combine, sources_of
from conductor.front.served import ServedReader
from conductor.front.upstream import EngineError, Upstream
from conductor.routing.engines import (
    Engine,
    EngineInfo,
    EngineRegistry,
    Health,
)
from conductor.routing.joining import ADVICE, Gap, Sessions
from conductor.routing.places import engine_worker, engine_workers, node_worker
from kvstore.cluster.store import RecordStore
from kvstore.index.face import PrefixIndex
from kvstore.index.reading import UnreadableError

_log = logging.getLogger(__name__)

_READ_S: Final = 10.0
"""Seconds between two readings of an engine's LoRA adapters."""
_SHOWN: Final = 500
"""Maximum characters of their names in the log."""


class Membership:
    """Registers and removes engines, and probes them."""

    def __init__(
        self,
        config: ConductorConfig,
        registry: EngineRegistry,
        upstream: Upstream,
        index: PrefixIndex,
        changed: Callable[[], None],
        clock: Callable[[], float],
        guard: Guard,
        store: RecordStore | None,
    ) -> None:
        """Connect the parts; send nothing yet.

        Args:
            config: :meth:`run` registers its ``engines`` and ``nodes``, and the nodes of its
                ``cluster``.
            registry: the engines; updated here.
            upstream: client for engines.
            index: the prefix index; told here whom to follow.
            changed: called after each change that may affect waiting requests.
            clock: seconds, monotonic.
            guard: keeps a failure about one engine or node from the others.
            store: has the nodes of the cluster; None = the one in ``config``.

        Raises:
            ConfigError: that store cannot be used by this process.
        """
        self._config = config
        self._registry = registry
        self._upstream = upstream
        self._index = index
        self._changed = changed
        self._clock = clock
        self._guard = guard
        self.nodes = Nodes(config, index, self._nodes_changed, guard)
        self.cluster = ClusterNodes(config, self.nodes, guard, store)
        self._served = ServedReader(upstream, config.health.probe_timeout_s)
        self._registrations: dict[str, Registration] = {}
        self._followed: dict[str, set[str]] = {}  # engine → workers in the index
        self._wake = asyncio.Event()

    async def register(self, entry: EngineEntry) -> EngineInfo:
        """Add or revive an engine.

        Raises:
            BadRequestError: its properties are invalid or contradict the entry; names the field.
            EngineError: it does not answer, and the entry is incomplete.
        """
        if self._registry.full and self._registry.get(entry.id) is None:
            raise BadRequestError("id", "too many engines are registered")
        described = await self._served.describe(entry)
        read_at = self._clock() if described.lists else None
        registration = Registration(entry, described.said, described.adapters or {}, read_at)
        known = self._registrations.get(entry.id)
        if known is not None and known.entry.url == entry.url:
            registration.found = known.found
            if described.adapters is None:
                registration.adapters = known.adapters
        gap = self._search(registration, Sessions(self.nodes.views))
        info = combine(registration, self._config)
        before = self._registry.register(info, self._clock())
        self._registrations[info.id] = registration
        self._follow(info)
        self._note_gaps(info, gap)
        if before != info:
            _log.info("engine %s is %s at %s, model %s", info.id, info.role, info.url, info.model)
        self._wake.set()
        self._changed()
        return info

    async def _read_adapters(self, engine_id: str) -> None:
        """Read the LoRA adapters of an engine again; they stay as they are if it does not tell."""
        registration = self._registrations.get(engine_id)
        if registration is None or registration.read_at is None:
            return
        if registration.read_at > self._clock():
            return
        registration.read_at = self._clock() + _READ_S
        try:
            served = await self._served.read(engine_id, registration.entry.url)
        except (EngineError, UnreadableError) as error:
            _log.info("LoRA adapters of engine %s: %s", engine_id, error)
            return
        if self._registrations.get(engine_id) is registration:
            registration.adapters = served.adapters
            self._refresh(registration)
            self._changed()

    def _search(self, registration: Registration, sessions: Sessions) -> Gap | None:
        """Search the engine's sessions; returns the gap if there are none.

        Sessions found earlier stay: an engine that restarts has none for a while.
        """
        entry = registration.entry
        found = sessions.find(entry.id, entry.url, entry.node or registration.said.node)
        before = registration.found
        if isinstance(found, Gap):
            gap = found
        else:
            gap = None
            if found.spaces or before is None or before.node != found.node:
                registration.found = found
        registration.peers = sessions.peers(registration.node)
        return gap

    def _nodes_changed(self) -> None:
        self.cluster.look()
        self._rejoin()

    def _rejoin(self) -> None:
        """The nodes tell something else: search the sessions of all engines again."""
        sessions = Sessions(self.nodes.views)
        for engine_id, registration in self._registrations.items():
            gap = self._search(registration, sessions)
            self._refresh(registration)
            self._note_gaps(self._info(engine_id), gap)
        self._changed()

    def _info(self, engine_id: str) -> EngineInfo:
        engine = self._registry.get(engine_id)
        assert engine is not None
        return engine.info

    def _refresh(self, registration: Registration) -> None:
        """Update an engine whose sessions or LoRA adapters may have changed."""
        engine = self._registry.get(registration.entry.id)
        assert engine is not None
        info = combine(registration, self._config)
        if info != engine.info:
            _log.info(
                "engine %s: node %s, space %s, events %s, LoRA adapters %s", info.id,
                info.node or "unknown", info.domain[:16],
                info.events or info.events_bind or "unknown",
                ", ".join(info.adapters)[:_SHOWN] or "none",
            )  # fmt: skip
            self._registry.update(info)
            self._follow(info)

    def _follow(self, info: EngineInfo) -> None:
        """Follow the events of all ranks of an engine, where they are not followed already."""
        before = self._followed.get(info.id, set())
        sources = sources_of(info)
        self._followed[info.id] = {source.worker for source in sources}
        for worker in before - self._followed[info.id]:
            self._index.unfollow(worker)
        for source in sources:
            self._index.follow(source)

    def _is_current(self, worker: str) -> bool:
        known = self._index.present().worker(worker)
        return known is not None and known.current

    def _note_gaps(self, info: EngineInfo, searched: Gap | None) -> None:
        """Update the gaps of an engine; log what has changed."""
        gaps: list[Gap] = []
        if info.events is None and info.events_bind is None:
            gaps.append(Gap.NO_EVENTS)
        if info.domain.startswith(NO_SPACE):
            gaps.append(Gap.NO_SPACE)
        if searched is Gap.AMBIGUOUS_NODE:
            gaps.append(searched)
        elif info.node is None or info.node not in self.nodes:
            gaps.append(Gap.UNKNOWN_NODE)
        engine = self._registry.get(info.id)
        assert engine is not None
        for gap in gaps:
            if gap not in engine.gaps:
                means, advice = ADVICE[gap]
                _log.warning("engine %s: %s; %s", info.id, means, advice)
        for gap in engine.gaps:
            if gap not in gaps:
                _log.info("engine %s: %s no longer", info.id, gap)
        engine.gaps = tuple(gaps)

    def gaps(self, engine: Engine) -> list[Gap]:
        """Why an engine's KV does not count now."""
        gaps, info = list(engine.gaps), engine.info
        if Gap.NO_EVENTS not in gaps and not self._is_current(engine_worker(info.id)):
            gaps.append(Gap.EVENTS_DOWN)
        followed = info.node if info.node in self.nodes else None
        if followed is not None and not self._is_current(node_worker(followed)):
            gaps.append(Gap.NODE_EVENTS_DOWN)
        return gaps

    def remove(self, engine_id: str) -> None:
        """Remove an engine; an unknown one is ignored."""
        info = self._registry.remove(engine_id)
        if info is None:
            return
        self._registrations.pop(engine_id, None)
        ranks = {worker for _, worker in engine_workers(info)}  # they may have no events
        for worker in self._followed.pop(engine_id, set()) | ranks:
            self._index.unfollow(worker)
        self._changed()

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
        """Register the configured engines, then probe engines and read nodes until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            keep = self._guard.keep
            tasks.create_task(keep("nodes", self.nodes.run), name="nodes")
            tasks.create_task(keep("cluster", self.cluster.run), name="nodes of the cluster")
            for entry in self._config.engines:
                tasks.create_task(keep("engine", partial(self._take_up, entry)))
            while True:
                self._wake.clear()
                now = self._clock()
                for engine in self._registry.due(now):
                    engine.health.probe_started(now)
                    tasks.create_task(self._guarded_probe(engine.info))
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

    async def _guarded_probe(self, info: EngineInfo) -> None:
        with self._guard.turn("probe"):
            await self._probe(info)

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
            self._wake.set()  # the loop sleeps as long as if this probe were still under way
            if well:
                await self._read_adapters(info.id)

    def gap_states(self) -> dict[tuple[str, ...], float]:
        """Gaps of each engine for the metrics: (engine, gap) → 1 or 0."""
        every = ((engine, self.gaps(engine)) for engine in self._registry)
        return {
            (engine.info.id, str(gap)): float(gap in gaps) for engine, gaps in every for gap in Gap
        }

    def states(self) -> dict[tuple[str, ...], float]:
        """State of each engine for the metrics: (engine, role, state) → 1 or 0."""
        return {
            (engine.info.id, str(engine.info.role), str(state)): float(engine.health.state is state)
            for engine in self._registry
            for state in Health
        }
