"""The node in the caller's own process, for one engine alone: no daemon, no socket."""

import logging
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, monotonic_ns
from typing import Any, Final

from kvstore import mover, wire
from kvstore.config import HostConfig, SSDConfig
from kvstore.disk import DiskTier
from kvstore.errors import (
    CapacityError,
    KVStoreError,
    PeerUnreachable,
    ProtocolError,
    TransferTimeout,
    error_from_code,
)
from kvstore.mapping import Mapping
from kvstore.node import Node
from kvstore.requests import NodeLimits
from kvstore.state.sessions import Peer
from kvstore.state.slots import SlotTable
from kvstore.tier.host import MEMORY_WAIT_S, HostMemory

log = logging.getLogger(__name__)

_CONNECTION: Final = 1
_MOVES_TIMEOUT_S: Final = 30.0
_TICK_S: Final = 0.1
"""How late a deadline may be applied while nobody calls."""


class Embedded:
    """A node and its memory as a :class:`~kvstore.link.NodeLink`; every thread may use it.

    Args:
        host: capacity and limits.
        name: names the node; a directory of the SSD tier belongs to the node that made it.
        ssd: the SSD tier; None, or one without directories = none.

    Raises:
        ConfigError, TierUnavailable: a directory cannot be used; names it and why.
    """

    epoch = 1

    def __init__(self, host: HostConfig, name: str, ssd: SSDConfig | None = None) -> None:
        """Make the memory, take over what is on disk, and say Hello to the node."""
        boot = secrets.token_bytes(16)
        slots = SlotTable(host.extent_bytes, host.capacity_bytes // host.extent_bytes)
        self.quota_bytes = quota = host.session_quota_bytes or host.capacity_bytes // 2
        limits = NodeLimits(quota, int(host.lease_s_max * 1000))
        self.node = Node(name, boot, slots, limits, lambda: secrets.token_bytes(16), host.policy)
        self.memory = HostMemory(name, boot, host.extent_bytes, prefault=host.prefault)
        try:
            self.memory.create(extent.number for extent in slots.extents)
        except KVStoreError:
            self.memory.close()
            raise
        self._mapping = Mapping(boot, self._fetch)
        #: The node; also signalled when an answer has come.
        self._answered = threading.Condition()
        self._answers: dict[int, wire.Answer] = {}
        #: Threads inside :meth:`moving`; as all of the below, protected by ``_answered``.
        self._movers = 0
        self._identifier = 0
        self._open = True
        self._disk: DiskTier | None = None
        self._has_work = threading.Event()
        if ssd is not None and ssd.directories:
            try:
                # `wake` takes no lock: it comes from threads that hold the tier's own.
                self._disk = DiskTier(ssd, self.node, self.memory, self._has_work.set)
            except KVStoreError:
                self.memory.close()
                raise
        self._driver = threading.Thread(target=self._drive, name="kvstore-embedded", daemon=True)
        if self._disk is not None:
            self._driver.start()
        self.node.connected(_CONNECTION, Peer(os.getpid(), os.getpid()))
        self.request(wire.Hello(0, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, name), 1.0)

    @property
    def connected(self) -> bool:
        """True until :meth:`close`."""
        return self._open

    def request(
        self, message: wire.Request, timeout_s: float, _epoch: int | None = None
    ) -> wire.Answer:
        """See :class:`~kvstore.link.NodeLink`."""
        deadline = monotonic() + timeout_s
        with self._answered:
            self._identifier += 1
            identifier = message.id = self._identifier  # type: ignore[union-attr]
            self._tell(message)
            while identifier not in self._answers:
                if not self._open:
                    raise PeerUnreachable("the store is closed")
                if monotonic() >= deadline:
                    raise TransferTimeout("the node did not answer in time")
                # It waits for another thread's put, or for the disk; its own deadline ends it.
                self._answered.wait(0.005)
                self._advance()
            answer = self._answers.pop(identifier)
        if isinstance(answer, wire.Failure):
            raise error_from_code(answer.code, answer.message, answer.field)
        return answer

    def send(self, message: wire.Request) -> None:
        """See :class:`~kvstore.link.NodeLink`."""
        with self._answered:
            if self._open:
                self._tell(message)

    send_later = send

    @contextmanager
    def moving(self) -> Iterator[Mapping]:
        """See :class:`~kvstore.link.NodeLink`."""
        with self._answered:
            if not self._open:
                raise PeerUnreachable("the store is closed")
            self._movers += 1
        try:
            yield self._mapping
        finally:
            with self._answered:
                self._movers -= 1
                self._answered.notify_all()

    def close(self) -> None:
        """End the session and give the memory back, once no move touches it any more."""
        with self._answered:
            if not self._open:
                return
            self._open = False
            self._answered.notify_all()
            ended = self._answered.wait_for(lambda: not self._movers, _MOVES_TIMEOUT_S)
            self.node.disconnected(_CONNECTION, monotonic_ns(), ended=True)
        disk_ended = self._close_disk()
        if ended:
            self._mapping.close()
        else:
            log.error("memory stays mapped: a move has not ended for %s s", _MOVES_TIMEOUT_S)
        if disk_ended:
            self.memory.close()
        else:
            log.error("memory stays mapped: the disk may still write into it")

    def stats(self) -> dict[str, Any]:
        """The node's statistics and those of its tiers, as plain values."""
        with self._answered:
            return {
                **self.node.stats(),
                "mover": mover.description,
                "ssd": self._disk.stats() if self._disk is not None else None,
            }

    def _close_disk(self) -> bool:
        """End the SSD tier within its own bound; False while the disk still holds memory."""
        if self._disk is None:
            return True
        self._has_work.set()
        self._driver.join()
        self._disk.close()
        with self._answered:
            self._disk.poll(monotonic_ns())
        return self._disk.drain(0.0)

    def _drive(self) -> None:
        """Take what the disk has done, and apply deadlines, when nobody calls."""
        while self._open:
            self._has_work.wait(_TICK_S)
            self._has_work.clear()
            with self._answered:
                if self._open:
                    self._advance()

    def _advance(self) -> None:
        now_ns = monotonic_ns()
        if self._disk is not None:
            self._disk.poll(now_ns)
        self.node.advance(now_ns)
        self._collect()

    def _tell(self, message: wire.Request) -> None:
        if not self._open:
            raise PeerUnreachable("the store is closed")
        now_ns = monotonic_ns()
        if 0 < self.node.next_deadline_ns() <= now_ns:
            self.node.advance(now_ns)
        if isinstance(message, wire.Stats):
            raise ProtocolError("an embedded node has no statistics service; use stats()")
        self.node.receive(_CONNECTION, message, now_ns)
        self._collect()

    def _collect(self) -> None:
        """Carry out what the node decided, then hand out its answers."""
        while self.node.unfinished:
            self.node.go_on(monotonic_ns())
        self.memory.replace(self.node.pages.slots.replaced)
        if self._disk is not None:
            self._disk.flush()
        self.node.actions.clear()
        for _, answer in self.node.outbox:
            self._answers[getattr(answer, "id", 0)] = answer
        self.node.outbox.clear()
        self._answered.notify_all()

    def _fetch(self, numbers: Sequence[int]) -> Sequence[int]:
        descriptors: list[int] = []
        try:
            for number in numbers:
                if self.memory.pending(number):
                    self.memory.wait(number, MEMORY_WAIT_S)
                descriptor = self.memory.descriptor(number)
                if descriptor is None:
                    raise CapacityError(f"extent {number} has no memory for the moment")
                descriptors.append(os.dup(descriptor))
        except (OSError, CapacityError) as error:
            for given in descriptors:
                os.close(given)
            raise CapacityError(f"memory cannot be mapped: {error}") from error
        return descriptors
