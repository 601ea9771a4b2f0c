"""A node in the caller's process, for one engine only: no daemon, no socket."""

import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, monotonic_ns
from types import TracebackType
from typing import Any, Final

from msgspec import to_builtins

from kvstore import mover
from kvstore.client import forks
from kvstore.client.mapping import Mapping, Use
from kvstore.config import HostConfig, SSDConfig
from kvstore.node.desk import Desk
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.node.ssd import DiskTier
from kvstore.protocol import wire
from kvstore.protocol.errors import (
    CapacityError,
    KVStoreError,
    PeerUnreachable,
    TransferError,
    TransferTimeout,
    error_from_code,
)
from kvstore.state.tree.sessions import Peer
from kvstore.state.tree.slots import Replacement, SlotTable
from kvstore.tier.host import MEMORY_WAIT_S, HostMemory

log = logging.getLogger(__name__)

_MOVES_TIMEOUT_S: Final = 5.0
_LOCK_WAIT_S: Final = 1.0
_SENT_MAX: Final = 4096
_TICK_S: Final = 0.1
"""Maximum delay of deadlines while there are no calls."""


class _Moving:
    """One copy in the memory of an embedded store; only ``__exit__`` ends it, not its deletion."""

    def __init__(self, begin: Callable[[], Use], end: Callable[[Use], None]) -> None:
        self._begin = begin
        self._end = end

    def __enter__(self) -> Use:
        self._use = self._begin()
        return self._use

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._end(self._use)


class _Answers:
    """The desk's line for the one connection: keeps answers until their callers take them."""

    def __init__(self, send: Callable[[wire.Request], None]) -> None:
        self.answers: dict[int, wire.Answer] = {}
        self._send = send
        #: Requests whose callers have given up; leases and puts granted later are returned.
        self._abandoned: dict[int, wire.Request] = {}

    def abandon(self, identifier: int, request: wire.Request) -> None:
        """The caller of this request has given up."""
        self._abandoned[identifier] = request

    def answer(self, answer: wire.Answer) -> None:
        number = getattr(answer, "id", 0)
        abandoned = self._abandoned.pop(number, None)
        if abandoned is None:
            self.answers[number] = answer
        elif isinstance(abandoned, wire.Acquire):
            self._send(wire.Release(abandoned.lease, read=False))
        elif isinstance(abandoned, wire.BeginPut):
            self._send(wire.AbortPut(abandoned.put))

    def cut(self) -> None:
        raise AssertionError("a store in this process has one connection, and does not give it up")


class _Memory:
    """The node's memory, and the mapping of it that this process uses to read and write pages."""

    def __init__(self, host: HostMemory, mapping: Mapping) -> None:
        self._host = host
        self._mapping = mapping
        #: Memory is being replaced, or failed to be and is tried again.
        self._is_replacing = False

    def replace(self, replaced: list[Replacement]) -> None:
        if not (replaced or self._is_replacing):
            return
        gone = [one.old for one in replaced]
        self._host.replace(replaced)
        self._is_replacing = self._host.missing_bytes() > 0
        if gone:
            self._mapping.retire(gone)
            self._mapping.sweep()


class Embedded:
    """A node and its memory as a :class:`~kvstore.client.node_link.NodeLink`; thread-safe.

    It belongs to the process that created it: in a forked child everything is a miss.

    Args:
        host: capacity and limits.
        name: the node's name; a directory of the SSD tier belongs to the node that created it.
        ssd: the SSD tier; None, or no directories = no SSD tier.

    Raises:
        ConfigError, TierUnavailable: a directory cannot be used; the message names it and says why.
    """

    epoch = 1
    node_minor = wire.PROTOCOL_MINOR
    reserved = None

    def __init__(self, host: HostConfig, name: str, ssd: SSDConfig | None = None) -> None:
        """Create the memory, recover the SSD tier, and send Hello to the node."""
        boot = secrets.token_bytes(16)
        slots = SlotTable(host.extent_bytes, host.capacity_bytes // host.extent_bytes)
        self.node_name = name
        self.quota_bytes = quota = host.session_quota_bytes or host.capacity_bytes // 2
        limits = NodeLimits(quota, int(host.lease_s_max * 1000))
        self.node = Node(name, boot, slots, limits, lambda: secrets.token_bytes(16), host.policy)
        self.memory = HostMemory(name, boot, host.extent_bytes, prefault=False)
        self._mapping = Mapping(boot, self._fetch)
        #: Its events have no followers: one engine uses the store alone.
        self._desk = Desk(self.node, _Memory(self.memory, self._mapping), lambda _: None)
        self._identifier = 0
        #: Messages without an answer, until a thread with the lock passes them to the node.
        self._sent: deque[wire.Request] = deque()
        self._line = _Answers(self._sent.append)
        #: Copies and views in progress; protected by ``_moved``, as are those below.
        self._movers = 0
        #: The node may be used: until a close, a fault, or a fork.
        self._open = True
        self._closing = False
        #: Closed except for the memory, which the last copy releases.
        self._left = False
        self._disk_ended = True
        self._why = "the store is closed"
        #: The node has failed: from then on it is lost, as one behind a broken socket.
        self._failed = False
        self._disk: DiskTier | None = None
        self._locks()
        try:
            self.memory.create(extent.number for extent in slots.extents)
            self._mapping.prepare([extent.number for extent in slots.extents])
            if host.prefault:  # only now: while memory is touched, to map some takes milliseconds
                self.memory.start_prefault()
            if ssd is not None and ssd.directories:
                # `wake` takes no lock: it is called by threads that hold the tier's lock.
                self._disk = DiskTier(ssd, self.node, self.memory, self._has_work.set)
                self._desk.disk = self._disk
                if self._disk.recovered:
                    log.info("pages recovered: %s", self._disk.recovered)
        except KVStoreError:
            self.memory.close()
            raise
        self._driver = threading.Thread(target=self._drive, name="kvstore-embedded", daemon=True)
        if self._disk is not None:
            self._driver.start()
        self._connection = self._desk.connect(Peer(os.getpid(), os.getpid()), self._line)
        self.request(wire.Hello(0, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, name), 1.0)
        forks.register(self)

    def _locks(self) -> None:
        #: Protects the node, its answers and the disk; notified when an answer has arrived.
        self._answered = threading.Condition()
        #: Held for short times only; notified when a copy has ended.
        self._moved = threading.Condition()
        self._has_work = threading.Event()

    @property
    def connected(self) -> bool:
        """True until :meth:`close` or a fault, and in the process that opened it only."""
        return self._open

    def request(
        self, message: wire.Request, timeout_s: float, _epoch: int | None = None
    ) -> wire.Answer:
        """See :class:`~kvstore.client.node_link.NodeLink`."""
        deadline = monotonic() + timeout_s
        if not self._answered.acquire(timeout=timeout_s):
            raise TransferTimeout("other requests took too long")
        try:
            self._identifier += 1
            identifier = message.id = self._identifier  # type: ignore[union-attr]
            self._tell(message)
            try:
                answer = self._wait(identifier, deadline)
            except BaseException:
                self._line.abandon(identifier, message)
                raise
        except KVStoreError:
            raise
        except Exception as error:
            raise self._lost(error) from error
        finally:
            self._answered.release()
        if isinstance(answer, wire.Failure):
            raise error_from_code(answer.code, answer.message, answer.field)
        return answer

    def request_all(
        self, messages: Sequence[wire.Request], timeout_s: float, epoch: int
    ) -> list[wire.Answer | KVStoreError]:
        """See :class:`~kvstore.client.node_link.NodeLink`."""
        answers: list[wire.Answer | KVStoreError] = []
        for message in messages:
            try:
                answers.append(self.request(message, timeout_s, epoch))
            except TransferError:
                raise
            except KVStoreError as error:
                answers.append(error)
        return answers

    def send(self, message: wire.Request, _epoch: int | None = None) -> None:
        """See :class:`~kvstore.client.node_link.NodeLink`."""
        self._sent.append(message)
        # The thread with the lock delivers it; if too many wait, this thread waits for the lock.
        wait_s = _LOCK_WAIT_S if len(self._sent) >= _SENT_MAX else 0.0
        if self._answered.acquire(timeout=wait_s):
            try:
                self._tell_sent()
            except Exception as error:
                self._lost(error)
            finally:
                self._answered.release()

    send_later = send

    def moving(self) -> _Moving:
        """See :class:`~kvstore.client.node_link.NodeLink`."""
        return _Moving(self._begin, self._end)

    def close(self) -> None:
        """End the session and release the memory when no copy uses it any more.

        It waits a limited time for copies in progress; an open view keeps the memory.
        """
        with self._moved:
            if self._closing:
                return
            self._open, self._closing = False, True
        with self._answered:
            self._answered.notify_all()
        with self._moved:
            ended = self._moved.wait_for(lambda: not self._movers, _MOVES_TIMEOUT_S)
        with self._surviving():
            self._tell_sent()
            if not self._failed:  # its decisions are not carried out any more: nobody calls
                self.node.disconnected(self._connection, monotonic_ns(), ended=ended)
        disk_ended = self._close_disk()
        with self._moved:
            self._left, self._disk_ended = True, disk_ended
            last = not self._movers
        if last:
            self._give_back()
        else:
            log.warning("memory stays mapped until the last view of it is closed")

    def forked(self) -> None:
        """In a forked child: the store belongs to the parent; everything is a miss here."""
        self._locks()
        self._open, self._left, self._closing = False, False, True
        self._why = "the parent opened this store before the fork: open another one"
        self._mapping.forked()
        self.memory.forked()
        if self._disk is not None:
            self._disk.forked()
        self._sent.clear()

    def stats(self) -> dict[str, Any]:
        """The node's statistics and those of its tiers, as plain values.

        Raises:
            PeerUnreachable: this is a forked child, or the node has failed; the message says why.
        """
        if self._failed or not (self._open or self._left):
            raise PeerUnreachable(self._why)
        with self._answered:
            counts: dict[str, Any] = to_builtins(self._desk.stats())
            return {**counts, "mover": mover.description}

    def _lost(self, error: Exception) -> PeerUnreachable:
        """Use the node no more after a fault in it, because its state cannot be trusted.

        The caller holds the lock of the node.

        Returns:
            What to raise: reads become misses, and stores are dropped.
        """
        if not self._failed:
            self._open, self._failed = False, True
            self._why = f"the node in this process has failed: {error!r}"
            log.error("everything is a miss from now on: %s", self._why, exc_info=error)
        self._sent = deque(maxlen=0)  # it is told nothing any more
        self._answered.notify_all()
        return PeerUnreachable(self._why)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Hold the lock of the node, which is lost after a fault in here."""
        with self._answered:
            try:
                yield
            except Exception as error:
                self._lost(error)

    def _close_disk(self) -> bool:
        """Close the SSD tier within its time limit; False if the disk still uses the memory."""
        if self._disk is None:
            return True
        self._has_work.set()
        self._driver.join(_MOVES_TIMEOUT_S)
        self._disk.close()
        with self._surviving():
            while not self._failed:
                self._disk.poll(monotonic_ns())
                if not self._disk.behind:  # the closed tier adds nothing
                    break
        return self._disk.drain(0.0)

    def _drive(self) -> None:
        """Process completions of the disk and deadlines while there are no calls."""
        while self._open:
            self._has_work.wait(_TICK_S)
            self._has_work.clear()
            with self._surviving():
                self._advance()

    def _begin(self) -> Use:
        with self._moved:
            if not self._open:
                raise PeerUnreachable(self._why)
            self._movers += 1
        return self._mapping.use()

    def _end(self, use: Use) -> None:
        use.end()
        with self._moved:
            self._movers -= 1
            last = self._left and not self._movers
            self._moved.notify_all()
        if last:
            self._give_back()

    def _give_back(self) -> None:
        """Release the memory; nothing here uses it any more."""
        self._mapping.close()
        if self._disk_ended:
            self.memory.close()
        else:
            log.error("memory stays mapped: the disk may still write into it")

    def _wait(self, identifier: int, deadline: float) -> wire.Answer:
        answers = self._line.answers
        while identifier not in answers:
            if not self._open:
                raise PeerUnreachable(self._why)
            if monotonic() >= deadline:
                raise TransferTimeout("the node did not answer in time")
            # waits for another thread's put or for the disk, until its deadline
            self._answered.wait(0.005)
            self._advance()
        return answers.pop(identifier)

    def _advance(self) -> None:
        """Process completions of the disk and deadlines, unless the node may not be used."""
        if not self._open:
            return
        self._tell_sent()
        if self._disk is not None:
            self._desk.poll_disk()
        self._desk.advance()
        self._answered.notify_all()

    def _tell(self, message: wire.Request) -> None:
        if not self._open:
            raise PeerUnreachable(self._why)
        self._tell_sent()
        if 0 < self.node.next_deadline_ns() <= monotonic_ns():
            self._desk.advance()
        self._desk.receive(self._connection, message)
        self._answered.notify_all()

    def _tell_sent(self) -> None:
        """Pass on messages without an answer, in the order in which they were sent."""
        while self._sent:
            self._desk.receive(self._connection, self._sent.popleft())
        self._answered.notify_all()

    def _fetch(
        self, numbers: Sequence[int], _known: Sequence[int], keep: Callable[[int], None]
    ) -> Sequence[int]:
        try:
            for number in numbers:
                if self.memory.pending(number):
                    self.memory.wait(number, MEMORY_WAIT_S)
                descriptor = self.memory.descriptor(number)
                if descriptor is None:
                    raise CapacityError(f"extent {number} has no memory now")
                keep(os.dup(descriptor))
        except OSError as error:
            raise CapacityError(f"memory cannot be mapped: {error}") from error
        return ()
