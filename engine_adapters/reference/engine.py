"""The step loop: receive, look up, schedule, compute, sample, store new pages.

Threads: the step thread owns everything, except: ``submit`` and ``abort`` put into the bounded
inbox; ``kv_hashes`` reads under ``_hashes_lock`` (which protects only ``_hashes``); and each
request's ``emit`` passes output to the submitter.
"""

import logging
import queue
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from engine_adapters.reference.config import MODELS
from engine_adapters.reference.metrics import Metrics
from engine_adapters.reference.model import Chunk, Model
from engine_adapters.reference.pool import LayerHash, PagedPool
from engine_adapters.reference.prefix_tree import BlockAllocator, PrefixTree, TreeChange
from engine_adapters.reference.request import Output, Request, State
from engine_adapters.reference.sampler import sample
from engine_adapters.reference.scheduler import Limits, Scheduler
from engine_adapters.reference.store import StoreAdapter
from engine_adapters.reference.tokenizer import EOS
from kvstore.client.store import KVStore
from kvstore.engine.transfer import Transfer
from kvstore.page import CanonicalLayout, ShardSpec, SpaceIdentity

_log = logging.getLogger(__name__)

Mode = Literal["mono", "prefill", "decode"]

_HASHES_KEPT: Final = 1024
_IDLE_WAIT_S: Final = 0.5
_JOB_POLL_S: Final = 0.001  # interval of polling jobs while there is nothing to compute


class EngineBusyError(Exception):
    """The engine has its maximum number of requests."""


class EngineClosedError(Exception):
    """The engine accepts no more requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of an engine.

    Attributes:
        blocks: blocks of the K/V pool.
        page_tokens: a multiple of ``block_tokens``.
        prefix_cache: keep the pages of ended requests for later ones.
        kv_hashes: hash each prompt's K/V (a few milliseconds per 1,000 tokens of the demo model).
    """

    model: str = "tiny"
    mode: Mode = "mono"
    blocks: int = 2048
    block_tokens: int = 16
    page_tokens: int = 64
    prefix_cache: bool = True
    kv_hashes: bool = True
    limits: Limits = field(default_factory=Limits)


class KVHashes(NamedTuple):
    """Hashes of a prompt's complete K/V, layer by layer."""

    prompt_tokens: int
    layers: list[LayerHash]


class Engine:
    """One model, one pool, one step thread.

    Attributes:
        on_change: set before :meth:`start`; called in the step thread after each step, with the
            changes of the local prefix cache. Must not block.
    """

    def __init__(self, options: EngineOptions, store: KVStore | None = None) -> None:
        """Create model and pool; :meth:`start` starts the step thread.

        Args:
            options: sizes and limits.
            store: used and closed by this engine; None = no store.
        """
        self.options = options
        self.config = config = MODELS[options.model]
        self.metrics = Metrics()
        self.identity = SpaceIdentity(
            model=f"reference-{config.name}",
            revision=config.revision,
            kv_dtype="float32",
            page_tokens=options.page_tokens,
        )
        self._model = Model(config)
        self._pool = PagedPool(config, options.blocks, options.block_tokens)
        self._allocator = BlockAllocator(options.blocks)
        page_blocks = options.page_tokens // options.block_tokens
        self._tree = PrefixTree(self._allocator, page_blocks) if options.prefix_cache else None
        self._scheduler = Scheduler(
            options.limits,
            self._allocator,
            self._tree,
            page_tokens=options.page_tokens,
            block_tokens=options.block_tokens,
        )
        shard = ShardSpec(
            layout=CanonicalLayout(head_dim=config.head_dim),
            layers=(0, config.layers),
            heads=(0, config.kv_heads),
        )
        self._store: StoreAdapter | None = None
        if store is not None:
            self._store = StoreAdapter(
                store, self.identity, shard, self._pool, self._allocator, self.metrics
            )
        self.on_change: Callable[[list[TreeChange]], None] | None = None
        self._inbox: queue.Queue[tuple[Literal["submit", "abort", "wake"], Request | None]]
        self._inbox = queue.Queue(2 * (options.limits.waiting_max + options.limits.running_max))
        self._held: dict[Request, Output] = {}  # last outputs of the requests that are FLUSHING
        self._hashes: OrderedDict[str, KVHashes] = OrderedDict()
        self._hashes_lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)

    # Any thread

    def start(self) -> None:
        """Start the step thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the step thread is running."""
        return self._thread.is_alive() and not self._closing.is_set()

    @property
    def model_name(self) -> str:
        """Name of the model for clients."""
        return self.identity.model

    def fits(self, tokens: int) -> bool:
        """Whether a request of ``tokens``, prompt and output, can ever be served."""
        return tokens <= self.config.max_model_len and self._scheduler.fits(tokens)

    def submit(self, request: Request) -> None:
        """Queue a request; its ``emit`` gets at least one output with a finish reason.

        Raises:
            EngineBusyError: the inbox is full.
            EngineClosedError: the engine is closing, or its thread has died.
        """
        if not self.alive:
            raise EngineClosedError("the engine is shutting down")
        request.arrived = request.phase_began = time.monotonic()
        try:
            self._inbox.put_nowait(("submit", request))
        except queue.Full as error:
            raise EngineBusyError("the engine's queue is full") from error
        if self._closing.is_set():  # perhaps the inbox is not read any more
            raise EngineClosedError("the engine is shutting down")

    def abort(self, request: Request) -> None:
        """Cancel a request; safe for one that has ended."""
        try:
            self._inbox.put(("abort", request), timeout=1.0)
        except queue.Full:
            _log.warning("request %s could not be aborted: the inbox is full", request.id)

    def kv_hashes(self, request_id: str) -> KVHashes | None:
        """K/V hashes of one of the last requests; None if unknown."""
        with self._hashes_lock:
            return self._hashes.get(request_id)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop after the current step; unfinished requests end with ``shutdown``.

        Returns:
            False if the thread, or a job on the pool's memory, did not end in time.
        """
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        try:
            self._inbox.put_nowait(("wake", None))
        except queue.Full:
            _log.debug("the inbox is full: the step thread is awake")
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        ended = True
        if self._store is not None:
            ended = self._store.close(max(0.1, deadline - time.monotonic()))
            self._store = None
        return ended

    # Step thread

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._receive()
                self._step()
        finally:  # also if a step has failed: no submitter may wait forever
            self._closing.set()
            self._end_all()

    def _receive(self) -> None:
        """Read the inbox; wait for it only if there is nothing to do."""
        timeout_s = _IDLE_WAIT_S
        if self._store is not None and self._store.busy:
            timeout_s = _JOB_POLL_S
        computing = any(r.state is State.RUNNING for r in self._scheduler.requests())
        try:
            event = self._inbox.get_nowait() if computing else self._inbox.get(timeout=timeout_s)
            while True:
                self._handle(*event)
                event = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _handle(self, kind: str, request: Request | None) -> None:
        if request is None:
            return
        if kind == "abort":
            if request.state is not State.FINISHED:
                self.metrics.requests.labels("abort").inc()
                self._drop(request)
            return
        handoff = request.from_handoff
        if handoff is not None:
            first = self._append(request, handoff.first_token)
            if first.finish_reason is not None:
                request.state = State.FINISHED
                self._emit_last(request, first)
                return
            request.emit(first)
        if not self._scheduler.add(request):
            request.state = State.FINISHED
            self._emit_last(request, Output([], "", "overloaded"))

    def _step(self) -> None:
        began = time.monotonic()
        if self._store is not None:
            for ready in self._store.poll(began):
                gained = ready.tokens - ready.request.computed
                self.metrics.prompt_tokens.labels("restored").inc(gained)
                self._scheduler.restored(ready.request, ready.tokens)
                self._end_restoring(ready.request, began)
        self._admit(began)
        for request in [r for r in self._held if r.state is State.FLUSHING]:
            self._flush(request, began)
        plan = self._scheduler.plan()
        for request in plan.preempted:
            self.metrics.preemptions.inc()
            request.phase_began = began
        if plan.work:
            self._compute(plan.work, began)
        self._report()

    def _admit(self, now: float) -> None:
        for request in self._scheduler.admit():
            request.timings.queue_s += request.end_phase(now)
            request.timings.cached_tokens += request.computed
            self.metrics.prompt_tokens.labels("local").inc(request.computed)
            if self._store is not None and self._store.begin(request, now):
                request.state = State.RESTORING
            else:
                self._end_restoring(request, time.monotonic())

    def _end_restoring(self, request: Request, now: float) -> None:
        request.timings.restore_s += request.end_phase(now)
        self._record_hashes(request)

    def _compute(self, work: list[tuple[Request, int]], began: float) -> None:
        chunks = [
            Chunk(request.tokens[request.computed : request.computed + count], start, blocks)
            for request, count in work
            for start, blocks in [(request.computed, request.blocks)]
        ]
        logits = self._model.forward(chunks, self._pool)
        now = time.monotonic()
        prefilled = 0
        for row, (request, count) in enumerate(work):
            fresh = min(request.computed + count, request.prompt_tokens) - request.computed
            prefilled += max(fresh, 0)
            self._scheduler.computed(request, count)
            self._record_hashes(request)
            if request.uncomputed:
                self._offer(request, now)
                continue
            token = sample(logits[row], request.sampling, len(request.tokens))
            output = self._append(request, token)
            if output.finish_reason is not None:
                self._finish(request, output, now)
                continue
            request.emit(output)
            if fresh > 0:
                self._offer(request, now)
        spent = time.monotonic() - began
        self.metrics.step_seconds.observe(spent)
        self.metrics.prompt_tokens.labels("computed").inc(prefilled)
        if self._store is not None and prefilled:
            self._store.observe_prefill(prefilled, spent, began + spent)

    def _offer(self, request: Request, now: float) -> None:
        if self._store is not None:
            self._store.offer(request, now)

    def _append(self, request: Request, token: int) -> Output:
        """Append an output token; the output has a finish reason if it is the last one."""
        request.tokens.append(token)
        self.metrics.output_tokens.inc()
        text = request.text.feed(token)
        if request.text.stopped or token == EOS:
            return Output([token], text + request.text.flush(), "stop")
        full = len(request.tokens) >= self.config.max_model_len
        if full or request.output_tokens >= request.max_tokens:
            return Output([token], text + request.text.flush(), "length")
        return Output([token], text)

    def _finish(self, request: Request, last: Output, now: float) -> None:
        """Last token: store missing pages, answer, free the blocks."""
        request.timings.compute_s += request.end_phase(now)
        if request.to_handoff:
            request.state = State.FLUSHING
            self._held[request] = last
            self._flush(request, now)
            return
        if self._store is not None:
            self._scheduler.extend_keys(request)
            self._store.offer(request, now, final=True)
        self._scheduler.finish(request)
        self._emit_last(request, last)

    def _flush(self, request: Request, now: float) -> None:
        """Answer a handoff when the store has its pages, so that the decode engine finds them."""
        if self._store is not None and not self._store.flush(request, now):
            return
        request.timings.flush_s = request.end_phase(now)
        last = self._held.pop(request)
        self._scheduler.finish(request)
        page_tokens = self.options.page_tokens
        handoff = Transfer(
            do_remote_prefill=True,
            kvstore_pages=min(request.stored_pages, request.prompt_tokens // page_tokens),
            kvstore_page_tokens=page_tokens,
            kvstore_node=self._store.node_name if self._store is not None else "",
            handoff_id=request.handoff_id or uuid.uuid4().hex,
            first_token=request.tokens[request.prompt_tokens],
            prompt_tokens=request.prompt_tokens,
            position=request.prompt_tokens,
            tail_key=request.tail_key,
            tail_tokens=request.prompt_tokens % page_tokens if request.tail_key else 0,
            seed=request.sampling.seed if request.sampling.temperature else None,
        )
        self._emit_last(request, last._replace(handoff=handoff))

    def _emit_last(self, request: Request, last: Output) -> None:
        assert last.finish_reason is not None
        self.metrics.requests.labels(last.finish_reason).inc()
        request.emit(last)

    def _drop(self, request: Request) -> None:
        """Remove a request without an answer."""
        if self._store is not None:
            self._store.abort(request)
        self._held.pop(request, None)
        self._scheduler.finish(request)

    def _end_all(self) -> None:
        while not self._inbox.empty():
            kind, request = self._inbox.get_nowait()
            if kind == "submit" and request is not None:
                self._emit_last(request, Output([], "", "shutdown"))
        for request in list(self._scheduler.requests()):
            self._drop(request)
            self._emit_last(request, Output([], "", "shutdown"))

    def _record_hashes(self, request: Request) -> None:
        """Hash the prompt's K/V as soon as they are complete."""
        complete = request.computed >= request.prompt_tokens
        if not (self.options.kv_hashes and complete) or request.hashed:
            return
        request.hashed = True
        hashes = self._pool.hashes(request.blocks, request.prompt_tokens)
        with self._hashes_lock:
            self._hashes.pop(request.id, None)
            self._hashes[request.id] = KVHashes(request.prompt_tokens, hashes)
            if len(self._hashes) > _HASHES_KEPT:
                self._hashes.popitem(last=False)

    def _report(self) -> None:
        self.metrics.waiting.set(self._scheduler.waiting)
        self.metrics.running.set(self._scheduler.running)
        self.metrics.free_blocks.set(self._allocator.free)
        if self._tree is not None:
            changes = self._tree.take_changes()
            if changes and self.on_change is not None:
                self.on_change(changes)
