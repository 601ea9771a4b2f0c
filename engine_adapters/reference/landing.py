"""The decode engine's use of handoffs: K/V arrive in blocks that it has announced.

Two rules protect bytes. A push holds references to its blocks until nothing arrives in them any
more, whatever happens to its request. And blocks of a push that did not succeed are zeroed before
they are used again, because it may have left anything in them.

One rule protects requests: a push that fails, for whatever reason, is a request that is restored
from the store or computed.
"""

import logging
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from engine_adapters.reference.handoff_options import (
    HandoffOptions,
    PushParts,
    count_push,
    report_of,
)
from engine_adapters.reference.push_queues import DecodeQueues
from engine_adapters.reference.rank_pushes import RankReceivers, joint_status
from engine_adapters.reference.request import Request, State
from engine_adapters.reference.sampler import SEED_MAX, are_logprobs
from engine_adapters.reference.tokenizer import VOCAB_SIZE
from kvstore.engine.transfer import HandoffReport
from kvstore.handoff.aux_data import AuxData, prompt_digest
from kvstore.handoff.decode import DecodeManager
from kvstore.handoff.states import FailureCode, HandoffStatus
from kvstore.handoff.states import State as PushState
from kvstore.protocol.errors import CapacityError, KVStoreError

CAPACITY: Final = "capacity"
"""Code of a push that was not begun: there was no place for it."""
_log: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class _Incoming:
    """One push.

    Attributes:
        receiver: None = there was no place for it.
        blocks: announced blocks; it holds references to them.
        first_token: K/V of the tokens before it are not pushed.
        present: number of tokens whose K/V are there, besides the pushed ones.
        is_restoring: whether the store loads some of the blocks.
        wrong: code of what is wrong with a push of which everything has arrived; empty = nothing.
    """

    request: Request
    receiver: RankReceivers | None
    blocks: list[int] = field(default_factory=list)
    first_token: int = 0
    present: int = 0
    is_restoring: bool = False
    wrong: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether nothing will come of it."""
        return self.receiver is None or self.receiver.state is PushState.FAILED

    @property
    def has_settled(self) -> bool:
        """Whether it has ended and nothing arrives any more."""
        receiver = self.receiver
        return receiver is None or (receiver.progress.ended and not receiver.holds_blocks)


class Landed(NamedTuple):
    """The push of a request has ended, and it has its blocks for itself.

    Attributes:
        tokens: number of tokens whose K/V are in the pool.
        pushed: number of these tokens whose K/V were pushed.
        aux: what continues the request; None = the rest of the prompt is to be restored or
            computed.
    """

    request: Request
    tokens: int
    pushed: int
    aux: AuxData | None


class DecodePushes:
    """All pushes to a decode engine; calls come from its step thread unless they say otherwise.

    It connects to a prefill engine when a request first names that engine.
    """

    def __init__(self, options: HandoffOptions, parts: PushParts, queues: DecodeQueues) -> None:
        self._pool = parts.pool
        self._allocator = parts.allocator
        self._metrics = parts.metrics
        self._queues = queues
        self._fake = options.fake
        self._begun: dict[Request, RankReceivers | None] = {}  # not read from the inbox yet
        self._pushes: dict[Request, _Incoming] = {}
        with ExitStack() as undo:
            engines = options.landings(parts.pool)
            for engine in engines:
                if engine is not None:
                    undo.callback(engine.close)
            self._managers = [
                undo.enter_context(
                    closing(
                        DecodeManager(
                            pool,
                            parts.space,
                            options.secret,
                            name=parts.name,
                            patience=options.patience,
                            engine=engine,
                            certificates=options.certificates,
                        )
                    )
                )
                for pool, engine in zip(
                    parts.handoff_pools(fake=options.fake), engines, strict=True
                )
            ]
            undo.pop_all()
        parts.metrics.limbo_blocks.set_function(
            lambda: max(manager.stats()["limbo_blocks"] for manager in self._managers)
        )
        parts.metrics.aux_slots.set_function(
            lambda: max(manager.stats()["aux_slots"] for manager in self._managers)
        )
        parts.metrics.ended_push_engines.set_function(
            lambda: sum(
                manager.stats().get("engines_ended_for_limbo", 0) for manager in self._managers
            )
        )

    # Any thread

    def begin(self, request: Request) -> None:
        """Begin the push of a request that will be submitted.

        If there is no place for it, the request is served without.

        Raises:
            InvalidArgument: the room was used before, or the registry's URL is wrong.
        """
        assert request.push is not None
        receiver: RankReceivers | None = None
        try:
            receiver = RankReceivers(
                self._managers if request.fake is None else [request.fake.decode],
                request.push.room,
                request.push.registry,
                request.prompt_tokens,
            )
        except CapacityError as error:
            _log.info("request %s is not pushed: %s", request.id, error)
        self._begun[request] = receiver

    def withdraw(self, request: Request) -> None:
        """The request was not submitted after all."""
        receiver = self._begun.pop(request, None)
        if receiver is not None:
            receiver.close()

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
        self._pushes[request] = _Incoming(request, self._begun.pop(request))
        return True

    def is_wanted(self, request: Request) -> bool:
        """Whether the push of a request that has its blocks may still succeed."""
        return not self._pushes[request].has_failed

    def announce(self, request: Request, first_token: int) -> None:
        """A request has its blocks; ask for the K/V from ``first_token`` on.

        Args:
            request: in state TRANSFER.
            first_token: the K/V before it are here, or are being restored; then
                :meth:`restored` is called.
        """
        push, block_tokens = self._pushes[request], self._pool.block_tokens
        push.first_token, push.present = first_token, request.computed
        push.is_restoring = first_token > request.computed
        if push.receiver is None or push.has_failed:
            return
        assert first_token % block_tokens == 0
        stop = -(-request.prompt_tokens // block_tokens)
        push.blocks = request.blocks[first_token // block_tokens : stop]
        self._allocator.retain(push.blocks)
        if self._fake or request.fake is not None:
            self._pool.zero(push.blocks)  # nothing else is written to them
        push.receiver.announce(first_token, push.blocks)

    def restored(self, request: Request, tokens: int) -> None:
        """The store has loaded K/V; those of so many tokens are there."""
        push = self._pushes[request]
        push.present, push.is_restoring = tokens, False

    def poll(self) -> list[Landed]:
        """Advance all pushes; never blocks.

        Returns:
            Requests whose push has ended, each once; they are in state RECEIVED.
        """
        landed = []
        for push in list(self._pushes.values()):
            request = push.request
            if request.state is State.PREALLOC and push.receiver is not None:
                push.receiver.renew()
            elif request.state is State.FINISHED and push.has_settled:
                self._let_go(push, succeeded=False)
            elif request.state is State.TRANSFER and push.has_settled and not push.is_restoring:
                aux = self._aux_of(push)
                self._let_go(push, succeeded=aux is not None)
                self._queues.end_transfer(request)
                complete = aux is not None and push.present == push.first_token
                tokens = request.prompt_tokens if complete else push.present
                pushed = tokens - push.present
                landed.append(Landed(request, tokens, pushed, aux if complete else None))
        return landed

    def abort(self, request: Request) -> None:
        """Remove a request; its blocks are held until nothing arrives in them."""
        receiver = self._pushes[request].receiver
        if receiver is not None:
            receiver.abort()
        self._queues.remove(request)

    def has(self, request: Request) -> bool:
        """Whether the request has a push that has not ended."""
        return request in self._pushes

    def close(self) -> None:
        """End all pushes; afterwards nothing arrives in the pool."""
        for manager in self._managers:
            manager.close()
        for push in list(self._pushes.values()):
            self._let_go(push, succeeded=False)

    # Inside

    def _aux_of(self, push: _Incoming) -> AuxData | None:
        """What continues the request; None if the push failed, or it makes no sense."""
        if push.receiver is None or push.receiver.state is not PushState.SUCCESS:
            return None
        try:
            aux = push.receiver.aux()
        except KVStoreError as error:
            _log.warning("request %s: %s", push.request.id, error)
            push.wrong = FailureCode.PROTOCOL
            return None
        request = push.request
        if aux.prompt != prompt_digest(request.tokens[: request.prompt_tokens]):
            _log.warning("request %s: the pushed K/V belong to another prompt", request.id)
            push.wrong = FailureCode.WRONG_PROMPT
            return None
        right = aux.position == request.prompt_tokens and 0 <= aux.first_token < VOCAB_SIZE
        right = right and 0 <= aux.cached_tokens <= request.prompt_tokens
        right = right and are_logprobs(aux.logprobs, aux.first_token)
        if not right or (aux.seed is not None and not 0 <= aux.seed <= SEED_MAX):
            _log.warning("request %s: its aux data are invalid", request.id)
            push.wrong = FailureCode.PROTOCOL
            return None
        return aux

    def _let_go(self, push: _Incoming, *, succeeded: bool) -> None:
        del self._pushes[push.request]
        if push.blocks and not succeeded:
            self._pool.zero(push.blocks)
        self._allocator.release(push.blocks)
        if push.receiver is None:
            push.request.report = HandoffReport(way="push", state="failed", code=CAPACITY)
            self._metrics.handoffs.labels("failed", CAPACITY).inc()
            return
        push.receiver.close()
        own = push.request.fake is not None
        if not own:
            count_push(self._metrics, push.receiver.progress, push.wrong)
        fake = self._fake or own
        push.request.report = report_of(push.receiver.progress, fake=fake, wrong=push.wrong)
