"""An engine: requests go in from any thread, one thread makes the steps.

Threads: the step thread owns everything, except: ``submit`` puts into the bounded inbox and begins
the push of a request; ``abort`` puts into a list of its own; ``kv_hashes`` and ``handoffs`` read
under locks; and each request's ``emit`` passes output to the submitter.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Literal

from engine_adapters.reference.handoff_options import HandoffOptions
from engine_adapters.reference.parts import EngineOptions, build
from engine_adapters.reference.prefix_tree import TreeChange
from engine_adapters.reference.pushing import PrefillPushes
from engine_adapters.reference.request import Request
from engine_adapters.reference.steps import KVHashes, Steps
from kvstore.client.store import KVStore
from kvstore.handoff.states import HandoffStatus
from kvstore.protocol.errors import CapacityError

_log = logging.getLogger(__name__)

_IDLE_WAIT_S: Final = 0.5
_JOB_POLL_S: Final = 0.001  # interval of polling jobs while there is nothing to compute
_PUSH_POLL_S: Final = 0.005  # they take a second; polls take the cores on which prefill computes


class EngineBusyError(Exception):
    """The engine has its maximum number of requests."""


class EngineClosedError(Exception):
    """The engine accepts no more requests."""


class Engine:
    """One model, one pool, one step thread.

    Attributes:
        parts: what it is made of; only the step thread uses them.
        on_change: set before :meth:`start`; called in the step thread after each step, with the
            changes of the local prefix cache. Must not block.
    """

    def __init__(
        self,
        options: EngineOptions,
        store: KVStore | None = None,
        handoff: HandoffOptions | None = None,
    ) -> None:
        """Create model and pool; :meth:`start` starts the step thread.

        Args:
            options: sizes and limits.
            store: used and closed by this engine; None = no store.
            handoff: a prefill engine pushes K/V, a decode engine takes them; None, and in mode
                mono: neither.

        Raises:
            InvalidArgument: the engine cannot listen where ``handoff`` says.
        """
        self.options = options
        self.parts = parts = build(options, store, handoff)
        self.config = parts.config
        self.metrics = parts.metrics
        self.identity = parts.identity
        self._steps = Steps(parts)
        self.on_change: Callable[[list[TreeChange]], None] | None = None
        self._inbox: queue.Queue[tuple[Literal["submit", "wake"], Request | None]]
        self._aborted: deque[Request] = deque()  # each submitted request at most once
        self._inbox = queue.Queue(2 * (options.limits.waiting_max + options.limits.running_max))
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

    @property
    def handoff(self) -> dict[str, Any]:
        """What this engine offers for handoffs besides the store, for ``GET /v1/engine``."""
        if self.parts.pushes is None:
            return {}
        if isinstance(self.parts.pushes, PrefillPushes):
            return {"push": {"registry": self.parts.pushes.registry}}
        return {"push": {}}

    def handoffs(self) -> list[HandoffStatus]:
        """Where each push is."""
        return self.parts.pushes.describe() if self.parts.pushes is not None else []

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a request, prompt and output, that can ever be served."""
        return min(self.config.max_model_len, self.parts.scheduler.tokens_max)

    def fits(self, tokens: int) -> bool:
        """Whether a request of ``tokens``, prompt and output, can ever be served."""
        return tokens <= self.max_model_len

    def submit(self, request: Request) -> None:
        """Queue a request; its ``emit`` gets at least one output with a finish reason.

        Raises:
            EngineBusyError: the inbox is full, or too many pushes are under way.
            EngineClosedError: the engine is closing, or its thread has died.
            InvalidArgument: the room of its push was used before, or the registry is no URL.
        """
        if not self.alive:
            raise EngineClosedError("the engine is shutting down")
        request.arrived = request.phase_began = time.monotonic()
        pushes = self.parts.pushes if request.push is not None else None
        try:
            if pushes is not None:
                pushes.begin(request)
            self._inbox.put_nowait(("submit", request))
        except CapacityError as error:
            raise EngineBusyError(str(error)) from error
        except queue.Full as error:
            if pushes is not None:
                pushes.withdraw(request)
            raise EngineBusyError("the engine's queue is full") from error
        if self._closing.is_set():  # perhaps the inbox is not read any more
            raise EngineClosedError("the engine is shutting down")

    def abort(self, request: Request) -> None:
        """Cancel a submitted request, once; never waits, and is safe for one that has ended."""
        self._aborted.append(request)
        self._wake()

    def kv_hashes(self, request_id: str) -> KVHashes | None:
        """K/V hashes of one of the last requests; None if unknown."""
        return self._steps.kv_hashes(request_id)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop after the current step; unfinished requests end with ``shutdown``.

        Returns:
            False if the thread, or a job on the pool's memory, did not end in time.
        """
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        return self.parts.close(max(0.1, deadline - time.monotonic()))

    def _wake(self) -> None:
        try:
            self._inbox.put_nowait(("wake", None))
        except queue.Full:
            _log.debug("the inbox is full: the step thread is awake")

    # Step thread

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._receive()
                self._steps.step()
                self._report()
        finally:  # also if a step has failed: no submitter may wait forever
            self._closing.set()
            self._end_all()

    def _receive(self) -> None:
        """Read the inbox; wait for it only if there is nothing to do. Then abort."""
        known = len(self._aborted)  # each was submitted before: it is read from the inbox first
        self._read_inbox(may_wait=not known and not self._steps.is_computing)
        for _ in range(known):
            self._steps.abort(self._aborted.popleft())

    def _read_inbox(self, *, may_wait: bool) -> None:
        timeout_s = _PUSH_POLL_S if self._steps.awaits_pushes else _IDLE_WAIT_S
        if self._steps.has_jobs:
            timeout_s = _JOB_POLL_S
        try:
            event = self._inbox.get(timeout=timeout_s) if may_wait else self._inbox.get_nowait()
            while True:
                kind, request = event
                if kind == "submit" and request is not None:
                    self._steps.begin(request)
                event = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _end_all(self) -> None:
        while not self._inbox.empty():
            kind, request = self._inbox.get_nowait()
            if kind == "submit" and request is not None:
                self._steps.end(request)
        for request in list(self._steps.requests()):
            self._steps.drop(request)
            self._steps.end(request)

    def _report(self) -> None:
        self.metrics.waiting.set(self.parts.scheduler.waiting)
        self.metrics.running.set(self.parts.scheduler.running)
        self.metrics.free_blocks.set(self.parts.allocator.free)
        if self.parts.tree is not None:
            changes = self.parts.tree.take_changes()
            if changes and self.on_change is not None:
                self.on_change(changes)
