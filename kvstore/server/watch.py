"""Logs changes of a node's state by comparing snapshots, so that other code need not log them.

Each tick of the loop compares the node with the previous snapshot, which is cheap. An engine that
is connected for less than a tick is not logged.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from kvstore.node.node import Node
from kvstore.process.logs import event
from kvstore.protocol.page import SpaceIdentity
from kvstore.state.tree.sessions import Session

log = logging.getLogger(__name__)

CLOSE_LOOK_TICKS: Final = 10
"""Number of ticks between checks of everything; other ticks check only the engines."""
SPACES_SHOWN: Final = 16
"""Maximum spaces of one engine that are logged; it may open thousands."""
CALM_S: Final = 30.0
"""Seconds without a failure after which an idle SSD tier counts as recovered."""
_NS: Final = 1_000_000_000


@dataclass(slots=True)
class _Engine:
    """The snapshot of a session.

    Attributes:
        since_ns: when it was first seen.
        pids: process ids of its processes, as far as they are visible here.
        opened: number of spaces it had opened.
        spaces: labels of the session's first spaces, at most :data:`SPACES_SHOWN`.
    """

    session: Session
    since_ns: int
    pids: set[int] = field(default_factory=set)
    opened: int = 0
    spaces: list[str] = field(default_factory=list)

    def look_at_processes(self) -> None:
        """Record its processes, for the line when it has left."""
        self.pids.update(one.peer.pid for one in self.session.processes.values() if one.peer.pid)

    def look_at_spaces(self) -> None:
        """Log the spaces it has opened since the last time."""
        self.opened = len(self.session.spaces)
        for space in islice(self.session.spaces.values(), len(self.spaces), SPACES_SHOWN):
            self.spaces.append(space.label[:12])
            event(
                log, logging.INFO, "engine opened a space", **_named(self.session),
                space=space.label[:12], **_log_fields(space.identity),
            )  # fmt: skip


class Watch:
    """Logs connecting and disconnecting engines, and changes of tiers, policy and readiness.

    The first check logs what is not in its normal state.

    Args:
        node: the node; never changed.
        unready: returns why the node is not ready; empty if it is.
    """

    def __init__(self, node: Node, unready: Callable[[], str]) -> None:
        self._node = node
        self._table = node.pages
        self._unready = unready
        self._ticks = 0
        self._engines: dict[bytes, _Engine] = {}
        self._why = ""
        self._withheld_bytes = 0
        #: Time of the SSD tier's last failure, and pages written until then; None while it works.
        self._failed: tuple[int, int] | None = None
        self._policy = self._table.eviction.policy

    @property
    def engines(self) -> int:
        """Number of engines at the last look."""
        return len(self._engines)

    def look(self, now_ns: int) -> None:
        """Log all changes."""
        close = self._ticks % CLOSE_LOOK_TICKS == 0
        # Those of other nodes come and go with the sessions of two nodes.
        engines = {at: one for at, one in self._node.sessions.items() if not one.remote}
        if close or self._engines.keys() != engines.keys():
            self._who_is_there(engines, now_ns)
        for engine in self._engines.values():
            if len(engine.session.spaces) > engine.opened:
                engine.look_at_spaces()
        if close:
            for engine in self._engines.values():
                engine.look_at_processes()
            self._host_memory()
            self._ssd(now_ns)
            self._policy_and_readiness()
        self._ticks += 1

    def _who_is_there(self, sessions: dict[bytes, Session], now_ns: int) -> None:
        # An engine that reconnected within a tick has its old token, but another session.
        left = [one for one in self._engines.items() if sessions.get(one[0]) is not one[1].session]
        for token, gone in left:
            del self._engines[token]
            event(
                log, logging.INFO, "engine left", **_named(gone.session),
                pids=sorted(gone.pids), spaces=gone.spaces,
                stayed_s=round((now_ns - gone.since_ns) / _NS, 3),
            )  # fmt: skip
        for token, session in sessions.items():
            if token not in self._engines:
                engine = self._engines[token] = _Engine(session, now_ns)
                engine.look_at_processes()
                event(log, logging.INFO, "engine came", engine=session.name,
                      pids=sorted(engine.pids))  # fmt: skip

    def _host_memory(self) -> None:
        slots = self._table.slots
        withheld, before = slots.withheld * slots.extent_bytes, self._withheld_bytes
        if withheld > before:
            event(log, logging.WARNING, "host memory withheld", withheld_bytes=withheld,
                  why="clients still map memory of the previous run")  # fmt: skip
        elif withheld < before:
            event(log, logging.INFO, "host memory returned", withheld_bytes=withheld,
                  returned_bytes=before - withheld)  # fmt: skip
        self._withheld_bytes = withheld

    def _ssd(self, now_ns: int) -> None:
        disk = self._table.disk
        written = self._table.counts.get("demoted_pages", 0)
        if disk.troubled:
            if self._failed is None:
                event(log, logging.WARNING, "SSD tier degraded",
                      why="writes or syncs fail; the node serves from memory")  # fmt: skip
            self._failed = now_ns, written
        elif self._failed is not None:  # between two tries nothing fails
            since_ns, before = self._failed
            if written > before or now_ns - since_ns >= CALM_S * _NS:
                event(log, logging.INFO, "SSD tier recovered")
                self._failed = None

    def _policy_and_readiness(self) -> None:
        policy = self._table.eviction.policy
        if policy != self._policy:
            event(log, logging.INFO, "eviction policy changed", policy=policy, before=self._policy)
            self._policy = policy
        why = self._unready()
        if why and not self._why:
            event(log, logging.WARNING, "not ready", why=why)
        elif self._why and not why:
            event(log, logging.INFO, "ready again", was=self._why)
        self._why = why


def _named(session: Session) -> dict[str, object]:
    return {"engine": session.name, "tenant": session.domain}


def _log_fields(identity: SpaceIdentity) -> dict[str, object]:
    return {
        "model": identity.model,
        "revision": identity.revision,
        "kv_dtype": identity.kv_dtype,
        "page_tokens": identity.page_tokens,
    }
