"""Load on a node of a cluster, and what its processes have meanwhile."""

import random
import statistics
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.client.store import KVStore
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.page import ShardSpec, SpaceIdentity
from tests.faults import content

PAUSE_WAIT_S: Final = 60.0
GROWTH_BYTES_MAX: Final = 8 << 20
GROWTH_FILES_MAX: Final = 4
GROWTH_THREADS_MAX: Final = 3


class Model(NamedTuple):
    """Whose pages a client moves: so many chains, of each at most so many pages."""

    identity: SpaceIdentity
    shard: ShardSpec
    page_bytes: int
    chains: int
    pages_max: int


FAULTS: Final = Model(content.IDENTITY, content.SHARD, content.PAGE_BYTES, chains=32, pages_max=6)


class Held(NamedTuple):
    """What a process has: bytes of memory of its own, open files, threads."""

    anonymous_bytes: int
    files: int
    threads: int

    def __str__(self) -> str:
        return f"{self.anonymous_bytes / 1e6:.1f} MB, {self.files} files, {self.threads} threads"


def held_by(pid: int) -> Held:
    """What a process has now; memory that it shares with clients is not counted."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    rows = dict(line.split(":", 1) for line in status)
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Held(1024 * int(rows["RssAnon"].split()[0]), files, int(rows["Threads"]))


def growth(samples: Sequence[Held]) -> Held:
    """By how much the last third of samples is above the first third, in their medians."""
    third = max(1, len(samples) // 3)
    early, late = samples[:third], samples[-third:]
    return Held(*(
        int(statistics.median(after) - statistics.median(before))
        for before, after in zip(zip(*early, strict=True), zip(*late, strict=True), strict=True)
    ))  # fmt: skip


def grows(samples: Sequence[Held]) -> bool:
    """Whether a process has more and more of something."""
    more = growth(samples)
    return (
        more.anonymous_bytes > GROWTH_BYTES_MAX
        or more.files > GROWTH_FILES_MAX
        or more.threads > GROWTH_THREADS_MAX
    )


class MixedLoad:
    """A client that puts, looks up, gets and prefetches on a thread, and compares every byte.

    Attributes:
        fault: what went wrong; None = nothing. Errors of the store are no faults.
        counts: operations, pages, and errors by their class.
        slowest_s: the longest call.
    """

    def __init__(self, address: str, seed: int, model: Model = FAULTS) -> None:
        """Connect; :meth:`go_on` begins."""
        self.fault: BaseException | None = None
        self.counts: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._store = KVStore.connect(address, name=f"load-{seed}", timeout_s=5.0)
        self._space = self._store.space(model.identity, [model.shard])
        self._model = model
        self._chance = random.Random(seed)
        self._out = [bytearray(model.page_bytes) for _ in range(model.pages_max)]
        self._going, self._idle, self._ended = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._run, name=f"load-{seed}")
        self._thread.start()

    def go_on(self) -> None:
        """Begin, or begin again."""
        self._idle.clear()
        self._going.set()

    def pause(self) -> None:
        """Returns when no call is under way."""
        self._going.clear()
        assert self._idle.wait(PAUSE_WAIT_S), "a call lasts too long"

    def end(self) -> None:
        """Stop and leave."""
        self._ended.set()
        self._going.set()
        self._thread.join(PAUSE_WAIT_S)
        self._store.close()

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                if self._going.is_set():
                    self._step()
                else:
                    self._idle.set()
                    self._going.wait()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.fault = error
            self._idle.set()

    def _step(self) -> None:
        chain = self._chance.randrange(self._model.chains)
        pages = self._chance.randint(1, self._model.pages_max)
        act = self._chance.choice((self._put, self._get, self._get, self._look_up, self._prefetch))
        began = monotonic()
        try:
            act(chain, pages)
        except KVStoreError as error:
            self.counts[type(error).__name__] += 1
        self.counts[act.__name__.removeprefix("_")] += 1
        self.slowest_s = max(self.slowest_s, monotonic() - began)

    def _put(self, chain: int, pages: int) -> None:
        self._space.put(content.keys(chain, pages), [self._page(chain, at) for at in range(pages)])

    def _get(self, chain: int, pages: int) -> None:
        out = self._out[:pages]
        found = self._space.get(content.keys(chain, pages), out)
        self.counts["pages_read"] += found
        for at in range(found):
            assert out[at] == self._page(chain, at).tobytes(), f"page {at} of chain {chain}"

    def _look_up(self, chain: int, pages: int) -> None:
        self._space.lookup(content.keys(chain, pages), wait_s=0.1)

    def _prefetch(self, chain: int, pages: int) -> None:
        self._space.prefetch(content.keys(chain, pages)).result(PAUSE_WAIT_S)

    def _page(self, chain: int, at: int) -> npt.NDArray[np.uint8]:
        return content.page(chain, at, self._model.page_bytes)
