"""A prefill engine's manager: it pushes KV from the engine's pool to decode engines.

One object for each rank. No method waits for the network.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.handoff.aux_data import AuxData, encode_aux
from kvstore.handoff.device_reads import DeviceReads
from kvstore.handoff.effects import Effect, PushJob, SendTo, Submit
from kvstore.handoff.greeting import CONNECT_S, GREETING_S, PROTOCOL, Greeter, SealedStream
from kvstore.handoff.job_watch import JobObserver, JobWatch
from kvstore.handoff.links import (
    LinkThreads,
    PushLink,
    Ticker,
    cause_of,
    longest_idle,
    note_refused,
    refusals,
    send_limit_s,
)
from kvstore.handoff.listening import LinkListener
from kvstore.handoff.memory import HandoffPool
from kvstore.handoff.messages import RangesHead, RangesWritten, encode_message, read_from_decode
from kvstore.handoff.places import pack_ranges
from kvstore.handoff.push_writes import TCP, PushWrites
from kvstore.handoff.registering import RankLease
from kvstore.handoff.registry import RankRecord, RegistryClient
from kvstore.handoff.sending import Senders
from kvstore.handoff.staging import Staging
from kvstore.handoff.states import (
    FailureCode,
    HandoffFailure,
    HandoffProgress,
    HandoffSide,
    HandoffStatus,
    Layer,
    Patience,
    Reduce,
    State,
    agreed,
)
from kvstore.handoff.writing import BlockWriter
from kvstore.mover.push_way import DeviceFence
from kvstore.process.faults import Faults
from kvstore.process.tls import CertificateFiles
from kvstore.protocol.errors import CapacityError, DeviceUnavailable, KVStoreError
from kvstore.transport.streams import DataStream

LINKS_MAX = 256
"""Maximum linked ranks of decode engines; of more, the one that is idle for longest gives way."""
_LOG: Final = logging.getLogger(__name__)


class PrefillManager:
    """All handoffs of one rank of a prefill engine; thread-safe.

    Args:
        pool: of the engine.
        space: identifies the KV that may be shared, at most 64 bytes; the same at decode.
        secret: :func:`kvstore.handoff.greeting.read_secret`; the same at decode.
        registry: URL of the instance's registry; empty = none.
        listen: address and port of the listening socket, by which it is also reached; port 0 = any
            free one.
        patience: deadlines.
        writer: another transport, for decode engines that have it too; the manager closes it, even
            if this raises. None = only TCP.
        certificates: shown to decode and to the registry, which must show ones of the same
            authority; None = no TLS.

    Attributes:
        address: ``host:port`` of the manager.

    Raises:
        InvalidArgument: it cannot listen there, ``registry`` is not a URL, or a file of
            ``certificates`` cannot be used; or another transport is given for a pool on a device;
            with its field.
        DeviceUnavailable: the device of the pool has no memory for staging, or it cannot be pinned.
    """

    def __init__(
        self, pool: HandoffPool, space: bytes, secret: bytes, *, registry: str = "",
        listen: tuple[str, int] = ("127.0.0.1", 0), patience: Patience | None = None,
        writer: BlockWriter | None = None, certificates: CertificateFiles | None = None,
    ) -> None:  # fmt: skip
        self._pool = pool
        self._group = pool.group
        self._boot = os.urandom(16)
        self._greeter = Greeter(secret, space, pool.shape, self._group, boot=self._boot)
        patience = patience or Patience()
        self._silence_s, self._send_s = patience.silence_s, send_limit_s(patience)
        self._core = Senders(pool.shape, patience, self._group.rank)
        self._watch = JobWatch(self._group.rank)
        self._lock = threading.Lock()
        self._links: dict[bytes, PushLink] = {}
        self._threads = LinkThreads()
        self._closed = False
        self.faults = Faults(_LOG, "handoff, prefill")
        with contextlib.ExitStack() as undo:
            if writer is not None:
                undo.callback(writer.close)
                pool.check_transport("writer")
            self._tls = certificates.accepting() if certificates is not None else None
            tls = certificates.connecting() if certificates is not None else None
            client = RegistryClient(registry, secret, tls) if registry else None
            self._writes = PushWrites(writer, pool, self._written)
            self._reads: DeviceReads | None = None
            if pool.device is not None:
                self._reads = DeviceReads(pool, self._read_ready, self._read_failed)
                undo.callback(self._reads.close)
            self._listener = LinkListener(
                listen, self._greet, self._threads, self.faults, self._tls
            )
            undo.callback(self._listener.close)
            self.address = self._listener.address
            self._ticker = Ticker(self._tick, "kvstore-handoff-ticker")
            undo.callback(self._ticker.close)
            self._registration: RankLease | None = None
            if client is not None:
                self._registration = RankLease(client, self._record(), self.faults)
            undo.pop_all()

    # ---- the engine -------------------------------------------------------------------------

    def sender(self, room: int, token_count: int) -> "Sender":
        """Start the handoff of a request.

        Args:
            room: drawn by the router for this request; decode gets the same.
            token_count: tokens of the prompt.

        Raises:
            InvalidArgument: the room was used before, or a number is wrong.
            CapacityError: too many handoffs are in progress, or the manager is closed; nothing was
                started.
        """
        with self._lock:
            if self._closed:
                raise CapacityError("the manager was closed", "closed")
            progress, effects = self._core.open(room, token_count, time.monotonic_ns())
            self._carry_out(effects)
        return Sender(self, room, progress)

    def observe_jobs(self, observe: JobObserver) -> None:
        """Report each ended job to ``observe``; call it before the first sender is created."""
        self._watch.observe = observe

    def poll(self, senders: "Sequence[Sender]", reduce: Reduce | None = None) -> list[State]:
        """The states of handoffs; never waits, unless ``reduce`` does.

        Args:
            senders: in the same order at all ranks, if there are several.
            reduce: agrees on the lowest state among the ranks of an engine.
        """
        return agreed([sender.state for sender in senders], reduce)

    def describe(self) -> list[HandoffStatus]:
        """The state of each handoff."""
        with self._lock:
            return self._core.describe(time.monotonic_ns())

    def stats(self) -> dict[str, int]:
        """Counts since the start, and current numbers."""
        with self._lock:
            return {
                **self._core.counts, **self.faults.counts, "links": len(self._links),
                "threads": len(self._threads), **self._writes.counts,
                "device_copies": self._reads.copying if self._reads is not None else 0,
            }  # fmt: skip

    def close(self) -> None:
        """Fail all handoffs, close all connections, wait for all threads: nothing is read after."""
        if self._registration is not None:
            self._registration.close()
        with self._lock:
            self._closed = True
            links = list(self._links.values())
        self._listener.close()
        for link in links:
            self._drop(link, FailureCode.CLOSED, "the manager was closed")
        self._threads.join(GREETING_S + self._silence_s)
        self._writes.close()
        if self._reads is not None:
            self._reads.close()
        self._ticker.close()
        self.act(Senders.abort_all)  # those that decode had not spoken of

    # ---- what senders call ------------------------------------------------------------------

    def act(self, call: Callable[[Senders, int], list[Effect]]) -> None:
        """Pass an event to the core, and carry out its effects."""
        with self._lock:
            self._carry_out(call(self._core, time.monotonic_ns()))

    def push(self, room: int, layers: range, positions: range, blocks: Sequence[int]) -> None:
        """See :meth:`Sender.send`."""
        generations = self._pool.generations(blocks)
        self._push(room, lambda core, now, after: core.push(
            room, layers, positions, blocks, generations, now, after
        ))  # fmt: skip

    def push_state(self, room: int, name: str, positions: range, blocks: Sequence[int]) -> None:
        """See :meth:`Sender.send_state`."""
        numbers = self._pool.state_generations(name, blocks)
        self._push(room, lambda core, now, after: core.push_state(
            room, name, positions, blocks, numbers, now, after
        ))  # fmt: skip

    def abort(self, room: int) -> None:
        """See :meth:`Sender.abort`."""
        self.act(lambda core, now: core.abort(room, now))

    def holds_blocks(self, room: int) -> bool:
        """See :attr:`Sender.holds_blocks`."""
        with self._lock:
            held = self._core.holds_blocks(room)
        return held or (self._reads is not None and self._reads.holds_blocks(room))

    # ---- inside -----------------------------------------------------------------------------

    def _push(
        self, room: int, push: Callable[[Senders, int, tuple[DeviceFence, ...]], list[Effect]]
    ) -> None:
        """Push data once the device has finished the engine's queued work."""
        try:
            after = self._pool.fence()
        except DeviceUnavailable as error:
            why = str(error)
            self.act(lambda core, now: core.device_failed(room, why, now))
            return
        self.act(lambda core, now: push(core, now, after))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        """Carry out effects, under the lock."""
        left = deque(effects)
        while left:
            effect = left.popleft()
            if isinstance(effect, SendTo):
                link = self._links.get(effect.link)
                if link and not link.outbox.put_message(encode_message(effect.message)):
                    link.close()  # its threads end, and tell
            elif isinstance(effect, Submit):
                link = self._links.get(effect.job.link)
                self._watch.submitted(effect.job)
                if link is not None and self._reads is not None and not effect.job.aux:
                    self._reads.submit(effect.job)
                elif link is None or not link.outbox.put_job(effect.job):
                    failure = self._failure(FailureCode.PEER_CLOSED, "the link was closed")
                    left.extend(self._end_job(effect.job, failure))

    def _tick(self) -> None:
        self.act(lambda core, now: core.tick(now))

    def _record(self) -> RankRecord:
        """The record for the registry."""
        group, part = self._group, self._pool.shape.part
        return RankRecord(
            group.rank, self.address, self._boot.hex(), 0, part.layers, part.heads,
            self._pool.shape, self._greeter.space.hex(), self._writes.transports, PROTOCOL, 0.0,
            len(group.parts), group.data_rank, group.data_ranks,
        )  # fmt: skip

    def _greet(self, stream: DataStream, peer: str, known: Callable[[], None]) -> None:
        """Greet a connection, then be the thread that uses it."""
        cause, greeted = "tls", None
        try:
            stream.begin(time.monotonic_ns() + int(GREETING_S * 1e9))
            cause = "greeting"
            greeted = self._greeter.answer(stream)
        except KVStoreError as error:
            self.faults.note(cause, f"{peer}: {error}")
        finally:
            known()
            if greeted is None:
                stream.close()
        if greeted is None:
            return
        greeting, target, sealed = greeted
        link = self._link(greeting.link, f"{greeting.name[:64]} at {peer}")
        if link is None or not link.add(greeting.purpose, sealed):
            self.faults.note("greeting", f"{peer}: too many links, or one that there is already")
            stream.close()
            return
        with self._lock:
            if not link.is_closed:
                self._core.linked(link.number, target, peer)
        try:
            if not link.connected.wait(CONNECT_S + GREETING_S):
                self._fault(link, FailureCode.PEER_CLOSED, "it made one connection only")
            elif greeting.purpose == "messages":
                self._read(link, sealed)
            else:
                self._write(link, sealed)
        finally:
            self._drop(link, FailureCode.PEER_CLOSED, "its thread has ended")
            sealed.close()

    def _link(self, number: bytes, peer: str) -> PushLink | None:
        with self._lock:
            link = self._links.get(number)
            is_new = link is None and not self._closed
            if is_new and (len(self._links) < LINKS_MAX or self._give_way()):
                link = self._links[number] = PushLink(number, peer)
            return link

    def _give_way(self) -> bool:
        """Close the link that is idle for longest, under the lock; False = none is."""
        busy = self._core.busy_links()
        idle = longest_idle(one for one in self._links.values() if one.number not in busy)
        if idle is not None:
            self.faults.count("idle_links_closed")
            self._dropped(idle, FailureCode.CLOSED, "others need its place")
        return idle is not None

    def _drop(self, link: PushLink, code: FailureCode, why: str) -> None:
        """Close a link, and fail the handoffs on it."""
        with self._lock:
            self._dropped(link, code, why)

    def _dropped(self, link: PushLink, code: FailureCode, why: str) -> None:
        """The same under the lock."""
        link.close()
        if self._links.get(link.number) is not link:  # or its peer has made it again
            return
        del self._links[link.number]
        now_ns = time.monotonic_ns()
        self._carry_out(self._core.closed(link.number, code, f"{link.peer}: {why}", now_ns))
        failure = self._failure(code, why)
        unread = self._reads.drop(link.number) if self._reads is not None else []
        for job in link.outbox.left() + unread:
            self._carry_out(self._end_job(job, failure))

    def _read(self, link: PushLink, sealed: SealedStream) -> None:
        """Read decode's messages until the link ends."""
        while not link.is_closed:
            try:
                message = read_from_decode(sealed.receive(self._silence_s))
            except KVStoreError as error:
                self._fault(link, cause_of(error), str(error))
                return
            with self._lock:
                if not link.is_closed:
                    refused, now_ns = refusals(self._core.counts), time.monotonic_ns()
                    self._carry_out(self._core.received(link.number, message, now_ns))
                    note_refused(self.faults, link, message, self._core.counts, refused)

    def _write(self, link: PushLink, sealed: SealedStream) -> None:
        """Write messages and ranges until the link ends."""
        staging = Staging()
        while (item := link.outbox.next()) is not None:
            failure: HandoffFailure | None
            failure = self._failure(FailureCode.CLOSED, "its writer has ended")
            try:
                if isinstance(item, bytes):
                    sealed.send(item, [], self._send_s)
                elif self._writes.submit(item):
                    item = b""  # its end is told by the other transport
                else:
                    failure = self._send(item, sealed, staging)
            except KVStoreError as error:
                failure = self._failure(FailureCode.PEER_CLOSED, str(error))
                self._fault(link, FailureCode.PEER_CLOSED, str(error))
            finally:  # a job that has no end would hold its blocks for good
                if isinstance(item, PushJob):
                    self._completed(item, failure)

    def _send(self, job: PushJob, sealed: SealedStream, staging: Staging) -> HandoffFailure | None:
        """Send ranges, straight from the pool if they are whole; returns why they were not sent."""
        if self._reads is not None and not job.aux:
            places, digests = self._reads.read(job)
        else:
            places, digests = staging.read(self._pool, job)
        if not self._pool.is_unchanged(job):  # after the digest: what was digested was right
            why = "a block was given away before it was sent"
            return self._failure(FailureCode.BLOCKS_REUSED, why)
        head = encode_message(RangesHead(job.room, pack_ranges(job.ranges), digests))
        sealed.send(head, places, self._send_s)
        return None

    def _written(self, job: PushJob, message: RangesWritten, why: str, doubtful: bool) -> None:  # noqa: FBT001
        """The other transport has ended a job."""
        failure = self._failure(FailureCode.WRITE, why) if why else None
        self._watch.ended(job, failure, self._writes.transports[-1])
        if failure is not None:
            self.faults.note("write", why)
        with self._lock:
            if failure is None:  # before anything that follows from the job's end
                self._carry_out([SendTo(job.link, message)])
            now_ns = time.monotonic_ns()
            self._carry_out(self._core.completed(job.number, failure, now_ns, doubtful=doubtful))

    def _completed(self, job: PushJob, failure: HandoffFailure | None) -> None:
        with self._lock:
            self._carry_out(self._end_job(job, failure))

    def _end_job(self, job: PushJob, failure: HandoffFailure | None) -> list[Effect]:
        """A job of the link has ended; under the lock."""
        self._watch.ended(job, failure, TCP)
        if self._reads is not None:
            self._reads.ended(job)
        return self._core.completed(job.number, failure, time.monotonic_ns())

    def _read_ready(self, job: PushJob) -> None:
        """The bytes of a job are in staging."""
        with self._lock:
            link = self._links.get(job.link)
            if link is None or not link.outbox.put_job(job):
                failure = self._failure(FailureCode.PEER_CLOSED, "the link was closed")
                self._carry_out(self._end_job(job, failure))

    def _read_failed(self, job: PushJob, why: str) -> None:
        self.faults.note(FailureCode.DEVICE, f"room {job.room}: {why}")
        self._completed(job, self._failure(FailureCode.DEVICE, why))

    def _failure(self, code: FailureCode, why: str) -> HandoffFailure:
        layer = Layer.PROTOCOL if code is FailureCode.BLOCKS_REUSED else Layer.TRANSPORT
        return HandoffFailure(code, HandoffSide.PREFILL, self._group.rank, layer, why[:200])

    def _fault(self, link: PushLink, code: FailureCode, why: str) -> None:
        if not link.is_closed:
            self.faults.note(code, f"{link.peer}: {why}")
        self._drop(link, code, why)


class Sender:
    """The handoff of one request, at prefill; created by :meth:`PrefillManager.sender`.

    Attributes:
        room: of the request.
        progress: state, times and bytes; only read it.
    """

    __slots__ = ("_manager", "progress", "room")

    def __init__(self, manager: PrefillManager, room: int, progress: HandoffProgress) -> None:
        self._manager = manager
        self.progress = progress
        self.room = room

    @property
    def state(self) -> State:
        """The state; reading it takes no lock."""
        return self.progress.state

    @property
    def failure(self) -> HandoffFailure | None:
        """Why it is FAILED; None in every other state."""
        return self.progress.failure

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks that were sent may still be read: do not give them away before."""
        return self._manager.holds_blocks(self.room)

    def send(self, layers: range, positions: range, blocks: Sequence[int]) -> None:
        """Push the KV of some layers and positions; returns at once, even without decode.

        Call it in the step thread after each layer of each chunk, when the KV is in the pool.
        Nothing happens if the handoff has ended.

        Args:
            layers: adjacent layers.
            positions: adjacent positions: numbers of blocks of the request, from its beginning.
            blocks: block of the pool for each position; all their slots are written.

        Raises:
            InvalidArgument: something is outside the request or the pool, or was sent before.
        """
        self._manager.push(self.room, layers, positions, blocks)

    def send_state(self, name: str, positions: range, blocks: Sequence[int]) -> None:
        """Push state data, when all its layers are in the buffer; otherwise as :meth:`send`.

        Args:
            name: of the state buffer.
            positions: of the kind ``slot``: ``range(1)``; of ``last``: among the last positions of
                the prompt; of ``every``: any. Adjacent, each once.
            blocks: block of the buffer for each position.

        Raises:
            InvalidArgument: something is outside the request or the buffer, or was sent before.
        """
        self._manager.push_state(self.room, name, positions, blocks)

    def finish(self, aux: AuxData) -> None:
        """Send the aux data, after all layers of all positions, and all state data.

        Raises:
            InvalidArgument: something was not sent, or the aux data is too large.
        """
        packed = encode_aux(aux)
        self._manager.act(lambda core, now: core.finish(self.room, packed, now))

    def renew(self) -> None:
        """The request waits in the engine's queue; call it in each step, so that decode waits."""
        self._manager.act(lambda core, now: core.renew(self.room, now))

    def abort(self) -> None:
        """Give the request up; its blocks may be read until :attr:`holds_blocks` is False."""
        self._manager.abort(self.room)

    def close(self) -> None:
        """Ask no more; one that has not ended is aborted. Call it when no blocks are held."""
        self._manager.act(lambda core, now: core.close(self.room, now))
