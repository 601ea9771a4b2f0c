"""What a client process does that forks, and what its children do."""

import contextlib
import json
import mmap
import os
import resource
import signal
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvstore.client.jobs import StoreJob
from kvstore.client.resources import LOADS
from kvstore.client.space import PageViews, Space
from kvstore.client.store import KVStore
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.errors import PeerUnreachable
from tests.faults import content
from tests.faults.commands import Client, maps_of_kvstore

_never = threading.Event()


class Parent(Client):
    """The commands that fork."""

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
        began, gate = threading.Semaphore(0), threading.Event()
        for _ in range(LOADS):
            StoreJob(self.store._resources.loads, lambda: (began.release(), gate.wait(30.0)))
        assert all(began.acquire(timeout=30.0) for _ in range(LOADS))
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
            job = StoreJob(store._resources.stores, lambda: 1)
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
