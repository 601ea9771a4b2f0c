"""The prefill engine's use of handoffs: K/V go to decode layer by layer while they are computed.

One rule protects bytes: a push holds references to its blocks until nothing reads them any more,
whatever happens to its request.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import NamedTuple

from engine_adapters.reference.handoff_options import (
    HandoffOptions,
    PushParts,
    count_push,
    report_of,
)
from engine_adapters.reference.push_queues import PrefillQueues
from engine_adapters.reference.rank_pushes import RankSenders, joint_status
from engine_adapters.reference.request import Request, State
from kvstore.handoff.aux_data import AuxData, prompt_digest
from kvstore.handoff.prefill import PrefillManager
from kvstore.handoff.registry import HandoffRegistry
from kvstore.handoff.states import HandoffStatus
from kvstore.handoff.states import State as PushState


@dataclass(slots=True)
class _Outgoing:
    """One push.

    Attributes:
        blocks: blocks of the positions that were sent, or are being; it holds references to them.
        unsent: pieces that are computed, and are sent when the whole prompt is.
        is_stopped: it failed before everything was computed.
    """

    request: Request
    sender: RankSenders
    blocks: list[int] = field(default_factory=list)
    unsent: "list[_Piece]" = field(default_factory=list)
    is_stopped: bool = False


class _Piece(NamedTuple):
    """Blocks that a step completes."""

    push: _Outgoing
    positions: range
    blocks: list[int]


class PushEnd(NamedTuple):
    """The push of a request has ended; its blocks are not read any more.

    Attributes:
        failed: it did not succeed.
        is_stopped: the request was not computed to its end.
    """

    request: Request
    failed: bool
    is_stopped: bool


class PrefillPushes:
    """All pushes of a prefill engine; calls come from its step thread unless they say otherwise.

    Attributes:
        registry: URL of the registry.
    """

    def __init__(self, options: HandoffOptions, parts: PushParts, queues: PrefillQueues) -> None:
        """Listen.

        Raises:
            InvalidArgument: it cannot listen there.
        """
        self._pool = parts.pool
        self._layers = range(len(parts.pool.keys))
        self._push_after = options.push_after
        self._fake = options.fake
        self._allocator = parts.allocator
        self._metrics = parts.metrics
        self._observer = parts.observer
        self._queues = queues
        self._begun: dict[Request, RankSenders] = {}  # not read from the inbox yet
        self._pushes: dict[Request, _Outgoing] = {}
        with ExitStack() as undo:
            writers = options.writers(parts.pool)
            for writer in writers:
                if writer is not None:
                    undo.callback(writer.close)
            self._registry = undo.enter_context(
                closing(
                    HandoffRegistry(
                        options.host, options.registry_port, options.secret, options.certificates
                    )
                )
            )
            self.registry = self._registry.url
            managers = [
                undo.enter_context(
                    closing(
                        PrefillManager(
                            pool,
                            parts.space,
                            options.secret,
                            registry=self.registry,
                            listen=(options.host, options.port and options.port + rank),
                            patience=options.patience,
                            writer=writers[rank],
                            certificates=options.certificates,
                        )
                    )
                )
                for rank, pool in enumerate(parts.handoff_pools(fake=options.fake))
            ]
            undo.pop_all()
        self._managers = managers
        if parts.observer is not None:
            for manager in managers:
                manager.observe_jobs(parts.observer.transferred)
        parts.metrics.written_push_jobs.set_function(
            lambda: sum(manager.stats()["written_jobs"] for manager in managers)
        )

    # Any thread

    def begin(self, request: Request) -> None:
        """Begin the push of a request that will be submitted.

        Raises:
            InvalidArgument: the room was used before.
            CapacityError: too many pushes are under way.
        """
        assert request.push is not None
        managers = self._managers if request.fake is None else [request.fake.prefill]
        self._begun[request] = RankSenders(managers, request.push.room, request.prompt_tokens)

    def withdraw(self, request: Request) -> None:
        """The request was not submitted after all."""
        sender = self._begun.pop(request, None)
        if sender is not None:
            sender.close()

    def describe(self) -> list[HandoffStatus]:
        """Where each push is."""
        return joint_status([manager.describe() for manager in self._managers])

    # Step thread

    @property
    def busy(self) -> bool:
        """Whether there is something to poll for."""
        return bool(self._pushes)

    def add(self, request: Request) -> bool:
        """Queue a submitted request; returns False if too many wait."""
        if not self._queues.add(request):
            self.withdraw(request)
            return False
        self._pushes[request] = _Outgoing(request, self._begun.pop(request))
        return True

    def start(self, *, store_takes: bool) -> None:
        """Let requests wait for memory; before the engine admits."""
        self._queues.start(lambda one: not self._is_unannounced(one), anyhow=store_takes)

    def give_way(self) -> None:
        """Give up a push if others need its memory; after the engine has admitted."""
        request = self._queues.to_give_up(self._is_unannounced)
        if request is not None:
            self._pushes[request].sender.abort()

    def stopped(self) -> list[Request]:
        """Requests whose push has failed: compute no more of them. They have no blocks then."""
        found = []
        for push in self._pushes.values():
            state = push.sender.state
            if push.request.state in (State.INFLIGHT, State.FINISHED):
                continue
            if state is PushState.FAILED:
                push.is_stopped = True
                self._queues.stop(push.request)
                found.append(push.request)
            elif state is not PushState.BOOTSTRAPPING:
                push.sender.renew()  # it waits for a place, or for its next chunk
        return found

    def ended(self) -> list[PushEnd]:
        """Let go of pushes that have ended; those whose client waits are returned, each once."""
        ends = []
        for push in list(self._pushes.values()):
            if not push.sender.progress.ended or push.sender.holds_blocks:
                continue
            if push.request.state not in (State.INFLIGHT, State.FINISHED):
                continue  # it failed just now
            self._let_go(push)
            if push.request.state is State.INFLIGHT:
                failed = push.sender.state is PushState.FAILED
                ends.append(PushEnd(push.request, failed, push.is_stopped))
        return ends

    def cached(self, request: Request) -> None:
        """Push what the prefix tree and the store had of an admitted request."""
        push = self._pushes.get(request)
        if push is not None:
            self._send(self._take(push, request.computed // self._pool.block_tokens), self._layers)

    def layer_hook(self, work: Iterable[tuple[Request, int]]) -> Callable[[int], None] | None:
        """What to call after each layer of a step; None if the step completes no block of a push.

        Args:
            work: requests of the step, each with the number of tokens that are computed.
        """
        pieces = [piece for one, count in work for piece in self._piece(one, count)]
        return (lambda layer: self._layer_computed(pieces, layer)) if pieces else None

    def computed(self, request: Request, *, is_final: bool) -> None:
        """All of a request is computed and its first token is sampled: send what comes with it."""
        push = self._pushes[request]
        assert len(push.blocks) == -(-request.prompt_tokens // self._pool.block_tokens)
        self._send(push.unsent, self._layers)
        push.unsent.clear()
        timings, sampling = request.timings, request.sampling
        push.sender.finish(
            AuxData(
                first_token=request.tokens[request.prompt_tokens],
                position=request.prompt_tokens,
                seed=sampling.seed if sampling.temperature else None,
                is_final=is_final,
                logprobs=request.first_logprobs,
                cached_tokens=timings.cached_tokens + timings.restored_tokens,
                prompt=prompt_digest(request.tokens[: request.prompt_tokens]),
            )
        )
        self._queues.computed(request)

    def abort(self, request: Request) -> None:
        """Remove a request; its blocks are held until nothing reads them."""
        self._pushes[request].sender.abort()
        self._queues.remove(request)

    def has(self, request: Request) -> bool:
        """Whether the request has a push that has not ended."""
        return request in self._pushes

    def close(self) -> None:
        """End all pushes; afterwards nothing reads the pool."""
        for manager in self._managers:
            manager.close()
        self._registry.close()
        for push in list(self._pushes.values()):
            self._let_go(push)

    # Inside

    def _is_unannounced(self, request: Request) -> bool:
        push = self._pushes.get(request)
        return push is not None and push.sender.state is PushState.BOOTSTRAPPING

    def _piece(self, request: Request, count: int) -> list[_Piece]:
        push = self._pushes.get(request)
        if push is None:
            return []
        block_tokens, end = self._pool.block_tokens, request.computed + count
        stop = end // block_tokens
        if end == request.prompt_tokens and end % block_tokens:
            stop += 1
            unused = self._pool.slots(request.blocks, end, stop * block_tokens)
            self._pool.zero_slots(unused)  # they are sent, and may be of another request
        return self._take(push, stop)

    def _take(self, push: _Outgoing, stop: int) -> list[_Piece]:
        """Hold the blocks before position ``stop`` that are not held yet; they are sent next."""
        positions = range(len(push.blocks), stop)
        if not positions:
            return []
        blocks = push.request.blocks[positions.start : stop]
        self._allocator.retain(blocks)
        push.blocks += blocks
        return [_Piece(push, positions, blocks)]

    def _layer_computed(self, pieces: Sequence[_Piece], layer: int) -> None:
        """Send what is to be sent after a layer of a step."""
        if self._push_after == "layer":
            self._send(pieces, range(layer, layer + 1))
        elif layer + 1 == len(self._layers):
            if self._push_after == "chunk":
                self._send(pieces, self._layers)
            else:
                for piece in pieces:
                    piece.push.unsent.append(piece)

    def _send(self, pieces: Sequence[_Piece], layers: range) -> None:
        for push, positions, blocks in pieces:
            if self._observer is not None:
                self._observer.before_send(push.request, layers, positions, blocks)
            push.sender.send(layers, positions, blocks)

    def _let_go(self, push: _Outgoing) -> None:
        del self._pushes[push.request]
        self._allocator.release(push.blocks)
        push.sender.close()
        own = push.request.fake is not None
        if not own:
            count_push(self._metrics, push.sender.progress)
        push.request.report = report_of(push.sender.progress, fake=self._fake or own)
