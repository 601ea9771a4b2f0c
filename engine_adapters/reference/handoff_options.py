"""Options of an engine that pushes or is pushed to, and the report of a push."""

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from engine_adapters.reference.metrics import Metrics
from engine_adapters.reference.observing import HandoffObserver
from engine_adapters.reference.pool import PagedPool
from engine_adapters.reference.prefix_tree import BlockAllocator
from engine_adapters.reference.rank_pushes import JointProgress
from kvstore.engine.transfer import HandoffReport
from kvstore.handoff.memory import HandoffPool
from kvstore.handoff.mooncake import MooncakeLanding, MooncakeWriter
from kvstore.handoff.ranks import INSTANCE_BYTES, RankGroup, RankPart
from kvstore.handoff.states import Patience
from kvstore.process.tls import CertificateFiles

PushAfter = Literal["layer", "chunk", "prompt"]
Transport = Literal["tcp", "mooncake"]
Protocol = Literal["rdma", "tcp"]
TCP: Final = "tcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffOptions:
    """Options of the pushes of an engine.

    Attributes:
        secret: shared by all engines that push to each other, at least 16 bytes.
        host: IP address to listen at, and to be reached at; only prefill listens.
        registry_port: of the registry; 0 = any free one.
        port: of messages and KV of the first rank; the others have those after it; 0 = any free
            ones.
        patience: deadlines.
        transport: ``mooncake``: K/V go over it to and from engines that have it too.
        certificates: shown by both engines of a push to each other and to the registry, which must
            be of one authority; None = no TLS.
        mooncake_protocol: of Mooncake: ``rdma``, or ``tcp`` for tests.
        push_after: what prefill computes before it pushes: each layer, each chunk of the prompt, or
            the whole prompt. Others than ``layer`` are for comparisons.
        events: write an event to the log at each step of each push, to look for faults.
        fake: move no K/V, for tests; both sides must. What decode says has nothing to do with the
            prompt, and every answer says so.
    """

    secret: bytes
    host: str = "127.0.0.1"
    registry_port: int = 0
    port: int = 0
    patience: Patience = field(default_factory=Patience)
    push_after: PushAfter = "layer"
    fake: bool = False
    events: bool = False
    transport: Transport = TCP
    mooncake_protocol: Protocol = "rdma"
    certificates: CertificateFiles | None = None

    def writers(self, pool: PagedPool) -> Sequence[MooncakeWriter | None]:
        """Of each rank, prefill's end of the transport beside TCP; None = there is none.

        Raises:
            ConfigError: it cannot be used here.
        """
        memory = pool.shared
        if memory is None:
            return [None] * pool.ranks
        with ExitStack() as undo:
            made = [
                undo.enter_context(
                    closing(MooncakeWriter(memory, host=self.host, protocol=self.mooncake_protocol))
                )
                for _ in range(pool.ranks)
            ]
            undo.pop_all()
        return made

    def landings(self, pool: PagedPool) -> Sequence[MooncakeLanding | None]:
        """Of each rank, decode's end, as :meth:`writers`."""
        memory, host, protocol = pool.shared, self.host, self.mooncake_protocol
        if memory is None:
            return [None] * pool.ranks
        with ExitStack() as undo:
            made = [
                undo.enter_context(
                    closing(
                        MooncakeLanding(memory, pool.planes(rank), host=host, protocol=protocol)
                    )
                )
                for rank in range(pool.ranks)
            ]
            undo.pop_all()
        return made


class PushParts(NamedTuple):
    """The parts of an engine that its pushes use; ``observer`` is None when nobody is told."""

    name: str
    space: bytes
    pool: PagedPool
    allocator: BlockAllocator
    metrics: Metrics
    observer: HandoffObserver | None = None

    def handoff_pools(self, *, fake: bool) -> list[HandoffPool]:
        """The pool of each rank with the generations of its blocks."""
        if fake:
            pool, generations = self.pool.for_transfers(0), self.allocator.generations
            return [HandoffPool(pool, self.pool.block_tokens, generations, fake=True)]
        layers, ranks = (0, len(self.pool.keys)), range(self.pool.ranks)
        parts = tuple(RankPart(layers, self.pool.heads(rank)) for rank in ranks)
        instance, tokens = os.urandom(INSTANCE_BYTES), self.pool.block_tokens
        return [
            HandoffPool(
                self.pool.for_transfers(rank), tokens, self.allocator.generations,
                RankGroup(rank, parts, instance),
            )
            for rank in ranks
        ]  # fmt: skip


def report_of(progress: JointProgress, *, fake: bool, wrong: str = "") -> HandoffReport:
    """What an answer says about a push that has ended.

    Args:
        progress: of the push.
        fake: no K/V were moved.
        wrong: code of why it failed although everything has arrived; empty = it did not.
    """
    state, code = _outcome(progress, wrong)
    return HandoffReport(
        way="push",
        state=state,
        code=code or None,
        seconds={name.lower(): seconds for name, seconds in progress.seconds.items()},
        bytes=progress.moved_bytes,
        fake=fake,
    )


def count_push(metrics: Metrics, progress: JointProgress, wrong: str = "") -> None:
    """Count a push that has ended; the arguments are as those of :func:`report_of`.

    A code that is unknown counts as ``other``.
    """
    state, cause = _outcome(progress, wrong)
    if progress.failure is not None:
        cause = progress.failure.counted
    metrics.handoffs.labels(state, cause).inc()
    metrics.handoff_bytes.inc(progress.moved_bytes)
    for name, seconds in progress.seconds.items():
        metrics.handoff_seconds.labels(name.lower()).inc(seconds)


def _outcome(progress: JointProgress, wrong: str) -> tuple[str, str]:
    """State and code; the code is empty after a success."""
    assert progress.ended
    if progress.failure is not None:
        return "failed", progress.failure.code
    return ("failed", wrong) if wrong else ("success", "")
