"""Registered nodes: what their admin API tells, and subscriptions to their events.

A node that registers with ``url`` is read again and again: its event endpoints, which change when
it restarts, and its sessions, by which engines are found (:mod:`conductor.routing.joining`). One
task per node, with deadlines; a node that does not answer is asked less and less often, and what it
said last stays. A node that registers with ``events`` only is followed there, and tells no
sessions.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Final, Literal, NamedTuple, TypeVar
from urllib.parse import urlencode, urlsplit

import aiohttp
import msgspec
from msgspec import Meta

from conductor.config import ConductorConfig, Endpoint, Name, NodeEntry, check_endpoint
from conductor.front.guarding import Guard
from conductor.front.openai import BadRequestError
from conductor.front.upstream import read_limited
from conductor.routing.joining import NodeView, SeenSession, host_of, reachable
from conductor.routing.places import node_worker
from kvstore.index.control import Source
from kvstore.index.face import PrefixIndex
from kvstore.index.reading import UnreadableError, read
from kvstore.protocol.errors import printable

_log = logging.getLogger(__name__)

NODES_MAX: Final = 1024
SESSIONS_MAX: Final = 2000
"""Sessions of one node that are read; further ones are ignored."""
_SESSIONS_PART: Final = 100
ANSWER_BYTES_MAX: Final = 4 << 20
_REFUSED: Final = (401, 403)
_STATUSES: Final = {
    **dict.fromkeys(_REFUSED, ": it needs a token, or refuses this one"),
    404: ": a node of an earlier version, or none; register it with `id` and `events`",
}
_NO_HTTP: Final = (
    "its answer is no HTTP; the admin socket of a node has the path of its socket and .admin"
)
_Text = Annotated[str, Meta(max_length=512)]
T = TypeVar("T")


class _Events(msgspec.Struct):
    """The answer of ``GET /v1/events``."""

    node: Name
    boot: _Text
    endpoint: Endpoint | None
    replay_endpoint: Endpoint | None
    follow_token: bool
    cluster: _Text = ""


class _Sessions(msgspec.Struct):
    """An answer of ``GET /v1/sessions``."""

    sessions: Annotated[list[SeenSession], Meta(max_length=_SESSIONS_PART)]
    next: int | None = None


_EVENTS: Final = msgspec.json.Decoder(_Events)
_SESSIONS: Final = msgspec.json.Decoder(_Sessions)


class NodeUnreadableError(Exception):
    """A node's admin API did not answer as expected.

    Attributes:
        refused: it refused the token.
    """

    def __init__(self, what: str, *, refused: bool = False) -> None:
        super().__init__(printable(what))
        self.refused = refused


class NodeApi:
    """The admin API of one node; use it in an ``async with`` statement.

    Args:
        entry: a node with ``url``.
        timeout_s: deadline of one request.
        operates: whether it is to be changed, with ``operate_token``.
    """

    def __init__(self, entry: NodeEntry, timeout_s: float, *, operates: bool = False) -> None:
        token = entry.operate_token if operates else entry.read_token
        assert entry.url is not None
        parts = urlsplit(entry.url)
        unix = parts.scheme == "unix"
        self._url = "http://node" if unix else entry.url
        self._host = "" if unix else host_of(entry.url)
        self._timeout_s = timeout_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(parts.path) if unix else aiohttp.TCPConnector(limit=1),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={
                "Accept-Encoding": "identity",
                **({"Authorization": f"Bearer {token}"} if token else {}),
            },
        )

    async def __aenter__(self) -> "NodeApi":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def view(self, node_id: str | None) -> NodeView:
        """Read everything; ``node_id`` None = the node's own name.

        Raises:
            NodeUnreadableError: an answer is missing or invalid.
        """
        events = await self._get("/v1/events", _EVENTS.decode)
        for field, endpoint in (("events", events.endpoint), ("replay", events.replay_endpoint)):
            try:
                check_endpoint(field, endpoint)
            except ValueError as error:
                raise NodeUnreadableError(f"GET /v1/events: {error}") from error
        sessions = [one for one in await self._sessions() if not one.peer]
        named = tuple(one for one in sessions if one.engine is not None)
        return NodeView(
            id=node_id or events.node,
            host=self._host,
            boot=events.boot,
            events=reachable(events.endpoint, self._host),
            events_replay=reachable(events.replay_endpoint, self._host),
            follow_token=events.follow_token,
            cluster=events.cluster,
            sessions=named,
            unnamed=len(sessions) - len(named),
        )

    async def _sessions(self) -> list[SeenSession]:
        found: list[SeenSession] = []
        cursor: int | None = 0
        while cursor is not None and len(found) < SESSIONS_MAX:
            query = urlencode({"cursor": cursor, "limit": _SESSIONS_PART})
            part = await self._get(f"/v1/sessions?{query}", _SESSIONS.decode)
            found += part.sessions
            if part.next is not None and (part.next <= cursor or not part.sessions):
                raise NodeUnreadableError("GET /v1/sessions: its cursors do not go on")
            cursor = part.next
        return found

    async def _get(self, path: str, decode: Callable[[bytes], T]) -> T:
        return await self.send("GET", path, None, decode, 200)

    async def send(
        self, method: str, path: str, data: bytes | None, decode: Callable[[bytes], T], wanted: int
    ) -> T:
        """Send a request; returns the answer.

        Raises:
            NodeUnreadableError: there is none in time, or not the one that is wanted.
        """
        what = f"{method} {path.partition('?')[0]}"
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.request(
                    method, self._url + path, data=data, allow_redirects=False
                ) as answer,
            ):
                body = await read_limited(answer, ANSWER_BYTES_MAX)
                if answer.status != wanted:
                    refused = answer.status in _REFUSED
                    why = _STATUSES.get(answer.status, "")
                    raise NodeUnreadableError(
                        f"{what}: status {answer.status}{why}", refused=refused
                    )
        except TimeoutError as error:
            raise NodeUnreadableError(f"{what}: no answer in time") from error
        except aiohttp.ClientResponseError as error:
            raise NodeUnreadableError(f"{what}: {_NO_HTTP}") from error
        except (aiohttp.ClientError, OSError, ValueError, EOFError) as error:
            raise NodeUnreadableError(f"{what}: {str(error) or type(error).__name__}") from error
        try:
            return read(decode, body)
        except UnreadableError as error:
            raise NodeUnreadableError(f"{what}: {error}") from error


NodeSource = Literal["registered", "membership"]


class RegisteredNode(NamedTuple):
    """A node that is followed.

    Attributes:
        entry: its registration; ``id`` is set.
        view: what it told last; None = nothing yet.
        trouble: why it could not be read since; empty = nothing.
        source: ``registered`` = it was registered, or is in the configuration; ``membership`` = it
            is in the store of a cluster.
    """

    entry: NodeEntry
    view: NodeView | None = None
    trouble: str = ""
    source: NodeSource = "registered"

    @property
    def id(self) -> str:
        """The id under which it is registered."""
        assert self.entry.id is not None
        return self.entry.id

    @property
    def events(self) -> str | None:
        """The endpoint of its events: of the registration, else what it told."""
        return self.entry.events or (self.view.events if self.view else None)

    @property
    def events_replay(self) -> str | None:
        """The endpoint for missed batches."""
        if self.entry.events:
            return self.entry.events_replay
        return self.view.events_replay if self.view else None

    def why_not(self) -> tuple[str, str] | None:
        """Why its pages do not count, and what to do; None if nothing is known to be wrong."""
        if self.trouble:
            advice = "check whether it runs, and its `url` and `read_token`"
            if self.source == "membership":
                advice = "check whether it runs, its http.advertise, and cluster.read_token_file"
            return self.trouble, advice
        if self.events is None and self.view is not None:
            return "its events are off", "set events.endpoint at the node"
        if self.lacks_token:
            what = "its events need a token"
            if self.source == "membership":
                return what, "set cluster.events_token_file, with the nodes' events.follow_token"
            return what, "register it with `events_token`, the node's events.follow_token"
        return None

    @property
    def lacks_token(self) -> bool:
        """Whether its publisher needs a token that the registration does not have."""
        over_tcp = (self.events or "").startswith("tcp:")
        needs_token = self.view is not None and self.view.follow_token
        return needs_token and over_tcp and not self.entry.events_token


class Nodes:
    """Registers and removes nodes, reads them, and follows their events."""

    def __init__(
        self, config: ConductorConfig, index: PrefixIndex, changed: Callable[[], None], guard: Guard
    ) -> None:
        """Connect the parts; send nothing yet.

        Args:
            config: :meth:`run` registers its ``nodes``.
            index: the prefix index; told here whom to follow.
            changed: called when what the nodes tell has changed.
            guard: keeps a failure about one node from the others.
        """
        self._config = config
        self._guard = guard
        self._index = index
        self._changed = changed
        self._nodes: dict[str, RegisteredNode] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        #: Why a node is not followed, as logged.
        self._said: dict[str, tuple[str, str]] = {}
        self._wake = asyncio.Event()

    def __iter__(self) -> Iterator[RegisteredNode]:
        return iter(self._nodes.values())

    def __contains__(self, node_id: str | None) -> bool:
        return node_id in self._nodes

    @property
    def views(self) -> list[NodeView]:
        """What the nodes told last."""
        return [node.view for node in self._nodes.values() if node.view is not None]

    async def register(self, entry: NodeEntry) -> RegisteredNode:
        """Add a node, or replace the one with this id; also one of a membership.

        Raises:
            BadRequestError: there are too many nodes, another one has its name, or it refuses the
                token; names the field.
            NodeUnreadableError: it does not answer, and the registration does not name it.
        """
        view: NodeView | None = None
        trouble = ""
        if entry.url is not None:
            try:
                async with NodeApi(entry, self._config.health.probe_timeout_s) as api:
                    view = await api.view(entry.id)
            except NodeUnreadableError as error:
                if error.refused:
                    raise BadRequestError("read_token", str(error)) from error
                if entry.id is None:
                    raise
                trouble = str(error)
        known = self._nodes.get(entry.id or (view.id if view else ""))
        if entry.id is None:
            assert view is not None
            by_hand = known is not None and known.source == "registered"
            if known is not None and by_hand and known.entry.url != entry.url:
                what = f"the node at {known.entry.url or known.events} has the name {view.id} too;"
                raise BadRequestError("id", f"{what} register one of them with another id")
            entry = msgspec.structs.replace(entry, id=view.id)
        if known is None and len(self._nodes) >= NODES_MAX:
            raise BadRequestError("id", "too many nodes are registered")
        if view is None and known is not None and known.entry.url == entry.url:
            view = known.view
        node = RegisteredNode(entry, view, trouble)
        self._put(node)
        return node

    def take_up(self, entry: NodeEntry) -> bool:
        """Add a node of a membership, or replace it where it is now; read it soon.

        Args:
            entry: with ``id`` and ``url``; no node with this id was registered.

        Returns:
            False if there are too many nodes.
        """
        assert entry.id is not None
        known = self._nodes.get(entry.id)
        if known is not None and known.entry == entry:
            return True
        if known is None and len(self._nodes) >= NODES_MAX:
            return False
        assert known is None or known.source == "membership"
        view = known.view if known is not None else None
        self._put(RegisteredNode(entry, view, source="membership"))
        return True

    def _put(self, node: RegisteredNode) -> None:
        known = self._nodes.get(node.id)
        if known is not None and known.entry != node.entry:
            self._stop(node.id)
        self._nodes[node.id] = node
        self._follow(node)
        self._wake.set()
        self._changed()

    def get(self, node_id: str) -> RegisteredNode | None:
        """The node with this id."""
        return self._nodes.get(node_id)

    def remove(self, node_id: str) -> bool:
        """Remove a node; returns False if it is unknown."""
        if self._nodes.pop(node_id, None) is None:
            return False
        self._stop(node_id)
        self._said.pop(node_id, None)
        self._index.unfollow(node_worker(node_id))
        self._changed()
        return True

    async def run(self) -> None:
        """Register the configured nodes, then read those with a URL until cancelled."""
        keep = self._guard.keep
        async with asyncio.TaskGroup() as tasks:
            self._tasks.clear()  # those of a run before this one have ended with it
            for entry in self._config.nodes:
                tasks.create_task(keep("configured node", partial(self._take_up, entry)))
            while True:
                self._wake.clear()
                for node in self._nodes.values():
                    if node.entry.url is not None and node.id not in self._tasks:
                        watch = keep("node", partial(self._watch, node))
                        self._tasks[node.id] = tasks.create_task(watch, name=f"node {node.id}")
                await self._wake.wait()

    def gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        """State of the nodes, for metrics."""
        with_url = [node for node in self._nodes.values() if node.entry.url is not None]
        return {
            "node_readable": {(node.id,): float(not node.trouble) for node in with_url},
            "node_source": {(node.id, node.source): 1.0 for node in self._nodes.values()},
            "node_unnamed_sessions": {
                (node.id,): float(node.view.unnamed) for node in with_url if node.view is not None
            },
        }

    async def _take_up(self, entry: NodeEntry) -> None:
        """Register a configured node, as soon as it answers if its id is not configured."""
        pause_s, health = self._config.health.probe_s, self._config.health
        while True:
            try:
                await self.register(entry)
            except (NodeUnreadableError, BadRequestError) as error:
                _log.warning("node %s of the configuration: %s", entry.id or entry.url, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, health.backoff_s_max)
            else:
                return

    async def _watch(self, node: RegisteredNode) -> None:
        """Read one node until cancelled."""
        health, entry = self._config.health, node.entry
        assert entry.id is not None
        pause_s = health.node_s if node.source == "registered" else 0.0
        async with NodeApi(entry, health.probe_timeout_s) as api:
            while True:
                await asyncio.sleep(pause_s)
                try:
                    view = await api.view(entry.id)
                except NodeUnreadableError as error:
                    self._missed(entry.id, str(error))
                    pause_s = max(health.node_s, min(2 * pause_s, health.backoff_s_max))
                else:
                    self._seen(entry.id, view)
                    pause_s = health.node_s

    def _missed(self, node_id: str, why: str) -> None:
        node = self._nodes[node_id]
        if not node.trouble:
            _log.warning("node %s cannot be read: %s", node_id, why)
        self._nodes[node_id] = node._replace(trouble=why)

    def _seen(self, node_id: str, view: NodeView) -> None:
        before = self._nodes[node_id]
        node = self._nodes[node_id] = before._replace(view=view, trouble="")
        if before.trouble:
            _log.warning("node %s can be read again", node_id)
        if before.view != view:
            if before.view is not None and before.view.boot != view.boot:
                _log.info("node %s has restarted", node_id)
            self._follow(node)
            self._changed()

    def _follow(self, node: RegisteredNode) -> None:
        """Follow the node's events, if it is not followed there already."""
        worker = node_worker(node.id)
        if node.events is None or node.lacks_token:
            self._index.unfollow(worker)
            why = node.why_not()
            if why is not None and why != self._said.get(node.id):
                self._said[node.id] = why
                _log.warning("node %s is not followed: %s; %s", node.id, *why)
            return
        self._said.pop(node.id, None)
        self._index.follow(
            Source(
                worker=worker,
                domain=worker,
                endpoint=node.events,
                is_node=True,
                replay_endpoint=node.events_replay,
                token=node.entry.events_token or "",
            )
        )

    def _stop(self, node_id: str) -> None:
        task = self._tasks.pop(node_id, None)
        if task is not None:
            task.cancel()
