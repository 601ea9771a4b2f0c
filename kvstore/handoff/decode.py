"""A decode engine's manager: KV of prefill engines arrives straight in the engine's pool.

One object per rank. No method waits for the network.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

from kvstore.handoff.aux_data import AUX_BYTES_MAX, AuxData, decode_aux
from kvstore.handoff.connecting import end_links, link_peer, link_to
from kvstore.handoff.effects import Effect, EndEngine, EndLink, Landing, SendTo
from kvstore.handoff.greeting import CONNECT_S, Greeter, SealedStream
from kvstore.handoff.landings import DeviceReader, HostReader, open_landings, skip
from kvstore.handoff.links import (
    LinkThreads,
    PeerLinks,
    PushLink,
    Ticker,
    cause_of,
    longest_idle,
    note_refused,
    refusals,
    send_limit_s,
)
from kvstore.handoff.memory import AuxSlots, HandoffPool
from kvstore.handoff.messages import (
    LandingPlace,
    RangesHead,
    RangesWritten,
    encode_message,
    read_from_prefill,
)
from kvstore.handoff.peers import PeerRank, peer_ranks
from kvstore.handoff.receiving import Receivers
from kvstore.handoff.registry import RegistryClient
from kvstore.handoff.states import (
    FailureCode,
    HandoffFailure,
    HandoffProgress,
    HandoffStatus,
    Patience,
    Reduce,
    State,
    agreed,
)
from kvstore.handoff.writing import LandingEngine
from kvstore.process.faults import Faults
from kvstore.process.tls import CertificateFiles
from kvstore.protocol.errors import (
    CapacityError,
    DeviceUnavailable,
    KVStoreError,
    PeerUnreachable,
)

PEERS_MAX = 64
"""Maximum linked prefill instances; of more, the one that is idle for longest gives way."""
LINKS_MAX = 256
"""Maximum ranks of these together."""
_LOG: Final = logging.getLogger(__name__)


class DecodeManager:
    """All handoffs of one rank of a decode engine; thread-safe.

    Args:
        pool: of the engine.
        space: identifies the KV that may be shared, at most 64 bytes; the same at prefill.
        secret: :func:`kvstore.handoff.greeting.read_secret`; the same at prefill.
        name: of the engine, for logs of the other side.
        aux_slots: handoffs at a time; each has 128 KiB for its aux data.
        patience: deadlines.
        engine: another transport, through which prefill engines that have it too write KV to the
            pool; the manager closes it, even if this raises. None = only TCP.
        certificates: shown to prefill and its registry, which must show ones of the same authority;
            None = no TLS.

    Raises:
        InvalidArgument: a file of ``certificates`` cannot be used, or another transport is given
            for a pool on a device; with its field.
        DeviceUnavailable: the device of the pool has no memory for staging, or it cannot be pinned.
    """

    def __init__(
        self, pool: HandoffPool, space: bytes, secret: bytes, *, name: str = "decode",
        aux_slots: int = 64, patience: Patience | None = None,
        engine: LandingEngine | None = None, certificates: CertificateFiles | None = None,
    ) -> None:  # fmt: skip
        self._pool, self._secret, self._group = pool, secret, pool.group
        self._greeter = Greeter(secret, space, pool.shape, self._group, name=name)
        self._aux = AuxSlots(aux_slots, AUX_BYTES_MAX)
        patience, rank = patience or Patience(), self._group.rank
        self._silence_s, self._send_s = patience.silence_s, send_limit_s(patience)
        self._core = Receivers(pool.shape, aux_slots, AUX_BYTES_MAX, patience, rank)
        self._lock = threading.Lock()
        self._links: dict[str, PeerLinks] = {}  # peer → the links that are up or being made
        self._threads, self._over = LinkThreads(), threading.Event()
        self.faults = Faults(_LOG, "handoff, decode")
        self._engine = engine
        self._transport = engine.transport if engine is not None else ""
        staged = engine.staged_address if engine is not None else 0
        with contextlib.ExitStack() as undo:
            if engine is not None:
                undo.callback(engine.close)
                pool.check_transport("engine")
            self._tls = certificates.connecting() if certificates is not None else None
            calls = self._landed, self._device_failed
            self._landings = open_landings(pool, self._aux, staged, *calls)
            undo.callback(self._landings.close)
            self._ticker = Ticker(self._tick, "kvstore-handoff-ticker")
            undo.callback(self._ticker.close)
            if engine is not None:
                engine.begin(self._engine_up, self._engine_ended)
            undo.pop_all()

    # ---- the engine -------------------------------------------------------------------------

    def receiver(self, room: int, registry: str, token_count: int) -> "Receiver":
        """Start the handoff of a request, before there is memory for it.

        Args:
            room: drawn by the router for this request; prefill gets the same.
            registry: URL of the prefill instance's registry.
            token_count: tokens of the prompt.

        Raises:
            InvalidArgument: the room was used before, or an argument is wrong.
            CapacityError: too many handoffs are in progress, or with too many instances, or too
                many blocks are in LIMBO because of this instance, or the manager is closed: compute
                the request, or ask another instance.
        """
        client = RegistryClient(registry, self._secret, self._tls)
        with self._lock:
            if self._over.is_set():
                raise CapacityError("the manager was closed", "closed")
            are_full = registry not in self._links and len(self._links) >= PEERS_MAX
            if are_full and not self._give_way():
                raise CapacityError(f"{PEERS_MAX} prefill instances are in use", "peers")
            progress, effects = self._core.open(room, registry, token_count, time.monotonic_ns())
            self._carry_out(effects)
            if registry not in self._links:
                peer = self._links[registry] = PeerLinks(registry)
                try:
                    self._threads.start(lambda: self._serve(peer, client), "kvstore-handoff-reader")
                except PeerUnreachable as error:
                    self._give_up(peer, error)
        return Receiver(self, room, progress)

    def poll(self, receivers: "Sequence[Receiver]", reduce: Reduce | None = None) -> list[State]:
        """The states of handoffs; never waits, unless ``reduce`` does.

        Args:
            receivers: in the same order at all ranks, if there are several.
            reduce: agrees on the lowest state among the ranks of an engine.
        """
        return agreed([receiver.state for receiver in receivers], reduce)

    def describe(self) -> list[HandoffStatus]:
        """The state of each handoff."""
        with self._lock:
            return self._core.describe(time.monotonic_ns())

    def stats(self) -> dict[str, int]:
        """Counts since the start, and current numbers."""
        with self._lock:
            return {
                **self._core.counts, **self.faults.counts,
                "links": sum(len(peer.links) for peer in self._links.values()),
                "threads": len(self._threads), "limbo_blocks": self._core.limbo_blocks(),
                "limbo_states": self._core.limbo().total() - self._core.limbo_blocks(),
                "aux_slots": self._aux.count - len(self._core.free_slots),
                "device_copies": self._landings.copying,
            }  # fmt: skip

    def close(self) -> None:
        """Fail all handoffs, close all connections, wait for all threads; nothing arrives later."""
        self._over.set()
        with self._lock:
            peers = list(self._links.values())
        for peer in peers:
            self._drop(peer, FailureCode.CLOSED, "the manager was closed")
        self._threads.join(2 * CONNECT_S + self._silence_s)
        self._landings.close()
        self._ticker.close()
        if self._engine is not None:
            self._engine.close()

    # ---- what receivers call ----------------------------------------------------------------

    def act(self, call: Callable[[Receivers, int], list[Effect]]) -> None:
        """Pass an event to the core, and carry out its effects."""
        with self._lock:
            self._carry_out(call(self._core, time.monotonic_ns()))

    def announce(
        self, room: int, first_token: int, blocks: Sequence[int],
        states: Mapping[str, Sequence[int]],
    ) -> None:  # fmt: skip
        """See :meth:`Receiver.announce`."""
        try:
            after = self._pool.fence()
        except DeviceUnavailable as error:
            self._device_failed(room, str(error))
            return
        self.act(lambda core, now: core.announce(room, first_token, blocks, now, states, after))

    def holds_blocks(self, room: int) -> bool:
        """See :attr:`Receiver.holds_blocks`."""
        with self._lock:
            return self._core.holds_blocks(room)

    def aux(self, room: int) -> AuxData:
        """See :meth:`Receiver.aux`."""
        with self._lock:
            packed = self._aux.read(*self._core.aux_place(room))
        return decode_aux(packed)

    # ---- inside -----------------------------------------------------------------------------

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        """Carry out effects, under the lock."""
        peers = self._links.values() if effects else ()
        by_number = {link.number: link for peer in peers for link in peer.links}
        for effect in effects:
            if isinstance(effect, SendTo):
                link = by_number.get(effect.link)
                if link and not link.outbox.put_message(encode_message(effect.message)):
                    link.close()  # its threads end, and tell
            elif isinstance(effect, EndLink) and effect.link in by_number:
                self.faults.count("links_closed_for_limbo")
                by_number[effect.link].close()
            elif isinstance(effect, EndEngine) and self._engine is not None:
                self.faults.count("engines_ended_for_limbo")
                self._engine.end(effect.number)

    def _engine_up(self, number: int, place: LandingPlace, staged: range) -> None:
        with self._lock:
            self._core.engine_up(number, place, staged)

    def _engine_ended(self, number: int) -> None:
        self.act(lambda core, now: core.engine_ended(number, now))

    def _tick(self) -> None:
        self.act(lambda core, now: core.tick(now))

    def _serve(self, peer: PeerLinks, client: RegistryClient) -> None:
        """Connect the links to a peer, and read what prefill sends on the first one."""
        made: list[tuple[PeerRank, PushLink]] = []
        try:
            self._connect(peer, client, made)
            sources = {link.number: rank.source for rank, link in made}
            with self._lock:
                if peer.is_closed:  # nobody would tell the core of its end
                    raise PeerUnreachable("the manager was closed")
                self._carry_out(self._core.linked(peer.peer, sources, time.monotonic_ns()))
        except Exception as error:  # whatever it is: nobody else would ever connect to this peer
            if not isinstance(error, KVStoreError):
                _LOG.exception("%s was abandoned after an internal error", peer.peer)
                error = PeerUnreachable(repr(error)[:200])
            with self._lock:
                self._give_up(peer, error)
            end_links([link for _, link in made])
            return
        for link in peer.links[1:]:
            try:
                self._threads.start(partial(self._use, peer, link), "kvstore-handoff-reader")
            except PeerUnreachable as error:
                self._fault(peer, FailureCode.UNREACHABLE, str(error))
                self._settle(link)
        self._use(peer, peer.links[0])

    def _use(self, peer: PeerLinks, link: PushLink) -> None:
        """Read what one prefill rank sends until its link ends."""
        try:
            self._read(peer, link)
        finally:
            self._drop(peer, FailureCode.PEER_CLOSED, "its reader has ended")
            self._settle(link)

    def _settle(self, link: PushLink) -> None:
        """Nothing arrives over a link any more, except copies of the device in progress."""
        end_links([link])
        self._landings.settle(link.number, partial(self._settled, link.number))

    def _settled(self, link: bytes) -> None:
        with self._lock:
            self._core.settled(link)

    def _give_up(self, peer: PeerLinks, error: KVStoreError) -> None:
        """No link can be connected: fail the handoffs that wait for it, under the lock."""
        self.faults.note("unreachable", f"{peer.peer}: {error}")
        peer.close()
        if self._links.get(peer.peer, peer) is not peer:
            return  # its links broke, and a next try has begun, for all that wait
        self._links.pop(peer.peer, None)
        code, now_ns = FailureCode.UNREACHABLE, time.monotonic_ns()
        self._carry_out(self._core.unreachable(peer.peer, code, str(error), now_ns))

    def _connect(
        self, peer: PeerLinks, client: RegistryClient, made: list[tuple[PeerRank, PushLink]]
    ) -> None:
        """Ask the registry and connect all links; retry early failures.

        Args:
            peer: the prefill instance.
            client: of its registry.
            made: gets every link as soon as it is connected; the caller ends them if this raises.

        Raises:
            KVStoreError: it failed.
        """

        def find() -> list[PeerRank]:
            ranks = peer_ranks(client.ranks(), self._group, self._pool.shape, self._transport)
            self._reserve(peer, len(ranks))
            return ranks

        link_peer(find, partial(self._make, peer, made), made, self._silence_s, self._over)
        self._add(peer, [link for _, link in made])

    def _reserve(self, peer: PeerLinks, count: int) -> None:
        """Make room for the links of a peer, before they are connected.

        Raises:
            PeerUnreachable: there are too many others.
        """
        with self._lock:
            peer.reserved = count
            while (total := sum(one.reserved for one in self._links.values())) > LINKS_MAX:
                if count > LINKS_MAX or not self._give_way():
                    peer.reserved = 0
                    others = total - count
                    raise PeerUnreachable(f"{others} links are in use, {count} more are too many")

    def _make(
        self, peer: PeerLinks, made: list[tuple[PeerRank, PushLink]], rank: PeerRank, until_ns: int
    ) -> None:
        """Connect one link; its writer sends pings from now on, so that prefill keeps it open.

        Raises:
            KVStoreError: it failed, or the manager was closed.
        """
        if peer.is_closed:
            raise PeerUnreachable("the manager was closed")
        link = link_to(rank, peer.peer, self._greeter, self._tls, until_ns)
        made.append((rank, link))
        name = "kvstore-handoff-writer"
        link.writer = self._threads.start(partial(self._write, peer, link), name)

    def _add(self, peer: PeerLinks, links: list[PushLink]) -> None:
        """Register connected links of a peer.

        Raises:
            PeerUnreachable: the manager was closed.
        """
        with self._lock:
            if not all(map(peer.add, links)):
                raise PeerUnreachable("the manager was closed")

    def _give_way(self) -> bool:
        """Close the links to the peer that is idle for longest, under the lock; False = none is."""
        busy = self._core.busy_peers()
        idle = longest_idle(one for one in self._links.values() if one.peer not in busy)
        if idle is not None:
            self.faults.count("idle_peers_closed")
            self._dropped(idle, FailureCode.CLOSED, "others need its place")
        return idle is not None

    def _drop(self, peer: PeerLinks, code: FailureCode, why: str) -> None:
        """Close the links to a peer, and fail the handoffs on them."""
        with self._lock:
            self._dropped(peer, code, why)

    def _dropped(self, peer: PeerLinks, code: FailureCode, why: str) -> None:
        """The same under the lock."""
        peer.close()
        if self._links.get(peer.peer) is peer:
            del self._links[peer.peer]
            for link in peer.links:
                told = self._core.closed(
                    link.number, code, f"{peer.peer}: {why}", time.monotonic_ns()
                )
                self._carry_out(told)

    def _write(self, peer: PeerLinks, link: PushLink) -> None:
        """Write messages until the link ends."""
        sealed = link.stream("messages")
        while (item := link.outbox.next()) is not None:
            assert isinstance(item, bytes)
            try:
                sealed.send(item, [], self._send_s)
            except KVStoreError as error:
                if link in peer.links:
                    self._fault(peer, FailureCode.PEER_CLOSED, str(error))
                link.close()  # while others are made, who makes them finds it closed

    def _read(self, peer: PeerLinks, link: PushLink) -> None:
        sealed, landings = link.stream("pushes"), self._landings.reader(peer.peer)
        while not link.is_closed:
            try:
                message = read_from_prefill(sealed.receive(self._silence_s))
                if isinstance(message, RangesHead | RangesWritten):
                    self._take(link, sealed, message, landings)
                    continue
            except KVStoreError as error:
                self._fault(peer, cause_of(error), str(error))
                return
            with self._lock:
                refused, now_ns = refusals(self._core.counts), time.monotonic_ns()
                self._carry_out(self._core.received(link.number, message, now_ns))
                note_refused(self.faults, link, message, self._core.counts, refused)

    def _take(
        self, link: PushLink, sealed: SealedStream, head: RangesHead | RangesWritten,
        landings: HostReader | DeviceReader,
    ) -> None:  # fmt: skip
        """Receive ranges into the pool, or find them written there, and check them."""
        follows = isinstance(head, RangesHead)
        with self._lock:
            refused, now_ns = refusals(self._core.counts), time.monotonic_ns()
            landing, size, effects = self._core.arriving(link.number, head, now_ns)
            self._carry_out(effects)
            note_refused(self.faults, link, head, self._core.counts, refused)
        if landing is None and not follows:
            return
        receive = partial(sealed.receive_ranges, silence_s=self._silence_s)
        if landing is None:
            skip(size, receive)
        else:
            landings.land(landing, receive if follows else None)

    def _landed(self, landing: Landing, code: FailureCode | None, why: str) -> None:
        if code in (FailureCode.DIGEST, FailureCode.DEVICE):
            self.faults.note(code, f"room {landing.room}: {why}")
        self.act(lambda core, now: core.landed(landing, code, why, now))

    def _device_failed(self, room: int, why: str) -> None:
        self.act(lambda core, now: core.device_failed(room, why, now))

    def _fault(self, peer: PeerLinks, code: FailureCode, why: str) -> None:
        if not peer.is_closed:
            self.faults.note(code, f"{peer.peer}: {why}")
        self._drop(peer, code, why)


class Receiver:
    """The handoff of one request, at decode; created by :meth:`DecodeManager.receiver`.

    Attributes:
        room: of the request.
        progress: state, times and bytes; read-only.
    """

    __slots__ = ("_manager", "progress", "room")

    def __init__(self, manager: DecodeManager, room: int, progress: HandoffProgress) -> None:
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
        """Whether bytes may still arrive in the announced blocks: do not reuse them before."""
        return self._manager.holds_blocks(self.room)

    def announce(
        self, first_token: int, blocks: Sequence[int],
        states: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Announce the target blocks of KV and state data.

        Data may arrive there until :attr:`holds_blocks` is False.

        Args:
            first_token: KV of earlier tokens is not needed; the block that contains it is sent
                whole.
            blocks: block of each position from the position of ``first_token`` to the end of the
                prompt; empty if nothing is needed.
            states: blocks in each state buffer, by its name: for the kind ``slot`` one, for
                ``last`` one for each of the last positions, in order, for ``every`` like
                ``blocks``.

        Raises:
            InvalidArgument: a block is not in the pool, named twice, or of another handoff; or
                blocks of a state buffer are missing.
        """
        self._manager.announce(self.room, first_token, blocks, states)

    def renew(self) -> None:
        """The request still waits for memory; call it in each step, so that prefill waits."""
        self._manager.act(lambda core, now: core.renew(self.room, now))

    def aux(self) -> AuxData:
        """The aux data of prefill; only after SUCCESS and before :meth:`close`."""
        return self._manager.aux(self.room)

    def abort(self) -> None:
        """Give the request up; bytes may arrive until :attr:`holds_blocks` is False."""
        self._manager.act(lambda core, now: core.abort(self.room, now))

    def close(self) -> None:
        """End the handoff; an unfinished one is aborted. Call it when no blocks are held."""
        self._manager.act(lambda core, now: core.close(self.room, now))
