"""The steps of an engine: poll, admit, compute, sample, store new pages, push and be pushed to.

Everything here is called in the step thread, except :meth:`Steps.kv_hashes`.
"""

import math
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Final, NamedTuple

from engine_adapters.reference.landing import DecodePushes, Landed
from engine_adapters.reference.model import Chunk
from engine_adapters.reference.parts import EngineParts
from engine_adapters.reference.pool import LayerHash
from engine_adapters.reference.push_queues import DecodeQueues
from engine_adapters.reference.pushing import PrefillPushes
from engine_adapters.reference.request import Output, Request, State
from engine_adapters.reference.sampler import logprobs_of, sample
from engine_adapters.reference.tokenizer import EOS
from kvstore.engine.pace import pairs_of
from kvstore.engine.transfer import Transfer

_HASHES_KEPT: Final = 1024
_COMPUTES: Final = frozenset({State.WAITING, State.RESTORING, State.RECEIVED, State.RUNNING})
"""What has a prompt or an answer left to compute."""


class KVHashes(NamedTuple):
    """Hashes of a prompt's complete K/V, layer by layer."""

    prompt_tokens: int
    layers: list[LayerHash]


class Steps:
    """What the step thread does with the parts of an engine."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._held: dict[Request, Output] = {}  # last outputs of those INFLIGHT or FLUSHING
        self._hashes: OrderedDict[str, KVHashes] = OrderedDict()
        self._hashes_lock = threading.Lock()  # protects only _hashes

    def kv_hashes(self, request_id: str) -> KVHashes | None:
        """K/V hashes of one of the last requests; None if unknown. Any thread."""
        with self._hashes_lock:
            return self._hashes.get(request_id)

    @property
    def is_computing(self) -> bool:
        """Whether the next step has something to compute."""
        return any(r.state is State.RUNNING for r in self._parts.scheduler.requests())

    @property
    def is_idle(self) -> bool:
        """Whether no request has a prompt or an answer left to compute.

        Requests that only wait for their puts, or for the other engine of a push, are none.
        """
        return not any(r.state in _COMPUTES for r in self._parts.scheduler.requests())

    @property
    def has_jobs(self) -> bool:
        """Whether something in the background must be polled, and may end soon."""
        store, pushes = self._parts.store, self._parts.pushes
        sends = isinstance(pushes, PrefillPushes) and pushes.busy
        return sends or (store is not None and store.busy)

    @property
    def awaits_pushes(self) -> bool:
        """Whether pushes to this engine must be polled."""
        pushes = self._parts.pushes
        return isinstance(pushes, DecodePushes) and pushes.busy

    def begin(self, request: Request) -> None:
        """Queue a submitted request."""
        handoff = request.from_handoff
        if handoff is not None:
            first = self._append(request, handoff.first_token)
            if first.finish_reason is not None:
                request.state = State.FINISHED
                self._emit_last(request, first)
                return
            request.emit(first)
        pushes = self._parts.pushes if request.push is not None else None
        if not (self._parts.scheduler if pushes is None else pushes).add(request):
            request.state = State.FINISHED
            self._emit_last(request, Output([], "", "overloaded"))

    def abort(self, request: Request) -> None:
        """Remove a request whose client does not wait any more."""
        if request.state is not State.FINISHED:
            self._parts.metrics.requests.labels("abort").inc()
            self.drop(request)

    def step(self) -> None:
        """Poll what is in the background, admit, compute."""
        began = time.monotonic()
        if self._parts.store is not None:
            for ready in self._parts.store.poll(began):
                gained = ready.tokens - ready.request.computed
                self._parts.metrics.prompt_tokens.labels("restored").inc(gained)
                if ready.request.state is State.TRANSFER:
                    assert isinstance(self._parts.pushes, DecodePushes)
                    self._parts.pushes.restored(ready.request, ready.tokens)
                    continue
                self._parts.scheduler.restored(ready.request, ready.tokens)
                self._end_restoring(ready.request, began)
        if isinstance(self._parts.pushes, PrefillPushes):
            self._poll_outgoing(self._parts.pushes, began)
        elif isinstance(self._parts.pushes, DecodePushes):
            for landed in self._parts.pushes.poll():
                self._land(landed, began)
        self._admit(began)
        for request in [r for r in self._held if r.state is State.FLUSHING]:
            self._flush(request, began)
        plan = self._parts.scheduler.plan()
        for request in plan.preempted:
            self._parts.metrics.preemptions.inc()
            request.phase_began = began
        if plan.work:
            self._compute(plan.work, began)

    def _poll_outgoing(self, pushes: PrefillPushes, now: float) -> None:
        for request in pushes.stopped():
            if self._parts.store is not None:
                self._parts.store.abort(request)
            self._held[request] = Output([], "", "handoff_failed")
        for end in pushes.ended():
            if end.failed and not end.is_stopped:
                end.request.phase_began = now
                end.request.state = State.FLUSHING  # what was pushed in vain is stored
            else:
                self._store_full_pages(end.request, now)
                self._answer_handoff(end.request)
        pushes.start(store_takes=self._parts.store is not None and self._parts.store.takes_pages)

    def _land(self, landed: Landed, now: float) -> None:
        """A push has ended: continue with what came, or restore and compute what did not."""
        request, aux = landed.request, landed.aux
        request.timings.push_s += request.end_phase(now)
        request.timings.pushed_tokens += landed.pushed
        self._parts.metrics.prompt_tokens.labels("pushed").inc(landed.pushed)
        self._parts.scheduler.computed(request, landed.tokens - request.computed)
        if self._parts.observer is not None:
            failed = aux is None
            counts = landed.tokens, landed.pushed
            self._parts.observer.after_restore(request, *counts, failed=failed)
        if aux is None:
            return
        self._record_hashes(request)
        if aux.seed is not None:
            request.sampling = replace(request.sampling, seed=aux.seed)
        request.timings.prefill_cached_tokens = aux.cached_tokens
        first = self._append(request, aux.first_token, aux.logprobs)
        if aux.is_final and first.finish_reason is None:
            first = first._replace(finish_reason="stop")
        if first.finish_reason is not None:
            self._finish(request, first, now)
        else:
            request.emit(first)

    def _admit(self, now: float) -> None:
        queues = self._parts.queues if isinstance(self._parts.queues, DecodeQueues) else None
        for request in queues.run() if queues is not None else ():
            request.timings.queue_s += request.end_phase(now)
            if request.computed < request.prompt_tokens:
                self._begin_restoring(request, now)
        for request in self._parts.scheduler.admit(
            queues.until if queues is not None else math.inf
        ):
            self._begin_phases(request, now)
            self._begin_restoring(request, now)
        while queues is not None and (placed := queues.preallocate()) is not None:
            assert isinstance(self._parts.pushes, DecodePushes)
            self._begin_phases(placed, now)
            first = placed.computed
            wanted = self._parts.pushes.is_wanted(placed) and placed.fake is None
            if self._parts.store is not None and wanted:
                first = self._parts.store.begin_beside(placed, now)
            self._parts.pushes.announce(placed, first)
        store_busy = self._parts.store is not None and self._parts.store.busy
        if isinstance(self._parts.pushes, PrefillPushes) and not store_busy:
            self._parts.pushes.give_way()  # else its jobs may free what others wait for

    def _begin_phases(self, request: Request, now: float) -> None:
        """A request has got its blocks."""
        request.timings.queue_s += request.end_phase(now)
        request.timings.cached_tokens += request.computed
        self._parts.metrics.prompt_tokens.labels("local").inc(request.computed)

    def _begin_restoring(self, request: Request, now: float) -> None:
        store, others = self._parts.store, partial(self._parts.scheduler.prompts_before, request)
        if store is not None and store.begin(request, now, others):
            request.state = State.RESTORING
        else:
            self._end_restoring(request, time.monotonic())

    def _end_restoring(self, request: Request, now: float) -> None:
        request.timings.restore_s += request.end_phase(now)
        self._record_hashes(request)
        if isinstance(self._parts.pushes, PrefillPushes):
            self._parts.pushes.cached(request)

    def _compute(self, work: list[tuple[Request, int]], began: float) -> None:
        chunks = [
            Chunk(request.tokens[request.computed : request.computed + count], start, blocks)
            for request, count in work
            for start, blocks in [(request.computed, request.blocks)]
        ]
        hook = (
            self._parts.pushes.layer_hook(work)
            if isinstance(self._parts.pushes, PrefillPushes)
            else None
        )
        logits = self._parts.model.forward(chunks, self._parts.pool, hook)
        now = time.monotonic()
        prefilled, pairs = 0, 0.0
        for row, (request, count) in enumerate(work):
            fresh = min(request.computed + count, request.prompt_tokens) - request.computed
            prefilled += max(fresh, 0)
            pairs += pairs_of(max(fresh, 0), request.computed)
            self._parts.scheduler.computed(request, count)
            self._record_hashes(request)
            if request.uncomputed:
                self._store_full_pages(request, now)
                continue
            token = sample(logits[row], request.sampling, len(request.tokens))
            logprobs: dict[int, float] = {}
            if request.logprobs is not None:
                logprobs = logprobs_of(logits[row], token, request.logprobs)
            output = self._append(request, token, logprobs)
            if self._parts.observer is not None and not request.to_handoff:
                self._parts.observer.decode_step(request, output.finish_reason)
            if output.finish_reason is not None:
                self._finish(request, output, now)
                continue
            request.emit(output)
            if fresh > 0:
                self._store_full_pages(request, now)
        spent = time.monotonic() - began
        self._parts.metrics.step_seconds.observe(spent)
        self._parts.metrics.prompt_tokens.labels("computed").inc(prefilled)
        if self._parts.store is not None and prefilled:
            self._parts.store.observe_prefill(prefilled, pairs, spent, began + spent)

    def _store_full_pages(self, request: Request, now: float) -> None:
        if self._parts.store is not None and request.fake is None:
            self._parts.store.store_full_pages(request, now)

    def _append(
        self, request: Request, token: int, logprobs: dict[int, float] | None = None
    ) -> Output:
        """Append an output token; the output has a finish reason if it is the last one."""
        entries = () if request.logprobs is None else (logprobs or {},)
        if not request.output_tokens and entries:
            request.first_logprobs = entries[0]
        return self._output(request, token)._replace(logprobs=entries)

    def _output(self, request: Request, token: int) -> Output:
        request.tokens.append(token)
        self._parts.metrics.output_tokens.inc()
        text = request.text.feed(token)
        if request.text.stopped or token == EOS:
            return Output([token], text + request.text.flush(), "stop")
        full = len(request.tokens) >= self._parts.config.max_model_len
        if full or request.output_tokens >= request.max_tokens:
            return Output([token], text + request.text.flush(), "length")
        return Output([token], text)

    def _finish(self, request: Request, last: Output, now: float) -> None:
        """Last token: store missing pages, answer, free the blocks."""
        request.timings.compute_s += request.end_phase(now)
        if request.to_handoff:
            self._held[request] = last
            if isinstance(self._parts.pushes, PrefillPushes) and self._parts.pushes.has(request):
                self._store_full_pages(request, now)
                self._parts.pushes.computed(request, is_final=last.finish_reason == "stop")
            else:
                request.state = State.FLUSHING
                self._flush(request, now)
            return
        if self._parts.store is not None and request.fake is None:  # else its K/V are none
            self._parts.scheduler.extend_keys(request)
            self._parts.store.store_full_pages(request, now, final=True)
            self._parts.store.finished(request)
        self._remove(request)
        self._emit_last(request, last)

    def _flush(self, request: Request, now: float) -> None:
        """Answer a handoff when the store has its pages, so that the decode engine finds them."""
        if self._parts.store is not None and not self._parts.store.flush(request, now):
            return
        request.timings.flush_s = request.end_phase(now)
        self._answer_handoff(request)

    def _answer_handoff(self, request: Request) -> None:
        """Answer with what a decode engine needs."""
        last = self._held.pop(request)
        if self._parts.store is not None and request.fake is None:
            self._parts.store.finished(request)
        self._remove(request)
        page_tokens = self._parts.options.page_tokens
        if not request.output_tokens:
            self._emit_last(request, last)
            return
        handoff = Transfer(
            do_remote_prefill=True,
            kvstore_pages=min(request.stored_pages, request.prompt_tokens // page_tokens),
            kvstore_page_tokens=page_tokens,
            kvstore_node=self._parts.store.node_name if self._parts.store is not None else "",
            handoff_id=request.handoff_id or uuid.uuid4().hex,
            first_token=request.tokens[request.prompt_tokens],
            prompt_tokens=request.prompt_tokens,
            position=request.prompt_tokens,
            tail_key=request.tail_key,
            tail_tokens=request.prompt_tokens % page_tokens if request.tail_key else 0,
            seed=request.sampling.seed if request.sampling.temperature else None,
            handoff=request.report,
        )
        self._emit_last(request, last._replace(handoff=handoff))

    def _emit_last(self, request: Request, last: Output) -> None:
        assert last.finish_reason is not None
        self._parts.metrics.requests.labels(last.finish_reason).inc()
        if request.report is not None and last.handoff is None:
            last = last._replace(handoff=Transfer(handoff=request.report))
        request.emit(last)

    def drop(self, request: Request) -> None:
        """Remove a request without an answer."""
        if self._parts.store is not None:
            self._parts.store.abort(request)
        self._held.pop(request, None)
        self._remove(request)

    def _remove(self, request: Request) -> None:
        """Take a request out of all queues; jobs and pushes keep their own references."""
        if self._parts.pushes is not None and self._parts.pushes.has(request):
            self._parts.pushes.abort(request)
        elif self._parts.queues is not None:
            self._parts.queues.remove(request)
        else:
            self._parts.scheduler.finish(request)

    def requests(self) -> Iterator[Request]:
        """Every request that is not finished."""
        others = self._parts.queues.requests() if self._parts.queues is not None else ()
        return chain(self._parts.scheduler.requests(), others)

    def end(self, request: Request) -> None:
        """Answer a request that is not served to its end."""
        self._emit_last(request, Output([], "", "shutdown"))

    def _record_hashes(self, request: Request) -> None:
        """Hash the prompt's K/V as soon as they are complete."""
        complete = request.computed >= request.prompt_tokens
        if not (self._parts.options.kv_hashes and complete) or request.hashed:
            return
        request.hashed = True
        hashes = self._parts.pool.hashes(request.blocks, request.prompt_tokens)
        with self._hashes_lock:
            self._hashes.pop(request.id, None)
            self._hashes[request.id] = KVHashes(request.prompt_tokens, hashes)
            if len(self._hashes) > _HASHES_KEPT:
                self._hashes.popitem(last=False)
