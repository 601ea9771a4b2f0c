"""Finds the node and the space of an engine in the nodes' lists of sessions. Pure.

An adapter gives the sessions of its engine the engine's name, with ``/dp<rank>`` if the engine has
data-parallel ranks. An engine's sessions are those of one node whose name is, in this order of
preference:

1. the id under which the engine registered,
2. ``host:port`` of the URL that it registered,
3. ``*:port``, if the URLs of engine and node have the same host: the engine's server listens at
   every address of that machine.

If several nodes have such sessions, none of them is used: nothing is guessed.
"""

import enum
from collections.abc import Iterable
from typing import Annotated, Final, NamedTuple
from urllib.parse import urlsplit

from msgspec import Meta, Struct

_Word = Annotated[str, Meta(max_length=512)]
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]
_Tokens = Annotated[int, Meta(ge=1, le=65_536)]
_RANKS: Final = "/dp"
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1", "")
_PORTS: Final = {"http": 80, "https": 443}


class Gap(enum.StrEnum):
    """Why an engine's KV does not count when requests are routed, entirely or in part."""

    NO_EVENTS = "no_events"
    NO_SPACE = "no_space"
    UNKNOWN_NODE = "unknown_node"
    AMBIGUOUS_NODE = "ambiguous_node"
    EVENTS_DOWN = "events_down"
    NODE_EVENTS_DOWN = "node_events_down"


ADVICE: Final = {
    Gap.NO_EVENTS: (
        "its KV events are unknown, so pages in its own cache do not count",
        "switch its events on (vLLM: --kv-events-config; the reference engine: --events), and let"
        " its adapter connect to a node under its id, or register it with `events`",
    ),
    Gap.NO_SPACE: (
        "its space is unknown, so pages on nodes do not count",
        "register the node of its machine with `url`, and set the adapter's option `engine` to the"
        " engine's id",
    ),
    Gap.UNKNOWN_NODE: (
        "no registered node has a session of it, and it names none",
        "register the node of its machine with `url`, and set the adapter's option `engine` to the"
        " engine's id",
    ),
    Gap.AMBIGUOUS_NODE: (
        "several nodes have sessions of its name, so none of them counts",
        "give each engine a name of its own, or register this one with `node`",
    ),
    Gap.EVENTS_DOWN: (
        "its KV events are not connected, so pages in its own cache do not count now",
        "see the Conductor's log and kvstore_conductor_events_faults_total",
    ),
    Gap.NODE_EVENTS_DOWN: (
        "the events of its node are not connected, so pages there do not count now",
        "see the node in GET /v1/nodes, and kvstore_conductor_events_faults_total",
    ),
}
"""What each gap means, and what to do about it."""


class SeenEngine(Struct, frozen=True):
    """The engine of a session, as its adapter says; see ``kvstore.protocol.page.EngineLabel``."""

    name: _Word
    events: _Word | None = None
    events_bind: _Word | None = None
    events_replay: _Word | None = None
    block_tokens: _Tokens | None = None


class SeenSpace(Struct, frozen=True):
    """A space that a session has opened, and hex digests of its shards there.

    ``windows``: of shards of which a hit needs the last pages only, their number.
    """

    space: _Digest
    page_tokens: _Tokens
    scope: _Word = ""
    shards: Annotated[tuple[_Digest, ...], Meta(max_length=65_536)] = ()
    windows: Annotated[dict[_Digest, _Tokens], Meta(max_length=65_536)] = {}


class SeenSession(Struct, frozen=True):
    """A session at a node; ``engine`` None = it has no engine's name, ``peer`` = it is a node's."""

    engine: SeenEngine | None = None
    spaces: Annotated[tuple[SeenSpace, ...], Meta(max_length=4096)] = ()
    peer: bool = False


class NodeView(Struct, frozen=True, kw_only=True):
    """A node as its admin API described it last.

    Attributes:
        id: the id under which it registered.
        host: host of its URL; empty = this machine.
        boot: identifies this run of the node.
        events: endpoint of its KV events; None = it has none.
        events_replay: endpoint for missed batches.
        follow_token: whether followers over TCP need a token.
        cluster: name of the cluster whose other nodes' pages it can use; empty = it is alone.
        sessions: its sessions, those with an engine's name first.
        unnamed: number of sessions without an engine's name.
    """

    id: str
    host: str
    boot: str
    events: str | None
    events_replay: str | None
    follow_token: bool
    sessions: tuple[SeenSession, ...]
    unnamed: int
    cluster: str = ""


class RankEvents(Struct, frozen=True):
    """Where one data-parallel rank of an engine publishes its events; None = it does not.

    ``events_bind``: the rank connects to this endpoint, so the follower listens there.
    """

    rank: int
    events: str | None
    events_bind: str | None
    events_replay: str | None


class FoundSessions(NamedTuple):
    """An engine's sessions at one node.

    Attributes:
        node: id of the node.
        spaces: hex digests of the spaces that it has opened, the newest last; none yet if empty.
        page_tokens: tokens per page of the newest space; 0 if there is none.
        shards: hex digests of the shards that it has opened in the newest.
        windows: of shards of which a hit needs the last pages only, their number.
        block_tokens: tokens of one of its blocks; None = unknown.
        ranks: its events, by data-parallel rank.
    """

    node: str
    spaces: tuple[str, ...]
    page_tokens: int
    shards: tuple[str, ...]
    windows: dict[str, int]
    block_tokens: int | None
    ranks: tuple[RankEvents, ...]


class Sessions:
    """The sessions of all nodes, by engine name."""

    def __init__(self, views: Iterable[NodeView]) -> None:
        self._named: dict[str, dict[str, list[SeenSession]]] = {}
        self._hosts: dict[str, str] = {}
        self._clusters: dict[str, str] = {}
        for view in views:
            self._hosts[view.id] = view.host
            if view.cluster:
                self._clusters[view.id] = view.cluster
            for session in view.sessions:
                if session.engine is not None:
                    name = session.engine.name.partition(_RANKS)[0]
                    self._named.setdefault(name, {}).setdefault(view.id, []).append(session)

    def find(self, engine_id: str, url: str, node: str | None) -> FoundSessions | Gap:
        """The sessions of an engine.

        Args:
            engine_id: its id.
            url: its URL.
            node: the only node to look at; None = all.

        Returns:
            The gap, if there are none, or at several nodes.
        """
        host, address = host_of(url), address_of(url)
        every = f"*:{address.rpartition(':')[2]}"
        for name in (engine_id, address, every):
            nodes = self._named.get(name, {})
            fitting = [
                one
                for one in nodes
                if (node is None or one == node)
                and (name != every or _same_host(self._hosts[one], host))
            ]
            if len(fitting) > 1:
                return Gap.AMBIGUOUS_NODE
            if fitting:
                return _found(fitting[0], nodes[fitting[0]], host)
        return Gap.UNKNOWN_NODE

    def peers(self, node: str | None) -> tuple[str, ...]:
        """Ids of the other nodes of a node's cluster, sorted; none if it is alone or unknown."""
        cluster = self._clusters.get(node or "")
        return tuple(
            sorted(
                one
                for one, name in self._clusters.items()
                if cluster is not None and name == cluster and one != node
            )
        )


def host_of(url: str) -> str:
    """The host of a URL, without brackets; empty for a Unix socket."""
    return urlsplit(url).hostname or ""


def address_of(url: str) -> str:
    """``host:port`` of an HTTP URL."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{host}:{parts.port or _PORTS[parts.scheme]}"


def reachable(endpoint: str | None, host: str) -> str | None:
    """An endpoint to connect to, with ``*`` and the like replaced by the publisher's host."""
    if not endpoint:
        return None
    scheme, _, rest = endpoint.partition("://")
    bound, _, port = rest.rpartition(":")
    if scheme != "tcp" or bound not in ("*", "0.0.0.0", "[::]"):
        return endpoint
    host = host or "127.0.0.1"
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _same_host(one: str, other: str) -> bool:
    return one == other or (one in _LOOPBACK and other in _LOOPBACK)


def _found(node: str, sessions: Iterable[SeenSession], host: str) -> FoundSessions:
    spaces: dict[str, SeenSpace] = {}
    shards: dict[str, dict[str, None]] = {}
    windows: dict[str, int] = {}
    ranks: dict[int, RankEvents] = {}
    block_tokens: int | None = None
    for session in sessions:
        assert session.engine is not None
        rank = _rank(session.engine.name)
        if rank not in ranks:
            ranks[rank] = _events(rank, session.engine, host)
        block_tokens = block_tokens or session.engine.block_tokens
        for space in session.spaces:
            if not space.scope:  # others are private: a self-test, pages of one handoff
                spaces[space.space] = space
                shards.setdefault(space.space, {}).update(dict.fromkeys(space.shards))
                windows |= space.windows
    newest = next(reversed(spaces), None)
    return FoundSessions(
        node=node,
        spaces=tuple(spaces),
        page_tokens=spaces[newest].page_tokens if newest else 0,
        shards=tuple(sorted(shards[newest])) if newest else (),
        windows=windows,
        block_tokens=block_tokens,
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
    )


def _rank(name: str) -> int:
    """The data-parallel rank in an engine's name."""
    text = name.partition(_RANKS)[2]
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 5 else 0


def _events(rank: int, engine: SeenEngine, host: str) -> RankEvents:
    return RankEvents(
        rank,
        reachable(engine.events, host),
        engine.events_bind,
        reachable(engine.events_replay, host),
    )
