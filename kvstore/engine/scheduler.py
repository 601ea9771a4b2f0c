"""The scheduler side of an adapter: decides which pages of a request to load and store.

The calls in each step of the engine, on one thread:

* :meth:`SchedulerSide.match` before a request gets blocks: how many of its tokens to load;
* :meth:`SchedulerSide.allocated` after it got them: the load is queued for the workers;
* :meth:`SchedulerSide.build` at the end of scheduling: the loads and stores of this step;
* :meth:`SchedulerSide.reported` after the step: the jobs that have ended.

Every job holds its own references to its blocks until all ranks have reported its end, even if its
request is preempted, aborted, or no longer waiting. So no late write reaches a block of another
request, and a request can be removed without waiting for its jobs.
"""

import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from kvstore.client.results import Hit
from kvstore.engine.chain import chain_of
from kvstore.engine.conversations import RetainedConversations
from kvstore.engine.counts import AdapterCounts
from kvstore.engine.drafts import DraftBlocks
from kvstore.engine.held import JobBlocks
from kvstore.engine.hints import read_hints
from kvstore.engine.identity import window_pages
from kvstore.engine.last_tokens import LastTokens
from kvstore.engine.layered import LayeredSteps
from kvstore.engine.load_choice import HitOffer, LoadChooser, PromptsAhead, offer_of
from kvstore.engine.load_decisions import LoadDecisions
from kvstore.engine.lookups import StepLookups
from kvstore.engine.messages import Load, Report, Step, Store
from kvstore.engine.opening import Opening
from kvstore.engine.options import LoadOrder, Options
from kvstore.engine.pace import MeasuredSteps, Pace, pairs_of
from kvstore.engine.pending import PendingWait, missing_tokens
from kvstore.engine.requests import BlockHolder, PromptScope, Request, ScheduledRequest, Setup
from kvstore.engine.sources import blocks_of, source_blocks, target_blocks
from kvstore.engine.states import BlockJob, RequestState
from kvstore.engine.transfer import answer_of

FREES_SOON_S: Final = 0.1
"""Seconds for which the engine should wait for a job instead of preempting a running request."""


class SchedulerSide:
    """Decides which pages to load and store; called only by the engine's scheduler thread.

    Args:
        opening: source of the space.
        setup: the engine.
        options: the user's options.
        clock: monotonic seconds.
        report_prefill: called with the measured seconds per token, at most once a second.
    """

    def __init__(
        self,
        opening: Opening,
        setup: Setup,
        options: Options,
        clock: Callable[[], float],
        report_prefill: Callable[[float], None],
    ) -> None:
        self.counts = AdapterCounts()
        self.pace = Pace()
        self.chooser = LoadChooser(self.pace, options.loads)
        self._decisions = LoadDecisions(self.chooser, options.room_wait_ms / 1000, self.counts.add)
        self._backlog = PromptsAhead()
        timeout_s = options.lookup_timeout_ms / 1000
        self._lookups = StepLookups(opening, setup.page_tokens, timeout_s, clock, self.counts)
        self._opening = opening
        self._setup = setup
        self._page_tokens = setup.page_tokens
        self._options = options
        self._clock = clock
        self._report_prefill = report_prefill
        self._conversations = RetainedConversations(opening.get, options.retain)
        self._holder: BlockHolder | None = None
        self._held, self._blocks = JobBlocks(0), range(0)
        self._states: dict[str, RequestState] = {}
        self._jobs: dict[int, BlockJob] = {}
        self._next_job = 1
        self._loads: list[Load] = []
        self._layered = LayeredSteps()
        self._drafts = DraftBlocks(setup.groups[0], setup.page_tokens) if setup.drafts else None
        self._rewrites = LastTokens()
        self._stores: list[Store] = []
        self._epoch: tuple[tuple[str, str], ...] = ()
        self._steps = MeasuredSteps(self.pace)
        self._goes_on_wrong = False

    def bind(self, holder: BlockHolder, blocks: int) -> None:
        """Set the holder of the engine's ``blocks`` blocks."""
        self._holder, self._held, self._blocks = holder, JobBlocks(blocks), range(blocks)
        if self._drafts:
            self._drafts.resize(blocks)

    @property
    def busy(self) -> bool:
        """Whether jobs are in flight."""
        return bool(self._jobs)

    def frees_soon(self) -> bool:
        """Whether some block is held only by jobs that started recently."""
        assert self._holder is not None
        since = self._clock() - FREES_SOON_S
        young = (job for job in self._jobs.values() if job.began > since)
        return any(self._holder.free_soon(job.held) for job in young)

    def forget_all(self) -> None:
        """The engine's weights changed: KV computed so far must not be used."""
        self._epoch = (("epoch", secrets.token_hex(16)),)
        if self._holder:
            # Its own reset may fail while jobs hold blocks; then it would find these, and they
            # would be stored under the new names.
            self._holder.forget(self._blocks)
        self._states.clear()
        if self._drafts:
            self._drafts.forget_all()

    # ---- loading ----------------------------------------------------------------------------

    def match(self, request: Request, names: PromptScope, computed: int) -> tuple[int | None, bool]:
        """Decide how many tokens beyond ``computed`` to load.

        Returns:
            The number of tokens (None = call again later), and whether the load is asynchronous.
        """
        if not (self._setup.role.loads and self._setup.can_name(names)):
            return 0, False
        state = self._state(request, names)
        now = self._clock()
        if now < state.wait.ask_at or self._decisions.waits_for_room(state.load, now):
            return None, False
        state.known, state.load.choice = computed, None
        tokens = self._hit_tokens(state, computed, now)
        if tokens is None:
            return None, False
        state.known += tokens
        self._backlog.joins(request.request_id, request.num_tokens - state.known, state.known)
        return tokens, tokens > 0 and self._options.load is LoadOrder.ASYNC

    def _hit_tokens(self, state: RequestState, computed: int, now: float) -> int | None:
        """How many tokens beyond ``computed`` to load; None = ask again later."""
        request, waits = state.request, self._options.load is LoadOrder.ASYNC
        most = self._setup.loadable_tokens(request.num_tokens, asynchronous=waits)
        pages = most // self._page_tokens
        missing = missing_tokens(0, pages, computed, self._page_tokens)
        if state.loads_over or not missing:
            return 0
        if not self._lookups.is_turn(state, last=state.wait.is_over(now)):
            wait_s = self._wait_s(self.pace.recompute_s(missing))
            return self._lookups.pass_over(state, now, wait_s)
        keys = state.keys()[:pages]
        if len(keys) * self._page_tokens <= computed:
            return 0
        promise = self._lookups.promise(request)
        hit = self._lookups.ask(keys, promise, state.hint)
        there = hit.pages + hit.remote
        wanted = min(len(keys), max(there + hit.pending, promise.promised_pages(self._page_tokens)))
        missing = missing_tokens(there, wanted, computed, self._page_tokens)
        if missing and self._waits(state, missing, now):
            return None
        first = end = computed // self._page_tokens
        if there * self._page_tokens > computed:
            choice = self._decisions.decide(state.load, self._question(state, hit, computed), now)
            if choice is None:
                return None
            end = first + choice.pages
        state.will_load(hit, first, end)
        return max(0, end * self._page_tokens - computed)

    def _question(self, state: RequestState, hit: Hit, computed: int) -> HitOffer:
        """The input of the load choice; a step that waits for layers computes nothing meanwhile."""
        space = self._opening.get()
        page_bytes = sum(space.page_bytes) if space is not None else 0
        waits = self._options.load is LoadOrder.ASYNC
        backlog = self._backlog.beside(state.request.request_id) if waits else (0, 0)
        divisible = not any(window_pages(one, self._page_tokens) for one in self._setup.groups)
        return offer_of(
            hit, computed, self._page_tokens, page_bytes, backlog,
            divisible=divisible, promised=self._lookups.promise(state.request).continues,
        )  # fmt: skip

    def allocated(self, request: Request, blocks: Sequence[Sequence[int]], tokens: int) -> None:
        """A request got blocks; queue the load of ``tokens`` tokens."""
        state = self._states.get(request.request_id)
        choice = state.load.choice if state is not None else None
        if not tokens or state is None or choice is None:
            return
        self.counts.add("hit_tokens", tokens)
        end = state.hit * self._page_tokens
        computed = end - tokens
        disk, remote = self.hit_sources(request.request_id, tokens)
        self.counts.add("disk_hit_tokens", disk)
        self.counts.add("remote_hit_tokens", remote)
        first = computed // self._page_tokens
        now, least_s = self._clock(), self._options.load_timeout_ms_min / 1000
        load = Load(
            job=self._next_job, request=request.request_id,
            keys=state.keys()[first : state.hit],
            blocks=[target_blocks(self._setup, place, blocks, computed, first, state.hit)
                    for place in range(len(self._setup.groups))],
            wait_s=state.wait.left_s(now, self._wait_s(choice.compute_s), least_s),
            layerwise=self._options.load is LoadOrder.LAYERWISE,
            known=computed % self._page_tokens,
        )  # fmt: skip
        state.wait = PendingWait()
        if end == request.num_tokens:
            self._rewrites.expect(request.request_id, load)
        self._decisions.began(load.job, state.load, now)
        self._begin(request.request_id, load, first, is_load=True)
        self._jobs[load.job].known = load.known
        self._loads.append(load)
        if self._drafts:
            self._drafts.begins_load(load, first, state)

    def hit_sources(self, request_id: str, tokens: int) -> tuple[int, int]:
        """How many of the ``tokens`` of a request's hit come from disk, and from other nodes."""
        state = self._states.get(request_id)
        return state.sources(tokens, self._page_tokens) if state is not None else (0, 0)

    def _wait_s(self, compute_s: float) -> float:
        """Maximum seconds to wait for tokens that take ``compute_s``, within the limits."""
        least, most = self._options.load_timeout_ms_min / 1000, self._options.load_timeout_ms / 1000
        return min(most, max(least, compute_s))

    def _waits(self, state: RequestState, missing: int, now: float) -> bool:
        """Whether the request should wait for pages that are being written or located."""
        if not state.wait.begun:
            self.counts.add("waits")
        return state.wait.goes_on(now, self._wait_s(self.pace.recompute_s(missing)))

    # ---- storing ----------------------------------------------------------------------------

    def build(
        self, scheduled: Sequence[ScheduledRequest], tokens: int, decoded: int = 0, *,
        drafted: bool = True, others_load: bool = False,
    ) -> Step:  # fmt: skip
        """Return the jobs that the workers start in this step.

        Args:
            scheduled: the requests of the step.
            tokens: number of tokens that the step computes.
            decoded: number of decoded tokens among these, including speculative tokens.
            drafted: the engine's draft layer runs in this step, if it has one.
            others_load: others than this adapter load KV in this step for requests that it
                computes: what it computes may be wrong.
        """
        self._lookups.next_step()
        loads, self._loads = self._loads, []
        waited = {one.job: self._jobs[one.job].held for one in loads if one.layerwise}
        others = self._next_job if others_load else 0
        if others:
            self._next_job += 1
            # Which blocks they load is unknown.
            waited[others] = blocks_of(scheduled, self._setup.groups[0])
        self._layered.begins(waited)
        # Steps that wait for layers do not measure computing, and steps that decode do not measure
        # prefill, which takes far less per token.
        tells, now = not self._layered.waits and 2 * decoded <= tokens, self._clock()
        number = self._steps.begins(tokens if tells else 0, now)
        self._backlog = PromptsAhead()
        # A rank that has loaded what others still load must not wait for a further load.
        parted = any(job.parted(self._setup.ranks) for job in self._jobs.values())
        step = Step(loads, self._stores, not (tokens or parted), others, number)
        self._stores = []
        self._rewrites.computed(progress.request_id for progress in scheduled)
        for progress in scheduled:
            self._count_progress(progress, now)
            if self._drafts:
                self._drafts.computes(
                    progress, self._states.get(progress.request_id), drafted=drafted
                )
            if self._layered.waits:
                self._layered.computes(progress.blocks[self._setup.groups[0].index])
            stores = self._setup.role.stores and not self._goes_on_wrong
            store = self._store(progress) if stores else None
            if store is not None and self._layered.waits:
                self._layered.withhold(store)
            elif store is not None:
                step.stores.append(store)
        return step

    def _count_progress(self, progress: ScheduledRequest, now: float) -> None:
        """Count the tokens that a step computes of a request, and those left of its prompt."""
        state = self._states.get(progress.request_id)
        if state is None:
            return
        self._decisions.computes(state.load, now)
        self._steps.attends(pairs_of(max(0, progress.tokens - state.known), state.known))
        state.known = progress.tokens
        rest = state.request.num_tokens - progress.tokens
        self._backlog.joins(progress.request_id, rest, progress.tokens)

    def see(self, request: Request, names: PromptScope) -> None:
        """Register a request, so that its pages can be stored."""
        if self._setup.can_name(names):
            self._state(request, names)

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """A request has ended.

        Returns:
            The transfer parameters for the engine that continues; None for an ordinary request.
        """
        state = self._states.pop(request_id, None)
        self._rewrites.computed([request_id])
        if self._drafts:
            self._drafts.finished(request_id)
        if state is None:
            return None
        self._conversations.finished(
            request_id, state.request, lambda: state.keys()[: state.leading]
        )
        return answer_of(state.request, state.leading, self._page_tokens, self._opening.node_name)

    def _store(self, progress: ScheduledRequest) -> Store | None:
        state = self._states.get(progress.request_id)
        if state is None:
            return None
        tokens = progress.tokens
        if not self._options.store_output:
            tokens = min(tokens, state.request.num_prompt_tokens)
        end = tokens // self._page_tokens
        if end <= state.stored:
            return None
        keys = state.keys()
        wanted, first = min(end, len(keys)), state.stored
        if self._drafts:
            first, wanted = self._drafts.right_pages(progress, state, first, wanted)
            self.counts.add("draft_skipped_pages", state.skip_to(first))
        end = min(wanted, first + self._held.pages_for_stores(len(self._jobs), self._setup))
        self.counts.add("skipped_pages", wanted - end)
        blocks = [
            part
            for place in range(len(self._setup.groups))
            if (part := source_blocks(self._setup, place, progress, first, end)) is not None
        ]
        if end <= first or not blocks or self._rewrites.touch(blocks):
            return None
        state.stored = end
        store = Store(self._next_job, keys[first:end], blocks, first)
        self._begin(progress.request_id, store, first, is_load=False)
        return store

    # ---- jobs -------------------------------------------------------------------------------

    def reported(self, report: Report | None, invalid: Collection[int] = ()) -> None:
        """The workers have finished a step.

        Args:
            report: of all workers.
            invalid: blocks that this adapter or others should have loaded.
        """
        now, report = self._clock(), report or Report()
        if self._steps.reported(report.step, now) and self.pace.report_due(now):
            self._report_prefill(self.pace.seconds_per_token)
        ours = (job.held for job in self._jobs.values() if job.is_load)
        self._take(report, whole=not (invalid and set(invalid).difference(*ours)))
        self._judge_layers()
        for job in self._jobs.values():
            job.began = min(job.began, now)
        self._conversations.advance(job.request_id for job in self._jobs.values())

    def _take(self, report: Report, *, whole: bool) -> None:
        """Handle ended jobs, and jobs whose request stopped waiting; ``whole``: all blocks came."""
        for number in report.late:
            job = self._jobs.get(number)
            if job is None:
                continue
            self._held.late(job)
            self.chooser.holds_too_much = self._held.too_many_for_loads
            self._decisions.late(number, self._clock())
            self._layered.ended(number, whole=False)
            state = self._states.get(job.request_id)
            if state is not None:
                state.loads_over = True
        for number, end in report.ended.items():
            job = self._jobs.get(number)
            if job is None:
                self._others_ended(number, whole=whole)
                continue
            job.ranks_left -= end.ranks
            job.pages = min(job.pages, end.pages)
            job.seconds = max(job.seconds, end.seconds)
            if job.ranks_left <= 0:
                del self._jobs[number]
                if job.is_load:
                    self._decisions.ended(number, job.seconds, whole=job.pages == job.wanted)
                self._end(number, job)
                self._layered.ended(number, whole=job.pages == job.wanted)

    def _others_ended(self, number: int, *, whole: bool) -> None:
        """What others have loaded in a step has ended, if there was anything."""
        self._layered.ended(number, whole=whole)
        if not (whole or self._setup.recomputes or self._goes_on_wrong):
            # The engine's own cache may have what it computes now: it spreads to other requests.
            self._goes_on_wrong = True
            self._opening.log.error("another connector's load failed, and this engine does not"
                                    " compute what is missing: nothing more is stored until it is"
                                    " restarted")  # fmt: skip

    def _judge_layers(self) -> None:
        """Accept results computed on layer-wise loads if the loads succeeded on all ranks."""
        assert self._holder is not None
        judged = self._layered.judge()
        self._stores += judged.good
        for blocks in judged.forgotten:
            # Else the engine would find such blocks in its own cache before they are recomputed.
            self._holder.forget(blocks)
        for store in judged.dropped:
            job = self._jobs.pop(store.job)
            self._let_go(job)
            state = self._states.get(job.request_id)
            if state is not None:
                state.stored = min(state.stored, job.first)

    def _let_go(self, job: BlockJob) -> None:
        assert self._holder is not None
        self._holder.release(job.held)
        self._held.released(job)
        self.chooser.holds_too_much = self._held.too_many_for_loads

    def _end(self, number: int, job: BlockJob) -> None:
        """A job has ended on all ranks: release its blocks."""
        self._let_go(job)
        state = self._states.get(job.request_id)
        if not job.is_load:
            return
        used = 0 if job.late else job.pages
        if self._drafts:
            self._drafts.ended_load(number, used)
        self.counts.add("load_failed_tokens", job.failed_tokens(used, self._page_tokens))
        if used < job.wanted:
            self._rewrites.computed([job.request_id])  # nobody shares what was not loaded
        if job.pages < job.wanted and state is not None:
            # Missing pages are computed, and then stored again.
            state.stored = min(state.stored, job.first + job.pages)
            state.loads_over = True

    def _begin(self, request_id: str, message: Load | Store, first: int, *, is_load: bool) -> None:
        assert self._holder is not None, "blocks were allocated before they existed"
        held = [block for part in message.blocks for block in part.blocks if block]
        self._holder.hold(held)
        wanted = len(message.keys)
        job = BlockJob(request_id, first, wanted, wanted, held, is_load, self._setup.ranks)
        self._jobs[message.job] = job
        self._held.taken(job)
        self.chooser.holds_too_much = self._held.too_many_for_loads
        self._next_job += 1

    # ---- requests ---------------------------------------------------------------------------

    def _state(self, request: Request, names: PromptScope) -> RequestState:
        state = self._states.get(request.request_id)
        if state is None or state.request is not request:
            chain = chain_of(self._setup, names, self._epoch)
            hint = read_hints(request, self.counts)
            state = self._states[request.request_id] = RequestState(request, names, chain, hint)
        return state
