"""A client process that does what a test tells it, and stops at gates in the middle of a move.

Run as ``python -m tests.faults.puppet ADDRESS COMMANDS GATES [TIMEOUT_S]``. Commands come as JSON
lines through the named pipe COMMANDS, each with a number; answers go to standard output as JSON
lines with that number. At a gate it says ``{"at": name}`` there and waits for a line in the pipe of
that name in the folder GATES.
"""

import contextlib
import json
import mmap
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np

import kvstore.client.space
from kvstore import mover
from kvstore.client.jobs import StoreJob
from kvstore.client.space import PageViews, Space
from kvstore.client.store import KVStore
from kvstore.errors import KVStoreError, PeerUnreachable
from kvstore.mover.kvpool import KVPool
from tests.faults import content

_say_lock = threading.Lock()
_never = threading.Event()


def say(answer: dict[str, Any]) -> None:
    with _say_lock:
        os.write(1, json.dumps(answer).encode() + b"\n")


class Puppet:
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

    def restore(self, chain: int, count: int, cancel: bool = False) -> dict[str, Any]:
        """A restore into a pool of its own; what the engine writes after its end must stay."""
        memory = np.zeros((8, count, content.PAGE_BYTES // 8), dtype=np.uint8)
        planes = tuple(plane.ctypes.data for plane in memory)
        pool = KVPool(planes, content.PAGE_BYTES // 8, content.PAGE_BYTES // 8, count)
        job = self.space.restore_to_kvpool(content.keys(chain, count), pool, np.arange(count))
        if cancel:
            job.cancel()
        restored = job.result(30.0).pages
        whole = [memory[:, at].reshape(-1) for at in range(restored)]
        return {"pages": restored, "wrong": content.wrong_pages(chain, whole)}

    def restore_and_reuse(self, chain: int, count: int) -> dict[str, Any]:
        """Cancel a restore that waits at its gate; once it ended, use the blocks otherwise."""
        memory = np.zeros((8, count, content.PAGE_BYTES // 8), dtype=np.uint8)
        planes = tuple(plane.ctypes.data for plane in memory)
        pool = KVPool(planes, content.PAGE_BYTES // 8, content.PAGE_BYTES // 8, count)
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

    # ---- forks

    def fork(self, use: list[dict[str, Any]]) -> dict[str, Any]:
        """Fork a child that first looks at its memory, then carries out ``use``, then exits."""
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                answers: list[Any] = [{"maps": maps_of_kvstore()}]
                answers += [self.obey(command) for command in use]
                os.write(write_end, json.dumps(answers).encode())
                status = 0
            finally:
                os._exit(status)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as answers_of_child:
            text = answers_of_child.read()
        _, status = os.waitpid(child, 0)
        return {"pid": child, "status": status, "answers": json.loads(text or b"[]")}

    def fork_and_touch(self, name: str) -> int:
        """A child reads a view of its parent's; how it ended."""
        array = self._views[name].arrays[0]
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os._exit(int(array[0] == 0))
        return os.waitpid(child, 0)[1]

    def fork_in_restore(self, chain: int, count: int) -> dict[str, Any]:
        """Fork while a restore into shared memory waits in the queue; the child restores too.

        Parent and child use the blocks otherwise once their job has ended: what must stay.
        """
        began, gate = threading.Event(), threading.Event()
        StoreJob(self.store._services.loads, lambda: (began.set(), gate.wait(30.0)))
        began.wait(30.0)
        shared = mmap.mmap(-1, count * content.PAGE_BYTES)
        memory = np.frombuffer(shared, dtype=np.uint8).reshape(8, count, -1)
        planes = tuple(plane.ctypes.data for plane in memory)
        pool = KVPool(planes, content.PAGE_BYTES // 8, content.PAGE_BYTES // 8, count)
        names, blocks = content.keys(chain, count), np.arange(count)
        job = self.space.restore_to_kvpool(names, pool, blocks, order="segment")
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            with exiting():
                os.read(read_end, 1)  # the parent's has ended
                waited = [job.wait(30.0), job.wait_layer(0, 30.0), job.result(30.0).pages]
                own = self.restore(chain, count)
                os._exit(0 if waited == [True, False, 0] and own["pages"] == count else 3)
        gate.set()
        assert job.wait(30.0)
        memory[:] = 0xA5
        os.write(write_end, b"x")
        _, status = os.waitpid(child, 0)
        os.close(read_end)
        os.close(write_end)
        untouched = bool((memory == 0xA5).all())
        return {"status": status, "pages": job.result(0.0).pages, "untouched": untouched}

    def fork_with_locks_held(self, chain: int, count: int) -> list[int]:
        """Children that are forked while another thread holds a lock each; how they ended."""
        self.space.lookup(content.keys(chain, 1), wait_s=0.001)
        with self.space.get(content.keys(chain, 1)) as views:
            found = list(_locks(self.store, set()))
            return [self._fork_under(lock, chain, count, views) for lock in found]

    def _fork_under(self, lock: Any, chain: int, count: int, views: PageViews) -> int:
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                held.set()
                done.wait(30.0)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(30.0)
        child = os.fork()
        if child == 0:
            with exiting():
                signal.alarm(20)
                views.close()
                names = content.keys(chain, count)
                hit = self.space.lookup(names, wait_s=0.001).pages
                restored = self.restore(chain, count)["pages"]
                self.store.close()
                os._exit(0 if hit == restored == count else 3)
        done.set()
        holder.join()
        return os.waitpid(child, 0)[1]

    def fork_embedded(self, chain: int) -> dict[str, Any]:
        """Children of a process with an embedded store, forked while its threads use it."""
        with KVStore.open(content.PAGE_BYTES * 8, extent_bytes=content.PAGE_BYTES * 4) as store:
            space = content.open_space(store)
            names, pages = content.keys(chain, 2), content.pages(chain, 2)
            space.put(names, pages)
            job = StoreJob(store._services.stores, lambda: 1)
            views = space.get(names)
            statuses = [
                self._fork_embedded(store, space, chain, job, views, lock)
                for lock in [None, *_locks(store, set())]
            ]
            got = {"view": content.wrong_pages(chain, views.arrays), "pages": len(views)}
            views.close()
            return {"statuses": statuses, "after": space.put(names, pages)._asdict(), **got}

    def _fork_embedded(
        self, store: KVStore, space: Space, chain: int, job: StoreJob[int], views: PageViews,
        lock: Any,
    ) -> int:  # fmt: skip
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with lock or contextlib.nullcontext():
                held.set()
                done.wait(30.0)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(30.0)
        child = os.fork()
        if child == 0:
            with exiting():
                signal.alarm(20)
                out = [np.zeros(content.PAGE_BYTES, dtype=np.uint8) for _ in range(2)]
                names = content.keys(chain, 2)
                seen = [space.lookup(names).pages, space.get(names, out), len(space.get(names))]
                seen += [len(views), space.prefetch(names).wait(20.0) - 1, job.wait(20.0) - 1]
                try:
                    space.put(content.keys(chain + 1, 1), content.pages(chain + 1, 1))
                except PeerUnreachable:
                    seen.append(0)
                views.close()
                store.close()
                os._exit(0 if seen == [0] * 7 else 3)
        done.set()
        holder.join()
        return os.waitpid(child, 0)[1]

    def fork_and_stay(self) -> int:
        """A child that does nothing but live, with all descriptors it inherited."""
        child = os.fork()
        if child == 0:
            _never.wait(60.0)
            os._exit(0)
        return child

    def fork_and_close_view(self, name: str, chain: int) -> dict[str, Any]:
        """A child closes a view that it inherited, puts, loses its connection and goes on."""
        return self.fork([
            {"do": "close_view", "name": name},
            {"do": "put", "chain": chain, "count": 1},
            {"do": "has_unfinished_moves"},
        ])  # fmt: skip

    def has_unfinished_moves(self) -> dict[str, int]:
        return {str(epoch): count for epoch, count in self.store._link.unfinished_moves().items()}

    # ---- commands

    def obey(self, command: dict[str, Any]) -> Any:
        arguments = {name: value for name, value in command.items() if name != "do"}
        try:
            return getattr(self, command["do"])(**arguments)
        except KVStoreError as error:
            return {"error": error.code, "retryable": error.retryable, "message": str(error)}


def open_pipe(path: Path) -> TextIO:
    """Both ends of a named pipe, so that opening never waits and reading never ends."""
    return os.fdopen(os.open(path, os.O_RDWR), "r")


@contextlib.contextmanager
def exiting() -> Iterator[None]:
    """In a child: end, whatever happens, and say what it was."""
    try:
        yield
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(2)


def _locks(thing: Any, seen: set[int]) -> Iterator[Any]:
    """Every lock of the client that ``thing`` leads to; the events' own ones included."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, type(threading.Lock())):
        yield thing
    elif isinstance(thing, threading.Condition):
        yield thing._lock  # type: ignore[attr-defined]
    elif isinstance(thing, threading.Event):
        yield from _locks(thing._cond, seen)  # type: ignore[attr-defined]
    elif isinstance(thing, dict):
        for value in list(thing.values()):
            yield from _locks(value, seen)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from _locks(value, seen)
    elif type(thing).__module__.startswith("kvstore."):
        yield from _locks(getattr(thing, "__dict__", {}), seen)


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


def main() -> None:
    address, commands, gates, *timeout_s = sys.argv[1:]
    puppet = Puppet(address, Path(gates), float(timeout_s[0]) if timeout_s else 2.0)

    def obey(number: int, command: dict[str, Any]) -> None:
        say({"answer": number, "value": puppet.obey(command)})

    with open_pipe(Path(commands)) as lines:
        say({"ready": os.getpid()})
        for line in lines:
            message = json.loads(line)
            number, background = message.pop("number"), message.pop("background")
            if background:
                threading.Thread(target=obey, args=(number, message), daemon=True).start()
            else:
                obey(number, message)


if __name__ == "__main__":
    main()
