"""One request, from arrival to answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import msgspec

from engine_adapters.reference.sampler import Sampling
from engine_adapters.reference.tokenizer import TextStream
from kvstore.engine.chain import Chain
from kvstore.engine.transfer import HandoffReport, Transfer
from kvstore.handoff.decode import DecodeManager
from kvstore.handoff.prefill import PrefillManager
from kvstore.protocol.page import PrefixKeys


class State(StrEnum):
    """State of a request: NEW → WAITING → (RESTORING →) RUNNING → (FLUSHING →) FINISHED.

    Of a push at prefill: NEW → BOOTSTRAP → WAITING → … → RUNNING → INFLIGHT → FINISHED; at decode:
    NEW → PREALLOC → TRANSFER → RECEIVED → RUNNING → FINISHED.
    """

    NEW = "new"
    """Not added to the scheduler yet."""
    BOOTSTRAP = "bootstrap"
    """Of a push, at prefill: decode has announced no blocks yet."""
    PREALLOC = "prealloc"
    """Of a push, at decode: there is no memory for it yet."""
    TRANSFER = "transfer"
    """Holds blocks; K/V are pushed into them."""
    RECEIVED = "received"
    """Holds blocks; the push has ended; waits for a place among the running ones."""
    WAITING = "waiting"
    """Holds no blocks."""
    RESTORING = "restoring"
    """Holds blocks; a lookup or a restore is in progress."""
    RUNNING = "running"
    INFLIGHT = "inflight"
    """Computed; its push has not ended."""
    FLUSHING = "flushing"
    """Computed; the answer waits until the store has the pages of the handoff."""
    FINISHED = "finished"


class Timings(msgspec.Struct):
    """Times of a request in seconds, and its cached tokens.

    Attributes:
        queue_s: seconds from arrival to admission.
        push_s: seconds at a decode engine from admission to the end of the push.
        restore_s: seconds from admission to the end of lookup and restore.
        compute_s: seconds from there to the last token.
        flush_s: seconds that a prefill engine waits for the store at the end.
        cached_tokens: tokens found in this engine's own prefix tree.
        restored_tokens: tokens restored from the store.
        pushed_tokens: tokens whose K/V a prefill engine pushed.
        prefill_cached_tokens: number of the pushed tokens and the tokens before them that the
            prefill engine had found in its own prefix tree or in the store.
        restored_bytes: bytes restored from the store.
    """

    queue_s: float = 0.0
    restore_s: float = 0.0
    compute_s: float = 0.0
    flush_s: float = 0.0
    push_s: float = 0.0
    cached_tokens: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    pushed_tokens: int = 0
    prefill_cached_tokens: int = 0


class Output(NamedTuple):
    """New output of a request.

    Attributes:
        tokens: tokens since the last output.
        text: text since the last output; may lag behind the tokens.
        finish_reason: ``stop``, ``length``, or ``overloaded`` / ``shutdown`` if it was not
            completed, ``handoff_failed`` if it was not completed because nobody waits for its K/V
            any more; None while it runs.
        handoff: transfer parameters, with the last output of a prefill for another engine.
        logprobs: of each token and its alternatives, its own first; empty if nobody has asked, and
            an entry is empty if nobody has told.
    """

    tokens: list[int]
    text: str
    finish_reason: str | None = None
    handoff: Transfer | None = None
    logprobs: Sequence[dict[int, float]] = ()


class Push(NamedTuple):
    """A push between this request's prefill and decode engine.

    Attributes:
        room: number of the push, the same at both engines.
        registry: at decode: URL of the registry of the prefill engine.
    """

    room: int
    registry: str = ""


class FakeManagers(NamedTuple):
    """What pushes a request of the engine's own, and takes the push: no K/V are moved."""

    prefill: PrefillManager
    decode: DecodeManager


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request with its state; after submission only the engine thread changes it.

    Attributes:
        tokens: prompt and output so far; the K/V of the last one are not computed yet.
        prompt_tokens: number of prompt tokens.
        chain: keys of the full pages of ``tokens``; may lag behind. None = not hashed yet.
        blocks: block table; covers whole pages; this request holds a reference to each.
        computed: K/V of the positions ``0..computed-1`` are in the pool.
        stored_pages: leading pages that are stored or being stored.
        logprobs: number of alternatives to each token whose log-probabilities are wanted with the
            token's own; None = no log-probabilities.
        first_logprobs: log-probabilities of the first output token, if they are wanted.
        to_handoff: answer with a :class:`Transfer` when the store has the pages.
        from_handoff: transfer parameters of another engine's prefill.
        handoff_id: id of a handoff, once its tail page was submitted (or there is none).
        tail_key: hex key of the tail page, if it is stored.
        push: where a push of its K/V comes from or goes to; None = it has none.
        fake: of a warm-up that the engine makes itself; no request that has come has it.
        report: how the push went, once it has ended.
        pushes: prefill's blocks are pushed: it is never retracted.
        retracted: it has lost its blocks.
        session_id: names its conversation; empty = it has none.
        hashed: the prompt's K/V hashes were recorded.
        emit: called in the engine thread with each :class:`Output`; must not block.
    """

    id: str
    tokens: list[int]
    prompt_tokens: int
    max_tokens: int
    emit: Callable[[Output], None]
    sampling: Sampling = field(default_factory=Sampling)
    text: TextStream = field(default_factory=TextStream)
    logprobs: int | None = None
    first_logprobs: dict[int, float] = field(default_factory=dict)
    to_handoff: bool = False
    from_handoff: Transfer | None = None
    arrived: float = 0.0
    state: State = State.NEW
    chain: Chain | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    stored_pages: int = 0
    handoff_id: str = ""
    tail_key: str | None = None
    push: Push | None = None
    fake: FakeManagers | None = None
    report: HandoffReport | None = None
    pushes: bool = False
    retracted: bool = False
    session_id: str = ""
    hashed: bool = False
    timings: Timings = field(default_factory=Timings)
    phase_began: float = 0.0

    @property
    def keys(self) -> PrefixKeys:
        """Keys of the full pages of ``tokens`` that were hashed."""
        return self.chain.keys if self.chain is not None else PrefixKeys(b"")

    @property
    def output_tokens(self) -> int:
        """Number of output tokens so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def uncomputed(self) -> int:
        """Number of tokens whose K/V are not computed yet: 1 for a decoding request."""
        return len(self.tokens) - self.computed

    def end_phase(self, now: float) -> float:
        """End a phase; returns its duration in seconds."""
        spent, self.phase_began = now - self.phase_began, now
        return spent
