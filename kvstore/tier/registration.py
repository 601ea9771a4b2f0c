"""Registers the node's memory with CUDA, extent by extent, in the background.

A device copies from registered (pinned) memory on its own and at full speed; from other memory the
driver copies twice. Registering takes half a second a GB, so nothing waits for it: memory is usable
before, and stays usable where registering fails. Nothing here needs torch: the CUDA runtime is
passed in.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

log = logging.getLogger(__name__)

#: Of the CUDA runtime's ``driver_types.h``: valid in every context, and memory that is mapped
#: read-only, as a client maps what it does not write.
PORTABLE: Final = 0x01
READ_ONLY: Final = 0x08
WAIT_S: Final = 30.0
"""Longest wait for a registration under way before its memory is unmapped."""


class Cudart(Protocol):
    """The calls of the CUDA runtime that are needed, as ``torch.cuda.cudart()`` has them."""

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> Any:  # noqa: N802
        """Pin memory; 0 = it is."""
        ...

    def cudaHostUnregister(self, ptr: int) -> Any:  # noqa: N802
        """Undo it; 0 = it is undone."""
        ...


class HostRegistration:
    """What of the mapped memory is registered; an observer of a mapping, usable by every thread.

    Args:
        cudart: the runtime.
        prepare: called first in the thread that registers (it chooses the device).
    """

    def __init__(self, cudart: Cudart, prepare: Callable[[], None] = lambda: None) -> None:
        """Register nothing yet."""
        self._cudart = cudart
        self._prepare = prepare
        #: Protects all below; signalled when a registration has ended.
        self._changed = threading.Condition()
        self._sizes: dict[int, int] = {}
        self._waiting: deque[int] = deque()
        self._current = 0
        self._registered: set[int] = set()
        self._failed: dict[int, str] = {}
        self._thread: threading.Thread | None = None

    def mapped(self, address: int, size: int) -> None:
        """An extent is there now."""
        with self._changed:
            self._sizes[address] = size
            self._waiting.append(address)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kvstore-register", daemon=True
                )
                self._thread.start()

    def unmapping(self, address: int) -> None:
        """An extent is about to go: afterwards nothing of it is registered or being so."""
        with self._changed:
            if self._sizes.pop(address, None) is None:
                return
            self._failed.pop(address, None)
            if address in self._waiting:
                self._waiting.remove(address)
            if not self._changed.wait_for(lambda: self._current != address, WAIT_S):
                log.error("an extent is unmapped while it is still being registered")
                return
            if address not in self._registered:
                return
            self._registered.discard(address)
            code = int(self._cudart.cudaHostUnregister(address))
        if code:
            log.warning("an extent could not be unregistered: CUDA error %d", code)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until everything that is mapped was tried; False when the time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def stats(self) -> dict[str, Any]:
        """``state`` (running, done, or failed: some could not be), sizes, and why not."""
        with self._changed:
            state = "running" if self._thread is not None else "failed" if self._failed else "done"
            return {
                "state": state,
                "mapped_bytes": sum(self._sizes.values()),
                "registered_bytes": sum(self._sizes.get(at, 0) for at in self._registered),
                "failed_extents": len(self._failed),
                "why": next(iter(self._failed.values()), ""),
            }

    def _run(self) -> None:
        try:
            self._prepare()
        except RuntimeError as error:
            self._give_up(str(error))
            return
        while True:
            with self._changed:
                self._current = 0
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                self._changed.notify_all()
                self._current = address = self._waiting.popleft()
                size = self._sizes[address]
            why = self._register(address, size)
            with self._changed:
                if not why:
                    self._registered.add(address)
                else:
                    self._fail(address, why)

    def _register(self, address: int, size: int) -> str:
        """Empty, or why it could not be registered."""
        try:
            code = int(self._cudart.cudaHostRegister(address, size, PORTABLE | READ_ONLY))
        except RuntimeError as error:
            return str(error)
        return f"CUDA error {code}" if code else ""

    def _fail(self, address: int, why: str) -> None:
        """Note it, and say it the first time; the caller holds ``_changed``."""
        if not self._failed:
            log.warning(
                "host memory is not registered with CUDA (%s): copies to the device are slower;"
                " check `ulimit -l` and free memory",
                why,
            )
        if address in self._sizes:
            self._failed[address] = why

    def _give_up(self, why: str) -> None:
        with self._changed:
            while self._waiting:
                self._fail(self._waiting.popleft(), why)
            self._thread = None
            self._changed.notify_all()
