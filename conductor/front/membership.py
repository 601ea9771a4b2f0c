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
from dataclasses import dataclass
from typing import Final

from conductor.config import (
    ConductorConfig,
    EngineEntry,
    check_endpoint,
)
from conductor.front.cluster import ClusterNodes
from conductor.front.nodes import Nodes
from conductor.front.offers import offer_of
from conductor.front.openai import BadRequestError
from conductor.front.served import DescribedEngine, ServedReader, machine, protocol_of
from conductor.front.upstream import EngineError, Upstream
from conductor.routing.engines import (
    Engine,
    EngineInfo,
    EngineRegistry,
    Health,
    LoraAdapter,
    Role,
)
from conductor.routing.joining import ADVICE, FoundSessions, Gap, RankEvents, Sessions
from conductor.routing.naming import own_domain
from conductor.routing.places import engine_worker, engine_workers, node_worker
from kvstore.cluster.store import RecordStore
from kvstore.index.control import Source
from kvstore.index.face import PrefixIndex
from kvstore.index.reading import UnreadableError

_log = logging.getLogger(__name__)

_MAX_RUNNING_DEFAULT: Final = 8
_READ_S: Final = 10.0
"""Seconds between two readings of an engine's LoRA adapters."""
_SHOWN: Final = 500
"""Maximum characters of their names in the log."""
_ENDPOINTS: Final = ("events", "events_bind", "events_replay")
_NO_SPACE: Final = "model:"
"""Beginning of the domain of an engine without a space."""
_ROLES: Final = {
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "mono": Role.MIXED,
    "mixed": Role.MIXED,
}


@dataclass(slots=True)
class _Registration:
    """What is known of an engine.

    Attributes:
        entry: its registration.
        said: what it said itself.
        adapters: the LoRA adapters that it serves.
        read_at: when these are read again, on the clock; None = never, it has ``GET /v1/engine``.
        found: its sessions; those that were found last, if there are none now.
        peers: ids of the other nodes of its node's cluster.
    """

    entry: EngineEntry
    said: DescribedEngine
    adapters: dict[str, LoraAdapter]
    read_at: float | None
    found: FoundSessions | None = None
    peers: tuple[str, ...] = ()

    @property
    def node(self) -> str | None:
        """Id of its node; None = unknown."""
        return self.entry.node or self.said.node or (self.found.node if self.found else None)


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
        self.nodes = Nodes(config, index, self._nodes_changed)
        self.cluster = ClusterNodes(config, self.nodes, store)
        self._served = ServedReader(upstream, config.health.probe_timeout_s)
        self._registrations: dict[str, _Registration] = {}
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
        registration = _Registration(entry, described.said, described.adapters or {}, read_at)
        known = self._registrations.get(entry.id)
        if known is not None and known.entry.url == entry.url:
            registration.found = known.found
            if described.adapters is None:
                registration.adapters = known.adapters
        gap = self._search(registration, Sessions(self.nodes.views))
        info = _combine(registration, self._config)
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

    def _search(self, registration: _Registration, sessions: Sessions) -> Gap | None:
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

    def _refresh(self, registration: _Registration) -> None:
        """Update an engine whose sessions or LoRA adapters may have changed."""
        engine = self._registry.get(registration.entry.id)
        assert engine is not None
        info = _combine(registration, self._config)
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
        sources = _sources(info)
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
        if info.domain.startswith(_NO_SPACE):
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

    def remove(self, engine_id: str) -> bool:
        """Remove an engine; returns False if it is unknown."""
        info = self._registry.remove(engine_id)
        if info is None:
            return False
        self._registrations.pop(engine_id, None)
        ranks = {worker for _, worker in engine_workers(info)}  # they may have no events
        for worker in self._followed.pop(engine_id, set()) | ranks:
            self._index.unfollow(worker)
        self._changed()
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
        """Register the configured engines, then probe engines and read nodes until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.nodes.run(), name="nodes")
            tasks.create_task(self.cluster.run(), name="nodes of the cluster")
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


def _sources(info: EngineInfo) -> list[Source]:
    """Where the ranks of an engine publish their events."""
    first = info.ranks[0].rank if info.ranks else 0
    ranks = [RankEvents(first, info.events, info.events_bind, info.events_replay), *info.ranks[1:]]
    sources = []
    for rank in ranks:
        endpoint = rank.events or rank.events_bind
        if endpoint is not None:
            source = Source(
                worker=engine_worker(info.id, rank.rank), domain=own_domain(info),
                endpoint=endpoint, bind=rank.events is None, replay_endpoint=rank.events_replay,
                block_tokens=info.block_tokens or 0,
            )  # fmt: skip
            sources.append(source)
    return sources


def _combine(registration: _Registration, config: ConductorConfig) -> EngineInfo:
    """Combine the registration, the engine's answer, its sessions and defaults, in this order.

    Raises:
        BadRequestError: the fields are invalid or contradict each other; names the field.
    """
    entry, said, found = registration.entry, registration.said, registration.found
    if said.role is not None and _ROLES.get(said.role) is not entry.role:
        raise BadRequestError("role", f"registered as {entry.role}, the engine says {said.role}")
    model = entry.model or said.model
    if not model:
        raise BadRequestError("model", "neither the registration nor the engine names one")
    space = entry.space or said.space
    opened = found if found is not None and space in (None, *found.spaces) else None
    events, events_bind, events_replay = _events(entry, said, found)
    page_tokens = entry.page_tokens or said.page_tokens or (opened.page_tokens if opened else 0)
    protocol = protocol_of(entry, said, listed=registration.read_at is not None)
    shape, hardware = machine(entry, said)
    return EngineInfo(
        id=entry.id,
        role=entry.role,
        url=entry.url,
        model=model,
        adapters=registration.adapters,
        page_tokens=page_tokens or config.index.page_tokens,
        domain=space or (opened.spaces[-1] if opened and opened.spaces else f"{_NO_SPACE}{model}"),
        spaces=opened.spaces if opened else (),
        shards=opened.shards if opened else (),
        windows=opened.windows if opened else {},
        block_tokens=found.block_tokens if found else None,
        events=events,
        events_bind=events_bind,
        events_replay=events_replay,
        ranks=found.ranks if found else (),
        node=registration.node,
        peers=registration.peers,
        max_running=entry.max_running or said.max_running or _MAX_RUNNING_DEFAULT,
        max_model_len=entry.max_model_len or said.max_model_len or 0,
        protocol=protocol,
        shape=shape,
        hardware=hardware,
        handoff=offer_of(entry, said, protocol, config.handoff.registry_hosts),
    )


def _events(
    entry: EngineEntry, said: DescribedEngine, found: FoundSessions | None
) -> tuple[str | None, str | None, str | None]:
    """``events``, ``events_bind`` and ``events_replay``.

    Those of its sessions count only if neither the registration nor the engine names any.

    Raises:
        BadRequestError: the engine's answer has an invalid endpoint; names the field. Invalid ones
            of a session are left out.
    """
    first = entry if entry.events or entry.events_bind else said
    replay = entry.events_replay or said.events_replay
    named = (first.events, first.events_bind, replay)
    try:
        _check_endpoints(named)
    except ValueError as error:
        field, _, what = str(error).partition(": ")
        raise BadRequestError(field, what) from error
    if first.events or first.events_bind or found is None or not found.ranks:
        return named
    rank = found.ranks[0]
    told = (rank.events, rank.events_bind, replay or rank.events_replay)
    try:
        _check_endpoints(told)
    except ValueError as error:
        _log.info("engine %s: its session names an invalid endpoint: %s", entry.id, error)
        return named
    return told


def _check_endpoints(endpoints: tuple[str | None, str | None, str | None]) -> None:
    """Refuse invalid endpoints.

    Raises:
        ValueError: the message begins with the name of the field.
    """
    for field, endpoint in zip(_ENDPOINTS, endpoints, strict=True):
        check_endpoint(field, endpoint)
