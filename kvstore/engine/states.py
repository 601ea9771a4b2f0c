"""The scheduler side's state of each request and each job. Plain values."""

from dataclasses import dataclass, field

from kvstore.client.results import Hit
from kvstore.engine.chain import Chain, ForeignChain, ShiftedChain
from kvstore.engine.hints import FetchHint
from kvstore.engine.load_decisions import RequestLoad
from kvstore.engine.pending import PendingWait
from kvstore.engine.requests import PromptScope, Request
from kvstore.protocol.page import PrefixKeys


@dataclass(slots=True)
class RequestState:
    """One request.

    Attributes:
        stored: leading pages that are in the store, that were submitted to it, or that cannot be.
        hole: the first page that cannot be stored.
        hit: end, in pages, of the last answer of :meth:`SchedulerSide.match`.
        remote: number of pages at the end of the hit that are at other nodes.
        on_disk: number of pages of the hit that are on this node's disk only.
        wait: the request's wait for pages that are being written.
        loads_over: no more pages are loaded for it.
        load: the decision about loading.
        known: leading tokens that are computed or being loaded.
        hint: a router's hint about its pages.
        turn: the step in which its lookup was first put off; None = it was not since the last one.
    """

    request: Request
    names: PromptScope
    chain: Chain | ShiftedChain | ForeignChain
    hint: FetchHint
    stored: int = 0
    hit: int = 0
    remote: int = 0
    on_disk: int = 0
    wait: PendingWait = field(default_factory=PendingWait)
    loads_over: bool = False
    load: RequestLoad = field(default_factory=RequestLoad)
    known: int = 0
    turn: int | None = None
    hole: float = float("inf")

    @property
    def leading(self) -> int:
        """Leading pages that are in the store, or that were submitted to it."""
        return int(min(self.stored, self.hole))

    def will_load(self, hit: Hit, first: int, end: int) -> None:
        """The pages from ``first`` to ``end`` of a hit will be loaded."""
        on_disk = hit.tiers.get("ssd", 0)
        self.on_disk = max(0, min(end, hit.pages) - (hit.pages - on_disk))
        self.remote = max(0, end - max(hit.pages, first))
        self.hit = end
        self.stored, self.hole = hit.pages + self.remote, float("inf")

    def sources(self, tokens: int, page_tokens: int) -> tuple[int, int]:
        """How many of the ``tokens`` of its hit come from disk, and from other nodes."""
        remote = min(tokens, self.remote * page_tokens)
        return min(tokens - remote, self.on_disk * page_tokens), remote

    def skip_to(self, page: int) -> int:
        """The pages before this one that are not stored cannot be; returns how many."""
        skipped = max(0, page - self.stored)
        if skipped:
            self.stored, self.hole = page, min(self.hole, self.stored)
        return skipped

    def keys(self) -> PrefixKeys:
        """The keys of all its full pages."""
        if isinstance(self.chain, ForeignChain):
            return self.chain.extend(self.request.block_hashes)
        return self.chain.extend(self.request.all_token_ids)


@dataclass(slots=True)
class BlockJob:
    """A load or store in flight.

    Attributes:
        first: index of its first page in the request's chain.
        wanted: pages of the job.
        pages: leading pages that succeeded on all ranks that have reported.
        seconds: the longest duration of the job on one rank.
        began: end of the step that started it; infinite until then.
        held: blocks it holds references to.
        late: its request has stopped waiting for it.
        known: tokens of the first page of a load that the engine had already.
    """

    request_id: str
    first: int
    wanted: int
    pages: int
    held: list[int]
    is_load: bool
    ranks_left: int
    seconds: float = 0.0
    began: float = float("inf")
    late: bool = False
    known: int = 0

    def failed_tokens(self, used: int, page_tokens: int) -> int:
        """How many tokens were not loaded, of which the first ``used`` pages were."""
        return self.wanted * page_tokens - max(used * page_tokens, self.known)

    def parted(self, ranks: int) -> bool:
        """Whether some of the ``ranks`` have loaded what a request waits for, and others not."""
        return self.is_load and not self.late and self.ranks_left < ranks
