"""The properties of a registered engine, and the events to follow for it.

The registration counts first, then what the engine says of itself, then its sessions at a node.
"""

import logging
import re
from dataclasses import dataclass
from typing import Final

from conductor.config import ConductorConfig, EngineEntry, check_endpoint
from conductor.front.offers import offer_of
from conductor.front.openai import BadRequestError
from conductor.front.served import DescribedEngine, machine, protocol_of
from conductor.protocols import PROTOCOLS
from conductor.routing.engines import EngineInfo, LoraAdapter, Role
from conductor.routing.joining import FoundSessions, RankEvents
from conductor.routing.naming import own_domain
from conductor.routing.places import engine_worker
from kvstore.index.control import Source

_log = logging.getLogger(__name__)

NO_SPACE: Final = "model:"
"""Beginning of the domain of an engine without a space."""
_MAX_RUNNING_DEFAULT: Final = 8
_ENDPOINTS: Final = ("events", "events_bind", "events_replay")
_ROLES: Final = {
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "mono": Role.MIXED,
    "mixed": Role.MIXED,
}


@dataclass(slots=True)
class Registration:
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


def sources_of(info: EngineInfo) -> list[Source]:
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


def combine(registration: Registration, config: ConductorConfig) -> EngineInfo:
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
    ids = PROTOCOLS[protocol].engine_ids
    if ids and re.fullmatch(ids, entry.id) is None:
        raise BadRequestError("id", f"with protocol {protocol} it must be {ids}")
    shape, hardware = machine(entry, said)
    return EngineInfo(
        id=entry.id,
        role=entry.role,
        url=entry.url,
        model=model,
        adapters=registration.adapters,
        page_tokens=page_tokens or config.index.page_tokens,
        domain=space or (opened.spaces[-1] if opened and opened.spaces else f"{NO_SPACE}{model}"),
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
    of_session = (rank.events, rank.events_bind, replay or rank.events_replay)
    try:
        _check_endpoints(of_session)
    except ValueError as error:
        _log.info("engine %s: its session names an invalid endpoint: %s", entry.id, error)
        return named
    return of_session


def _check_endpoints(endpoints: tuple[str | None, str | None, str | None]) -> None:
    """Refuse invalid endpoints.

    Raises:
        ValueError: the message begins with the name of the field.
    """
    for field, endpoint in zip(_ENDPOINTS, endpoints, strict=True):
        check_endpoint(field, endpoint)
