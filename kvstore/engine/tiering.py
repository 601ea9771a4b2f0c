"""Moves chunks between an engine's own tier of host memory and the store, in the background.

Every chunk is a separate page at the root of the prefix tree, because the engine's keys do not
identify predecessors.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.client.jobs import StoreJob, Worker
from kvstore.client.space import Space
from kvstore.engine.counts import AdapterCounts
from kvstore.engine.opening import Opening
from kvstore.protocol.errors import KVStoreError, TransferTimeout
from kvstore.protocol.page import PrefixKeys

LOOKUPS_MAX: Final = 65_536
_BATCH_MAX: Final = 64
SERIES: Final = {
    "weak_keys": "Lookups of chunks whose block hash is not sha256; misses, never stored.",
    "lookup_timeouts": "Lookups that were not answered in time; misses.",
    "lookups_refused": "Lookups refused because too many were unanswered; misses.",
    "load_failed_chunks": "Chunks that were found but could not be loaded; misses.",
    "store_failed_chunks": "Chunks that could not be stored.",
    "corrupt_pages": "Chunks that failed their digest; misses.",
    "troubles": "Reads that missed because the node was down, slow, or refused them.",
}
"""Name → help text of each series."""


class Moved(NamedTuple):
    """The end of a job.

    Attributes:
        number: the engine's number of the job.
        good: keys that were copied, and for loads verified.
        whole: whether these are all of its keys.
        size_bytes: bytes of the good keys.
        seconds: duration of the copies.
    """

    number: int
    good: list[bytes]
    whole: bool
    size_bytes: int
    seconds: float


class _Answer:
    """The answer to one lookup; ``found`` is None until the node answers or the deadline passes."""

    __slots__ = ("deadline", "found")

    def __init__(self, deadline: float, *, found: bool | None = None) -> None:
        self.deadline = deadline
        self.found = found


class _Moving:
    """A job; it has indexes of rows, so that only the tier references the memory."""

    job: StoreJob[bool]

    def __init__(self, keys: list[bytes], chunks: list[int], *, load: bool) -> None:
        assert len(keys) == len(chunks)
        self.keys = keys
        self.chunks = chunks
        self.load = load
        self.good: list[bytes] = []
        self.seconds = 0.0


class Tiering:
    """Lookups, loads and stores; only :meth:`drain` and :meth:`close` block.

    All calls must come from one thread. ``rows`` is referenced until :meth:`close`.

    Args:
        openings: one each for lookups, loads and stores.
        rows: the memory of the chunks, shape (chunks, bytes), dtype uint8.
        clock: monotonic seconds.
        lookup_timeout_s: a lookup that is not answered by then is a miss.
        page_key: returns the page key of an engine's key; None if the key may stand for two
            contents. Pure.

    Attributes:
        counts: sums of :data:`SERIES`.
    """

    def __init__(
        self, openings: tuple[Opening, Opening, Opening], rows: npt.NDArray[np.uint8],
        clock: Callable[[], float], lookup_timeout_s: float,
        page_key: Callable[[bytes], PrefixKeys | None],
    ) -> None:  # fmt: skip
        self._asking, self._loading, self._storing = openings
        self._rows: npt.NDArray[np.uint8] | None = rows
        self._clock = clock
        self._timeout_s = lookup_timeout_s
        self._page_key = page_key
        self._workers = [Worker(f"kvstore-tier-{name}") for name in ("lookup", "load", "store")]
        self._moving: dict[int, _Moving] = {}
        self._cancelled = threading.Event()
        #: In order of their deadlines.
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        self._new: list[tuple[bytes, _Answer]] = []
        self.counts = AdapterCounts(SERIES)

    def lookup(self, key: bytes) -> bool | None:
        """Whether a page is stored; None until the node has answered.

        Answers are kept for some time, because several requests may need them, each in several
        steps.
        """
        if self._page_key(key) is None:
            self.counts.add("weak_keys")
            return False
        answer = self._answers.get(key)
        if answer is None:
            if len(self._answers) >= LOOKUPS_MAX:
                self.counts.add("lookups_refused")
                return False
            answer = self._answers[key] = _Answer(self._clock() + self._timeout_s)
            self._new.append((key, answer))
        elif answer.found is None and self._clock() >= answer.deadline:
            answer.found = False
            self.counts.add("lookup_timeouts")
        return answer.found

    def flush(self) -> None:
        """Send new lookups to the node; discard old answers."""
        now = self._clock()
        while self._answers:
            key, oldest = next(iter(self._answers.items()))
            if now < oldest.deadline + self._timeout_s:
                break
            del self._answers[key]
        new, self._new = self._new, []
        for start in range(0, len(new), _BATCH_MAX):
            batch = new[start : start + _BATCH_MAX]
            job = StoreJob(self._workers[0], lambda batch=batch: self._ask(batch))  # type: ignore[misc]
            if job.refused:
                self._answer(batch, found=False)

    def load(self, number: int, keys: Iterable[bytes], chunks: Sequence[int]) -> None:
        """Copy pages into chunks; chunks of keys that are not ``good`` at the end are invalid."""
        self._begin(number, _Moving(list(keys), list(chunks), load=True))

    def store(self, number: int, keys: Iterable[bytes], chunks: Sequence[int]) -> None:
        """Store chunks; they must not change until the job has ended."""
        self._begin(number, _Moving(list(keys), list(chunks), load=False))

    def finished(self) -> list[Moved]:
        """Jobs that have ended since the last call; their chunks are not touched any more."""
        assert self._rows is not None, "closed"
        ended = [(number, moving) for number, moving in self._moving.items() if moving.job.done]
        moved = []
        for number, moving in ended:
            del self._moving[number]
            good = moving.good
            failed = len(moving.keys) - len(good)
            self.counts.add("load_failed_chunks" if moving.load else "store_failed_chunks", failed)
            if moving.load and failed:
                self._lose(set(moving.keys).difference(good))
            elif not moving.load:
                for key in good:
                    self._answers.pop(key, None)
            size = len(good) * self._rows.shape[1]
            moved.append(Moved(number, good, not failed, size, moving.seconds))
        return moved

    def drain(self, timeout_s: float) -> None:
        """Wait until no job touches a chunk; after ``timeout_s``, jobs stop at their next chunk.

        Raises:
            TransferTimeout: a job has not ended after another ``timeout_s``.
        """
        if self._wait(timeout_s):
            return
        self._cancelled.set()
        try:
            if not self._wait(timeout_s):
                raise TransferTimeout(f"a job has not ended after {2 * timeout_s} s")
        finally:
            self._cancelled.clear()

    def rename(self, openings: tuple[Opening, Opening, Opening]) -> None:
        """Switch to other page names; answers so far are discarded.

        Jobs in progress continue with the old names.
        """
        self._asking, self._loading, self._storing = openings
        self._answers.clear()
        self._new.clear()

    def close(self, timeout_s: float) -> None:
        """Wait for jobs and release the rows.

        Raises:
            TransferTimeout: a job still touches the rows; they are kept.
        """
        self.drain(timeout_s)
        for worker in self._workers:
            worker.close()
        self._moving.clear()
        self._answers.clear()
        self._rows = None

    # ---- internal ---------------------------------------------------------------------------

    def _wait(self, timeout_s: float) -> bool:
        deadline = self._clock() + timeout_s
        moving = self._moving.values()
        return all(one.job.wait(max(0.0, deadline - self._clock())) for one in moving)

    def _lose(self, keys: Iterable[bytes]) -> None:
        """Found but not loaded: make them misses for some time, or they would be tried forever."""
        deadline = self._clock() + self._timeout_s
        for key in keys:
            self._answers.pop(key, None)
            if len(self._answers) >= LOOKUPS_MAX:
                self._answers.popitem(last=False)
            self._answers[key] = _Answer(deadline, found=False)

    @staticmethod
    def _answer(batch: list[tuple[bytes, _Answer]], *, found: bool) -> None:
        for _, answer in batch:
            answer.found = found

    def _ask(self, batch: list[tuple[bytes, _Answer]]) -> bool:
        """Answer lookups: first check whether any of the batch is stored; usually none is."""
        if self._clock() >= batch[0][1].deadline:
            return False  # no lookup waits any more
        pages = [page for key, _ in batch if (page := self._page_key(key)) is not None]
        space, last = self._asking.get(), 0
        if space is not None:
            # For pages with a window of one, the longest prefix ends with the last stored page.
            last = space.lookup(PrefixKeys(b"".join(page.packed for page in pages))).pages
        self._answer(batch[last:], found=False)
        for page, (_, answer) in zip(pages[:last], batch, strict=False):
            assert space is not None
            answer.found = bool(space.lookup(page).pages)
        return True

    def _begin(self, number: int, moving: _Moving) -> None:
        assert self._rows is not None, "closed"
        assert number not in self._moving, f"job {number} has not ended"
        worker = self._workers[1 if moving.load else 2]
        opening = self._loading if moving.load else self._storing
        moving.job = StoreJob(worker, lambda: self._run(moving, opening))
        self._moving[number] = moving

    def _run(self, moving: _Moving, opening: Opening) -> bool:
        start = self._clock()
        space = opening.get()
        for key, chunk in zip(moving.keys, moving.chunks, strict=True):
            page = self._page_key(key)
            if space is None or self._cancelled.is_set():
                break
            try:
                if page is not None and self._move(space, page, chunk, load=moving.load):
                    moving.good.append(key)
            except KVStoreError as error:
                # Do not keep the error: its frames reference the rows.
                opening.log.debug("a chunk was not stored: %s", error)
        moving.seconds = self._clock() - start
        return True

    def _move(self, space: Space, page: PrefixKeys, chunk: int, *, load: bool) -> bool:
        assert self._rows is not None
        row = self._rows[chunk]
        if load:
            return space.get(page, [row]) == 1
        result = space.put(page, [row])
        return result.stored + result.existing == 1
