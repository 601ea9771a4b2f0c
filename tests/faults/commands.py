"""What a client process does when a test tells it, with gates in the middle of a move."""

import json
import os
import resource
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np

import kvstore.client.space
from kvstore import mover
from kvstore.client import ahead
from kvstore.client.space import PageViews
from kvstore.client.store import KVStore
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.errors import KVStoreError
from tests.faults import content

_say_lock = threading.Lock()
_never = threading.Event()


def say(answer: dict[str, Any]) -> None:
    with _say_lock:
        os.write(1, json.dumps(answer).encode() + b"\n")


class Client:
    """Every public method is a command; what it returns is the answer."""

    def __init__(self, address: str, gates: Path, timeout_s: float) -> None:
        self.store = KVStore.connect(address, name="puppet", timeout_s=timeout_s)
        self.space = content.open_space(self.store)
        self._gates = gates
        self._views: dict[str, PageViews] = {}
        self._load: threading.Thread | None = None
        self._loading = threading.Event()
        self._seen: dict[str, Any] = {}

    # ---- gates

    def _gate(self, name: str) -> None:
        """Say that we are there and wait until the test opens it."""
        pipe = self._gates / name
        if not pipe.exists():
            os.mkfifo(pipe)
        with open_pipe(pipe) as opened:
            say({"at": name})
            assert opened.readline()

    def arm(self, where: str, when: str) -> None:
        """The next ``mover.gather`` or ``mover.scatter`` waits ``before`` or in the ``middle``."""
        real = getattr(mover, where)

        def gated(pages: Any, size: int, *rest: Any) -> Any:
            setattr(mover, where, real)
            first = len(pages) // 2 if when == "middle" else 0
            done = [_part(real, where, pages, size, rest, 0, first)] if first else []
            self._gate(where)
            done.append(_part(real, where, pages, size, rest, first, len(pages)))
            return np.concatenate(done)

        setattr(mover, where, gated)

    # ---- one call each

    def put(self, chain: int, count: int) -> dict[str, Any]:
        return self.space.put(content.keys(chain, count), content.pages(chain, count))._asdict()

    def put_singles(self, chain: int, count: int) -> int:
        """One put for each page; slots that are reserved for that are never idle."""
        ahead.AHEAD_IDLE_S = 3600.0
        names, stored = content.keys(chain, count), 0
        for at in range(count):
            stored += self.space.put(names[at : at + 1], [content.page(chain, at)]).stored
        return stored

    def lookup(self, chain: int, count: int, wait_s: float = 0.0) -> int:
        return self.space.lookup(content.keys(chain, count), wait_s=wait_s).pages

    def get(self, chain: int, count: int) -> dict[str, Any]:
        out = [np.zeros(content.PAGE_BYTES, dtype=np.uint8) for _ in range(count)]
        found = self.space.get(content.keys(chain, count), out=out)
        return {"pages": found, "wrong": content.wrong_pages(chain, out[:found])}

    def view(self, name: str, chain: int, count: int) -> int:
        views = self._views[name] = self.space.get(content.keys(chain, count))
        return len(views)

    def check_view(self, name: str, chain: int) -> list[int]:
        return content.wrong_pages(chain, self._views[name].arrays)

    def close_view(self, name: str) -> None:
        self._views.pop(name).close()

    def restore(
        self, chain: int, count: int, cancel: bool = False, device: str = "cpu"
    ) -> dict[str, Any]:
        """A restore into a pool of its own; what the engine writes after its end must stay."""
        memory = np.zeros((8, count, content.PAGE_BYTES // 8), dtype=np.uint8)
        pool = pool_of(memory, device)
        job = self.space.restore_to_kvpool(content.keys(chain, count), pool, np.arange(count))
        if cancel:
            job.cancel()
        restored = job.result(30.0).pages
        whole = [memory[:, at].reshape(-1) for at in range(restored)]
        return {"pages": restored, "wrong": content.wrong_pages(chain, whole)}

    def restore_and_reuse(self, chain: int, count: int) -> dict[str, Any]:
        """Cancel a restore that waits at its gate; once it ended, use the blocks otherwise."""
        memory = np.zeros((8, count, content.PAGE_BYTES // 8), dtype=np.uint8)
        pool = pool_of(memory)
        job = self.space.restore_to_kvpool(content.keys(chain, count), pool, np.arange(count))
        self._gate("cancel")
        job.cancel()
        ended_early = job.wait(0.0)
        self._gate("cancelled")
        assert job.wait(30.0)
        memory[:] = 0xA5
        after = self.restore(chain, count)  # the worker has been through another job since
        return {
            "ended_early": ended_early,
            "pages": job.result(0.0).pages,
            "untouched": bool((memory == 0xA5).all()),
            "after": after,
        }

    def extract(self, chain: int, count: int, device: str = "cpu") -> dict[str, Any]:
        """Store a chain from a pool of its own."""
        memory = np.zeros((8, count, content.PAGE_BYTES // 8), dtype=np.uint8)
        for at, page in enumerate(content.pages(chain, count)):
            memory[:, at] = page.reshape(8, -1)
        pool = pool_of(memory, device)
        job = self.space.extract_from_kvpool(pool, np.arange(count), content.keys(chain, count))
        return job.result(30.0)._asdict()

    def lease_s(self, seconds: float) -> None:
        kvstore.client.loads.LEASE_S = seconds  # type: ignore[misc]

    def cut(self) -> None:
        """Break the connection as a network would; the process goes on."""
        connection = self.store._link._connection
        if connection is not None:
            connection._socket.shutdown(2)

    def limit_memory(self, spare_bytes: int | None) -> None:
        """Allow so much address space more than is in use; None: any."""
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        soft = hard if spare_bytes is None else used + spare_bytes
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    def state(self) -> dict[str, Any]:
        return {
            "connected": self.store.connected,
            "troubles": dict(self.store.troubles),
            "maps": maps_of_kvstore(),
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        }

    def close(self) -> None:
        self.store.close()

    def wait_for_answers(self, seconds: float) -> None:
        """So long at most from now on."""
        self.store._resources.timeout_s = seconds

    # ---- load

    def start_load(self, chain: int, count: int) -> None:
        """Put, look up and get one chain after the other until :meth:`stop_load`."""
        self._seen = {
            "stored": 0, "got": 0, "put_errors": {}, "raised": [], "wrong": 0, "slowest_s": 0.0,
        }  # fmt: skip
        self._loading.set()
        self._load = threading.Thread(target=self._work, args=(chain, count))
        self._load.start()

    def seen(self) -> dict[str, Any]:
        return self._seen

    def stop_load(self) -> dict[str, Any]:
        self._loading.clear()
        assert self._load is not None
        self._load.join(30.0)
        return self._seen

    def _work(self, chain: int, count: int) -> None:
        data = {at: content.pages(at, count) for at in range(chain, chain + 3)}
        out = [np.zeros(content.PAGE_BYTES, dtype=np.uint8) for _ in range(count)]
        seen = self._seen
        while self._loading.is_set():
            for at, expected in data.items():
                names = content.keys(at, count)
                self._timed(partial(self._try_put, names, expected))
                found = self._timed(partial(self.space.get, names, out))
                seen["got"] += found or 0
                if found:
                    seen["wrong"] += not all(map(np.array_equal, out[:found], expected))
                self._timed(partial(self.space.lookup, names))
                _never.wait(0.001)

    def _try_put(self, names: Any, expected: Any) -> None:
        seen = self._seen
        try:
            seen["stored"] += self.space.put(names, expected).stored
        except KVStoreError as error:
            kind = f"{error.code} {'retryable' if error.retryable else 'final'}"
            seen["put_errors"][kind] = seen["put_errors"].get(kind, 0) + 1

    def _timed(self, call: Callable[[], Any]) -> Any:
        start = time.monotonic()
        try:
            return call()
        except Exception:  # noqa: BLE001  (what a read must never do; the test looks at it)
            self._seen["raised"].append(traceback.format_exc())
        finally:
            self._seen["slowest_s"] = max(self._seen["slowest_s"], time.monotonic() - start)

    # ---- commands

    def obey(self, command: dict[str, Any]) -> Any:
        arguments = {name: value for name, value in command.items() if name != "do"}
        try:
            return getattr(self, command["do"])(**arguments)
        except KVStoreError as error:
            return {"error": error.code, "retryable": error.retryable, "message": str(error)}


def pool_of(memory: np.ndarray[Any, Any], device: str = "cpu") -> KVPool:
    """The pool of an array of planes, blocks and bytes."""
    planes = tuple(plane.ctypes.data for plane in memory)
    return KVPool(planes, memory.shape[2], memory.shape[2], memory.shape[1], device=device)


def open_pipe(path: Path) -> TextIO:
    """Both ends of a named pipe, so that opening never waits and reading never ends."""
    return os.fdopen(os.open(path, os.O_RDWR), "r")


def maps_of_kvstore() -> int:
    """How many mappings of a node's memory this process has."""
    return Path("/proc/self/maps").read_text().count("/memfd:kvstore:")


def _part(
    real: Callable[..., Any], where: str, pages: Any, size: int, rest: Any, start: int, stop: int
) -> Any:
    """A move of only the pages from ``start`` to ``stop``."""
    if where == "gather":
        source, seeds = rest
        return real(pages[start:stop], size, source.pages(start, stop), seeds[start:stop])
    digests, seeds, target, *more = rest
    part = target.pages(start, stop)
    return real(pages[start:stop], size, digests[start:stop], seeds[start:stop], part, *more)
