"""One request, from arrival to answer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import msgspec

from engine_adapters.reference.sampler import Sampling
from engine_adapters.reference.tokenizer import TextStream
from kvstore.engine.chain import Chain
from kvstore.engine.transfer import Transfer
from kvstore.page import PrefixKeys


class State(StrEnum):
    """Where a request is. NEW → WAITING → (RESTORING →) RUNNING → (FLUSHING →) FINISHED."""

    NEW = "new"
    """The scheduler does not know it yet."""
    WAITING = "waiting"
    """Holds no blocks."""
    RESTORING = "restoring"
    """Holds blocks; a lookup or a restore decides how much of the prompt need not be computed."""
    RUNNING = "running"
    FLUSHING = "flushing"
    """Computed; the answer waits until the store has the pages that a hand-off promises."""
    FINISHED = "finished"


class Timings(msgspec.Struct):
    """Where the time of a request went, seconds; and what it did not have to compute.

    Attributes:
        queue_s: arrival to admission.
        restore_s: admission to the end of lookup and restore.
        compute_s: from there to the last token.
        flush_s: a prefill engine's wait for the store at the end.
        cached_tokens: found in this engine's own prefix tree.
        restored_tokens: restored from the store.
        restored_bytes: as ``restored_tokens``.
    """

    queue_s: float = 0.0
    restore_s: float = 0.0
    compute_s: float = 0.0
    flush_s: float = 0.0
    cached_tokens: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0


class Output(NamedTuple):
    """New output of a request.

    Attributes:
        tokens: since the last one.
        text: likewise; may lag behind the tokens.
        finish_reason: ``stop``, ``length``, or ``overloaded`` / ``shutdown`` when it was not
            served to its end; None while it goes on.
        handoff: with the last output of a prefill for another engine.
    """

    tokens: list[int]
    text: str
    finish_reason: str | None = None
    handoff: Transfer | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """All that the engine knows of a request; after submission only the engine thread changes it.

    Attributes:
        tokens: prompt and output so far; the K/V of the last one are not computed yet.
        prompt_tokens: how many of them are the prompt.
        chain: of the full pages of ``tokens``; may lag behind them. None: not hashed yet.
        blocks: block table; covers whole pages; this request holds a reference to each.
        computed: K/V of the positions ``0..computed-1`` are in the pool.
        stored_pages: pages from the start that the store has or is being given.
        to_handoff: answer with a :class:`Transfer` once the store has the pages.
        from_handoff: what another engine's prefill left for this request.
        handoff_id: of a request to hand off, once its tail page is with the store (or has none).
        tail_key: hex key of that tail page when the store has it.
        hashed: the prompt's K/V hashes are on record.
        emit: called in the engine thread with each :class:`Output`; must not block.
    """

    id: str
    tokens: list[int]
    prompt_tokens: int
    max_tokens: int
    emit: Callable[[Output], None]
    sampling: Sampling = field(default_factory=Sampling)
    text: TextStream = field(default_factory=TextStream)
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
    hashed: bool = False
    timings: Timings = field(default_factory=Timings)
    phase_began: float = 0.0

    @property
    def keys(self) -> PrefixKeys:
        """Of the full pages of ``tokens``, as far as they are hashed."""
        return self.chain.keys if self.chain is not None else PrefixKeys(b"")

    @property
    def output_tokens(self) -> int:
        """Tokens of output so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def uncomputed(self) -> int:
        """Tokens whose K/V are still to be computed: 1 for a request that decodes."""
        return len(self.tokens) - self.computed

    def end_phase(self, now: float) -> float:
        """Seconds since the last phase ended; the next one begins now."""
        spent, self.phase_began = now - self.phase_began, now
        return spent
