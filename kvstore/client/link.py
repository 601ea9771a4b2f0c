"""A client's link to a node: requests with deadlines, on a connection that reconnects by itself.

The calling thread waits for its own answers (:mod:`kvstore.client.exchange`). A missed deadline or
a broken socket ends the connection: from then on every call fails at once (``PeerUnreachable``)
until a background thread has reconnected, so an engine never waits twice for a stopped node.

:class:`~kvstore.client.reconnecting.Reconnecting` decides on connections, moves and memory, under
one lock that is never held during a wait. The background thread also notices when the node goes
away, and unmaps unused memory.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from types import TracebackType
from typing import Final

from kvstore.client import forks
from kvstore.client.ahead import ReservedSlot, ReservedSlots
from kvstore.client.endpoint import (
    CONNECT_TIMEOUT_S,
    as_transfer_error,
    fetch_extents,
    nobody_listens,
)
from kvstore.client.exchange import Connection
from kvstore.client.mapping import Mapping, Use
from kvstore.client.notices import Notices
from kvstore.client.reconnecting import Effects, Reconnecting, StoreMove
from kvstore.protocol import wire
from kvstore.protocol.errors import (
    EngineNameTaken,
    KVStoreError,
    PeerUnreachable,
    ProtocolError,
    TransferTimeout,
    error_from_code,
)
from kvstore.protocol.page import EngineLabel

log = logging.getLogger(__name__)

ASK_S: Final = 5.0
"""How often a client asks which of its mapped extents are gone, in addition to each mapping."""
SETTLE_WAIT_S: Final = 30.0
"""How long a closed link tries to tell a node that does not answer which moves have ended."""
_BACKOFF_S: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_TICK_S: Final = 0.05
_QUIET_TICK_S: Final = ASK_S / 2
"""Time between two looks at a connection for which there was nothing to do for a while: each takes
0.1 ms of CPU time. What is posted meanwhile is sent at once; a lost connection ends the wait."""
_QUIET_AFTER_S: Final = 1.0
_ORIGIN_BYTES: Final = 16


class Moving:
    """One move as a context manager. Only ``__exit__`` ends it: a deleted one might still read.

    Args:
        begin: starts it.
        end: ends it.
    """

    def __init__(
        self, begin: Callable[[], tuple[StoreMove, Use]], end: Callable[[StoreMove], None]
    ) -> None:
        self._begin = begin
        self._end = end

    def __enter__(self) -> Use:
        self._move, self._use = self._begin()
        return self._use

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        try:
            self._use.end()
        finally:
            self._end(self._move)


class Link:
    """A :class:`~kvstore.client.node_link.NodeLink` over the node's Unix socket.

    Args:
        path: the socket.
        name: the engine's name in the node's statistics.
        session: the session to join; empty = a new one.
        level: log level of messages that the node is away: one process per engine should warn.
        engine: the engine of this process; None = unnamed.
    """

    def __init__(
        self, path: str, name: str, session: bytes = b"", level: int = logging.WARNING,
        engine: EngineLabel | None = None,
    ) -> None:  # fmt: skip
        """Connect if the node is there; otherwise the background thread keeps trying."""
        self.path = path
        self._level = level
        self._notices = Notices(log, name, path, level)
        self.name = name
        self.session = session
        self.engine = engine
        self.quota_bytes = 0
        self.node_name = ""
        self.node_minor = 0
        self.why = "not connected yet"
        self._refusal = ""
        self.reserved = ReservedSlots()
        self._locks()
        #: These three change together, under ``_state``.
        self._reconnecting = Reconnecting()
        self._connection: Connection | None = None
        self._mappings: dict[int, Mapping] = {}
        #: Unused mappings, to be closed in the background.
        self._unused: list[Mapping] = []
        self._origin = os.urandom(_ORIGIN_BYTES)
        #: None in a forked child until its first request.
        self._thread: threading.Thread | None = None
        try:
            self._dial()
        except KVStoreError as error:
            self._refusal, self.why = str(error), self._without_path(error)
            self._notices.absent(self.why)
        self._start()
        forks.register(self)

    def _locks(self) -> None:
        #: Protects the state of connections, moves and mappings; never held during a wait.
        self._state = threading.Lock()
        self._reviving = threading.Lock()
        self._wake = threading.Event()

    @property
    def epoch(self) -> int:
        """See :class:`~kvstore.client.node_link.NodeLink`."""
        self._revive(CONNECT_TIMEOUT_S)
        return self._reconnecting.connection

    @property
    def connected(self) -> bool:
        """Whether a request can succeed now."""
        connection = self._connection
        return connection is not None and not connection.broken

    def request(
        self, message: wire.Request, timeout_s: float, epoch: int | None = None
    ) -> wire.Answer:
        """See :class:`~kvstore.client.node_link.NodeLink`."""
        deadline = monotonic() + timeout_s
        connection = self._connection_of(epoch, timeout_s)
        try:
            answer = connection.request(message, deadline)
        except (OSError, KVStoreError) as error:
            raise self._failed(connection, error) from error
        if isinstance(answer, wire.Failure):
            raise error_from_code(answer.code, answer.message, answer.field)
        return answer

    def request_all(
        self, messages: Sequence[wire.Request], timeout_s: float, epoch: int
    ) -> list[wire.Answer | KVStoreError]:
        """See :class:`~kvstore.client.node_link.NodeLink`."""
        deadline, connection = monotonic() + timeout_s, self._connection_of(epoch, timeout_s)
        try:
            answers = connection.request_all(messages, deadline)
        except (OSError, KVStoreError) as error:
            raise self._failed(connection, error) from error
        return [
            error_from_code(answer.code, answer.message, answer.field)
            if isinstance(answer, wire.Failure) else answer
            for answer in answers
        ]  # fmt: skip

    def _connection_of(self, epoch: int | None, timeout_s: float) -> Connection:
        """The connection for a request.

        Raises:
            PeerUnreachable, TransferTimeout: there is none, or another one now.
        """
        self._revive(timeout_s)
        connection = self._connection
        if connection is None or self._reconnecting.closing:
            raise PeerUnreachable(f"{self.path}: {self.why}")
        if epoch is not None and epoch != connection.number:
            raise PeerUnreachable(f"{self.path}: reconnected during a call")
        return connection

    def _failed(self, connection: Connection, error: OSError | KVStoreError) -> KVStoreError:
        """The error to raise after a request without an answer."""
        if connection.broken:
            self._lost(connection)
        return as_transfer_error(error, self.path)

    def send(self, message: wire.Request, epoch: int | None = None) -> None:
        """See :class:`~kvstore.client.node_link.NodeLink`."""
        connection = self._connection
        if connection is not None and epoch in (None, connection.number):
            connection.post(message, now=True)

    def send_later(self, message: wire.Request, epoch: int | None = None) -> None:
        """See :class:`~kvstore.client.node_link.NodeLink`.

        Waking the node at once would take some 50 µs from this process.
        """
        connection = self._connection
        if connection is not None and epoch in (None, connection.number):
            connection.post(message, now=False)

    def moving(self) -> Moving:
        """See :class:`~kvstore.client.node_link.NodeLink`."""
        self._revive(CONNECT_TIMEOUT_S)
        return Moving(self._begin, self._ended)

    def unfinished_moves(self) -> dict[int, int]:
        """Number of moves and views in progress, by the number of their connection."""
        with self._state:
            return self._reconnecting.unfinished()

    def close(self) -> None:
        """See :class:`~kvstore.client.node_link.NodeLink`.

        While a move or view is in progress the connection stays open, but no more requests are
        sent.
        """
        self._give_back(self.reserved.close())
        with self._state:
            self.why = "the store is closed"
            effects = self._reconnecting.close()
            connection = self._note(effects)
        self._hang_up(effects, connection)
        thread = self._thread
        if thread is not None and self._reconnecting.closed:
            thread.join(CONNECT_TIMEOUT_S * 3)
        if thread is None:
            self._tidy()

    def _give_back(self, slots: list[ReservedSlot]) -> None:
        """Slots that were reserved are not needed; nothing is being written to them."""
        for slot in slots:
            self.send(wire.AbortPut(slot.put), slot.epoch)

    # ---- connecting -------------------------------------------------------------------------

    def _dial(self) -> None:
        """Try once to connect and to send Hello.

        Raises:
            KVStoreError: the reason of a failure.
        """
        with self._state:
            number = self._reconnecting.dial()
        connection = Connection(self.path, number)
        try:
            hello = wire.Hello(
                0, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, self.name, self.session,
                self._origin, number, self.engine,
            )  # fmt: skip
            answer = connection.request(hello, monotonic() + CONNECT_TIMEOUT_S)
            if isinstance(answer, wire.Failure):
                raise error_from_code(answer.code, answer.message, answer.field)
            assert isinstance(answer, wire.Welcome)
        except (OSError, KVStoreError) as error:
            connection.close(str(error))
            raise as_transfer_error(error, self.path) from error
        with self._state:
            effects = self._reconnecting.adopt(number, answer.boot)
            if effects is not None:
                self._adopted(connection, answer)
                self._note(effects)
        if effects is None:
            connection.close("it is not needed any more")
        else:
            self._hang_up(effects, connection)

    def _adopted(self, connection: Connection, welcome: wire.Welcome) -> None:
        """Store the values of Welcome; the caller holds ``_state``."""
        self.session = welcome.session
        self.quota_bytes = welcome.quota_bytes
        self.node_name = welcome.node
        self.node_minor = welcome.minor
        self._connection = connection
        memory = self._reconnecting.memory
        if memory and memory not in self._mappings:
            session, boot = welcome.session, welcome.boot

            def fetch(
                numbers: Sequence[int], known: Sequence[int], keep: Callable[[int], None]
            ) -> list[int]:
                return fetch_extents(self.path, session, boot, numbers, known, keep)

            self._mappings[memory] = Mapping(boot, fetch)

    def _without_path(self, error: KVStoreError) -> str:
        """The text of an error, without the path that callers prepend."""
        return str(error).removeprefix(f"{self.path}: ")

    def _lost(self, connection: Connection) -> None:
        """The connection is broken, or the node has closed it."""
        why = connection.broken or "the node closed the connection"
        with self._state:
            if not self._reconnecting.lose(connection.number):
                return
            self._connection = None
            closing = self._reconnecting.closing
            self.why = self.why if closing else why
        connection.close(why)
        self._wake.set()
        if not closing:
            self._notices.lost(why)

    # ---- moves ------------------------------------------------------------------------------

    def _begin(self) -> tuple[StoreMove, Use]:
        with self._state:
            move = self._reconnecting.begin()
            if move is None:
                raise PeerUnreachable(f"{self.path}: {self.why}")
            return move, self._mappings[move.memory].use()

    def _ended(self, move: StoreMove) -> None:
        with self._state:
            effects = self._reconnecting.end(move)
            connection = self._note(effects)
        self._hang_up(effects, connection)
        if self._thread is None:
            self._tidy()

    def _note(self, effects: Effects) -> Connection | None:
        """Carry out effects of a decision on its connection, except hanging up.

        The caller holds ``_state``, so that no other decision is made in between.
        """
        connection = self._connection
        named = self.node_minor >= wire.SETTLED_MINOR
        if effects.settle and connection is not None and named:
            connection.post(wire.Settled(effects.settle), now=True)
        self._unused += [self._mappings.pop(number) for number in effects.unmap]
        return connection

    def _hang_up(self, effects: Effects, connection: Connection | None) -> None:
        if not effects.hang_up or connection is None:
            return
        said = connection.close("the store is closed")
        with self._state:
            self._reconnecting.hung_up(connection.number, said=said)
            if self._connection is connection:
                self._connection = None
        self._wake.set()

    # ---- in the background ------------------------------------------------------------------

    def _start(self) -> None:
        thread = threading.Thread(target=self._maintain, name="kvstore-link", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: the next request retries
            log.warning("%s: the connection to %s is not watched: %s", self.name, self.path, error)
        else:
            self._thread = thread

    def _maintain(self) -> None:
        attempt, asked, quiet, needed, postponed = 0, monotonic(), 0.0, monotonic(), 0
        while not self._reconnecting.closed:
            connection = self._connection
            if connection is not None:
                attempt = 0
                # First say that nobody looks soon: what is posted after that is sent at once.
                connection.watched = monotonic() - needed < _QUIET_AFTER_S
                if connection.postponed != postponed or self.reserved.any or self._unused:
                    postponed, needed = connection.postponed, monotonic()
                    connection.watched = True
                if connection.wait_closed(_TICK_S if connection.watched else _QUIET_TICK_S):
                    self._lost(connection)
                else:
                    connection.flush()
                self._give_back(self.reserved.unused())
                if monotonic() - asked > ASK_S:
                    self._ask()
                    asked = monotonic()
            else:
                self._wake.wait(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
                self._wake.clear()
                attempt, postponed = attempt + 1, 0  # of the new connection
                self._try_to_connect()
            self._tidy()
            if not self._reconnecting.closing or self.unfinished_moves():
                quiet = 0.0
            else:
                quiet = quiet or monotonic()
                if monotonic() - quiet > SETTLE_WAIT_S:
                    self._give_up()
        self._tidy()

    def _try_to_connect(self) -> None:
        if self._reconnecting.closed:
            return
        try:
            self._dial()
        except KVStoreError as error:
            if not self._reconnecting.closing:
                self.why = self._without_path(error)
            if nobody_listens(error):
                with self._state:
                    self._note(self._reconnecting.gone())
            elif isinstance(error, ProtocolError | EngineNameTaken) and str(error) != self._refusal:
                self._refusal = str(error)
                log.log(self._level, "%s: %s; misses until that changes", self.name, error)
        else:
            self._notices.back()

    def _ask(self) -> None:
        """Ask which extents are gone: an idle client would not notice otherwise."""
        with self._state:
            present = self._mappings.get(self._reconnecting.memory)
        try:
            if present is not None:
                present.ask()
        except KVStoreError as error:
            log.debug("the node did not say which extents are gone: %s", error)

    def _tidy(self) -> None:
        """Unmap unused memory."""
        with self._state:
            unused, self._unused = self._unused, []
            present = self._mappings.get(self._reconnecting.memory)
        for mapping in unused:
            mapping.close()
        if present is not None:
            present.sweep()

    def _give_up(self) -> None:
        log.warning(
            "%s: the node at %s did not answer for %s s: it frees what it holds for this process"
            " when the process ends", self.name, self.path, SETTLE_WAIT_S,
        )  # fmt: skip
        with self._state:
            self._note(self._reconnecting.give_up())

    # ---- fork -------------------------------------------------------------------------------

    def forked(self) -> None:
        """In a forked child: drop the parent's connection; the next request reconnects."""
        self._locks()
        for mapping in list(self._mappings.values()):
            mapping.forked()
        self._mappings, self._unused, self._connection = {}, [], None
        self._reconnecting.fork()
        self._origin = os.urandom(_ORIGIN_BYTES)
        self.why = "forked"
        self._thread = None

    def _revive(self, timeout_s: float) -> None:
        """Create the thread and connection that a forked child does not have.

        A fault of ours may have ended the thread, too.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        if not self._reviving.acquire(timeout=timeout_s):
            raise TransferTimeout(f"{self.path}: other requests took too long to connect")
        try:
            self._begin_anew()
        finally:
            self._reviving.release()

    def _begin_anew(self) -> None:
        if self._reconnecting.closing or (self._thread is not None and self._thread.is_alive()):
            return  # another thread was faster
        if self._connection is None:
            self._try_to_connect()
        self._start()
