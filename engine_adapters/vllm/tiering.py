"""Chunks of vLLM's primary tier to and from the store, in the background. Knows nothing of vLLM.

Every chunk is a page of its own, under the root: vLLM's keys tell nothing of what precedes them.
"""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from engine_adapters.vllm.opening import Opening
from kvstore.errors import KVStoreError, TransferTimeout
from kvstore.jobs import StoreJob, Worker
from kvstore.page import PrefixKeys

log = logging.getLogger("vllm.kvstore")

HASH_BYTES: Final = 32
_GROUP_BYTES: Final = 4
_LOOKUPS_MAX: Final = 65_536
_BATCH_MAX: Final = 1024


class Moved(NamedTuple):
    """How a job ended.

    Attributes:
        number: vLLM's number of it.
        good: the keys that were moved, and for loads verified.
        whole: whether these are all of its keys.
        size_bytes: bytes of the good ones.
    """

    number: int
    good: list[bytes]
    whole: bool
    size_bytes: int


class _Moving(NamedTuple):
    job: StoreJob[list[bytes]]
    asked: int
    load: bool


def page_key(key: bytes) -> PrefixKeys | None:
    """The page of one of vLLM's keys: block hash and 4 bytes of group; None for a weak hash.

    Only a 32-byte hash (sha256) is taken. In vLLM 0.32 the others start from a random value in each
    process unless it is told otherwise, and other inputs may collide with them.
    """
    if len(key) != HASH_BYTES + _GROUP_BYTES:
        return None
    return PrefixKeys(hashlib.sha256(b"kvstore vllm tier\0" + key).digest())


class Tiering:
    """Lookups, loads and stores; every method returns at once, except :meth:`drain`, :meth:`close`.

    All calls come from one thread. ``rows`` is held until :meth:`close`.
    """

    def __init__(
        self, openings: tuple[Opening, Opening, Opening], rows: npt.NDArray[np.uint8],
        clock: Callable[[], float], lookup_timeout_s: float,
    ) -> None:  # fmt: skip
        """Take one opening each for lookups, loads and stores; rows are uint8 (chunks, bytes)."""
        self._asking, self._loading, self._storing = openings
        self._rows: npt.NDArray[np.uint8] | None = rows
        self._clock = clock
        self._timeout_s = lookup_timeout_s
        self._workers = [Worker(f"kvstore-tier-{name}") for name in ("lookup", "load", "store")]
        self._moving: dict[int, _Moving] = {}
        self._asked: OrderedDict[bytes, float] = OrderedDict()
        self._new: list[bytes] = []
        self._found: dict[bytes, bool] = {}
        self.counts: dict[str, int] = {}

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._moving or self._asked)

    def lookup(self, key: bytes) -> bool | None:
        """Whether a page is there; None while the node is being asked."""
        if page_key(key) is None:
            self._count("weak_keys")
            return False
        deadline = self._asked.get(key)
        if deadline is None:
            if len(self._asked) >= _LOOKUPS_MAX:
                return False
            self._asked[key] = self._clock() + self._timeout_s
            self._new.append(key)
            return None
        found = self._found.pop(key, None)
        if found is None and self._clock() < deadline:
            return None
        del self._asked[key]
        if found is None:
            self._count("lookup_timeouts")
        return bool(found)

    def flush(self) -> None:
        """Ask for what was looked up since; forget answers nobody came for."""
        now = self._clock()
        while self._asked and next(iter(self._asked.values())) + self._timeout_s < now:
            self._found.pop(self._asked.popitem(last=False)[0], None)
        if len(self._found) > _LOOKUPS_MAX:
            self._found.clear()
        new, self._new = self._new, []
        for start in range(0, len(new), _BATCH_MAX):
            batch = new[start : start + _BATCH_MAX]
            StoreJob(self._workers[0], lambda batch=batch: self._ask(batch))  # type: ignore[misc]

    def load(self, number: int, keys: Iterable[bytes], chunks: Sequence[int]) -> None:
        """Copy pages into chunks; those of keys that are not good in the end hold nothing valid."""
        self._begin(number, list(keys), list(chunks), load=True)

    def store(self, number: int, keys: Iterable[bytes], chunks: Sequence[int]) -> None:
        """Store chunks, which do not change until the job has ended."""
        self._begin(number, list(keys), list(chunks), load=False)

    def finished(self) -> list[Moved]:
        """The jobs that have ended since the last call."""
        ended = [(number, m) for number, m in self._moving.items() if m.job.done]
        moved = []
        for number, moving in ended:
            del self._moving[number]
            try:
                good = moving.job.result(0.0)
            except KVStoreError as error:
                log.debug("a job of the tier failed: %s", error)
                good = []
            whole = len(good) == moving.asked
            if not whole:
                self._count("load_failures" if moving.load else "store_failures")
            size = 0 if self._rows is None else self._rows.shape[1]
            moved.append(Moved(number, good, whole, len(good) * size))
        return moved

    def drain(self, timeout_s: float) -> None:
        """Wait until no job touches a chunk.

        Raises:
            TransferTimeout: one still does.
        """
        deadline = self._clock() + timeout_s
        for moving in self._moving.values():
            if not moving.job.wait(max(0.0, deadline - self._clock())):
                raise TransferTimeout(f"a job has not ended after {timeout_s} s: is the node stuck")

    def close(self, timeout_s: float) -> None:
        """Let jobs end and let go of the rows.

        Raises:
            TransferTimeout: a job still touches them.
        """
        self.drain(timeout_s)
        for worker in self._workers:
            worker.close()
        self._rows = None

    def take(self) -> dict[str, int]:
        """What was counted since the last call."""
        counts, self.counts = self.counts, {}
        return counts

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def _ask(self, keys: list[bytes]) -> bool:
        space = self._asking.get()
        for key in keys:
            page = page_key(key)
            self._found[key] = bool(space and page and space.lookup(page).pages)
        return True

    def _begin(self, number: int, keys: list[bytes], chunks: list[int], *, load: bool) -> None:
        assert self._rows is not None, "closed"
        assert len(keys) == len(chunks)
        rows = [self._rows[chunk] for chunk in chunks]
        move = self._load if load else self._store
        worker = self._workers[1 if load else 2]
        job = StoreJob(worker, lambda: move(keys, rows))
        self._moving[number] = _Moving(job, len(keys), load)

    def _load(self, keys: list[bytes], rows: list[Any]) -> list[bytes]:
        space, good = self._loading.get(), []
        for key, row in zip(keys, rows, strict=True):
            page = page_key(key)
            if space is not None and page is not None and space.get(page, [row]):
                good.append(key)
        return good

    def _store(self, keys: list[bytes], rows: list[Any]) -> list[bytes]:
        space, good = self._storing.get(), []
        for key, row in zip(keys, rows, strict=True):
            page = page_key(key)
            if space is not None and page is not None:
                space.put(page, [row])
                good.append(key)
        return good
