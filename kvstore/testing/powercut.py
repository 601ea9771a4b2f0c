"""Power cuts of a whole node: acknowledged pages stay, and evicted pages stay away.

Node, page table, disk side and SSD log are the real ones; the disk is simulated and keeps only what
was synced. Jobs of the tier run and end in any order. The power fails during calls of the disk,
including those of a start. A seed determines the whole history.
"""

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from kvstore.config import SSDConfig
from kvstore.node.ssd import IN_FLIGHT_BYTES_MAX
from kvstore.protocol.page import PrefixKeys, page_keys
from kvstore.state.disk.jobs import SyncPolicy, WritePolicy
from kvstore.state.tree.places import record_bytes
from kvstore.testing.failing_power import FailingPower, PowerCut
from kvstore.testing.life import SHARDS, Life, Page, Promises, Toll
from kvstore.testing.timeline import PAGE_BYTES

SEGMENT_BYTES: Final = 160 << 10
SEGMENTS: Final = 7
"""Too few for all pages, so that segments are reclaimed while the power fails."""
HOME: Final = Path("/log")
CALLS_MAX: Final = 220
STEPS_MAX: Final = 400
EVICT_SHARE: Final = 0.2
LONG_PAGES: Final = 12
FEW_BYTES: Final = 4 * record_bytes(PAGE_BYTES)
"""A limit of bytes in flight that a long prompt takes many steps to be written in."""


@dataclass
class History:
    """One seed: lives of a node on one disk, each except the last ended by a power cut.

    Attributes:
        seed: determines all random choices.
        sync: the node's sync policy.
        evictions: also drop pages, by an operator or as corrupt.
    """

    seed: int
    sync: SyncPolicy = SyncPolicy.INTERVAL
    evictions: bool = False
    promises: Promises = field(default_factory=Promises)

    def __post_init__(self) -> None:
        """Create an empty disk."""
        self._toll = self.promises.toll
        self.random = Random(f"{self.seed} {self.sync}")
        self.disk = FailingPower(seed=self.seed)
        self.config = SSDConfig(
            directories=(str(HOME),),
            capacity_bytes=SEGMENTS * SEGMENT_BYTES,
            segment_bytes=SEGMENT_BYTES,
            write=self.random.choice(tuple(WritePolicy)).value,
            sync=self.sync.value,
            sync_interval_s=0.01,
            admission="all",
        )
        self.prompts = self._make_prompts()
        self.in_flight_bytes = self.random.choice((IN_FLIGHT_BYTES_MAX, FEW_BYTES))
        self._doubtful: set[Page] = set()

    def run(self, cuts: int = 3, *, fully: bool = True) -> Toll:
        """Run the node, cut its power and check the recovered pages, repeatedly.

        Args:
            cuts: number of power cuts.
            fully: read every page at the end.

        Raises:
            AssertionError: an acknowledged page is lost, a wrong byte was read, or an invariant
                failed.
        """
        ordinary: set[Page] = set()
        for _ in range(cuts):
            self.disk.calls_left = self.random.randrange(CALLS_MAX)
            self._until_the_cut(ordinary)
        self.disk.calls_left = None
        with closing(self._begin()) as life:
            self._inspect(life, ordinary, fully=fully)
        return self._toll

    def _begin(self) -> Life:
        return Life(
            self.random, self.config, self.disk, self.prompts, self.promises, self.in_flight_bytes
        )

    def _until_the_cut(self, ordinary: set[Page]) -> None:
        self._toll.cuts += 1
        try:
            life = self._begin()
        except PowerCut:
            pass  # during the start
        else:
            with closing(life):
                self._live(life, ordinary)
        self.disk.cut_power(self.random)

    def _live(self, life: Life, ordinary: set[Page]) -> None:
        """Run until a power cut, or for some time; sets ``ordinary`` to the pages on disk then."""
        try:
            self._inspect(life, ordinary, fully=self.random.random() < 0.3)
            for _ in range(STEPS_MAX):
                self._act(life)
                life.step()
                if self.random.random() < 0.02:
                    life.desk.self_check.run()
        except PowerCut:
            pass
        ordinary.clear()
        ordinary |= life.on_disk() - self.promises.acknowledged.keys()
        self._doubtful = {page for _, pages in life.evictions for page in pages}
        self._toll.reclaimed += life.disk.stats().drops

    def _act(self, life: Life) -> None:
        keys = self.random.choice(self.prompts)
        keys = keys[: self.random.randrange(1, len(keys) + 1)]
        shard = self.random.randrange(len(SHARDS))
        match self.random.randrange(8):
            case 0 | 1:
                life.put(keys, shard, durable=False)
            case 2:
                life.put(keys, shard, durable=True)
            case 3:
                life.read(keys, shard)
            case 4:
                life.release_one()
            case 5 if self.evictions and self.random.random() < EVICT_SHARE:
                key = self.random.choice((None, keys[-1], keys[-1]))
                life.evict(key, self.random.choice(("operator", "corrupt")))
            case _:
                pass

    def _inspect(self, life: Life, ordinary: set[Page], *, fully: bool) -> None:
        """Acknowledged pages are there, evicted ones are not, and no byte is wrong."""
        adopted = life.on_disk()
        lost = self.promises.acknowledged.keys() - adopted
        assert not lost, f"seed {self.seed} {self.sync}: {len(lost)} durable pages are lost"
        back = self.promises.evicted & adopted
        assert not back, f"seed {self.seed} {self.sync}: {len(back)} evicted pages are back"
        self._toll.gone += len(self.promises.evicted)
        self._toll.doubtful += len(self._doubtful)
        self._toll.returned += len(self._doubtful & adopted)
        self._toll.survived += len(self.promises.acknowledged)
        self._toll.written += len(ordinary)
        self._toll.lost += len(ordinary - adopted)
        expected = set(self.promises.acknowledged)
        if fully:
            found = life.read_everything()
            unread = (expected & self.promises.acknowledged.keys()) - found
            assert not unread, f"seed {self.seed}: {len(unread)} durable pages cannot be read"
            life.desk.self_check.run()

    def _make_prompts(self) -> list[PrefixKeys]:
        """Prompts that branch, and some long ones: more pages than the disk holds."""
        prompts = []
        for start in range(4):
            common = [start, 1, 2][: self.random.randrange(1, 4)]
            for _ in range(4):
                tail = [self.random.randrange(4) for _ in range(self.random.randrange(2, 6))]
                prompts.append(page_keys(common + tail, 1))
        for start in range(2):
            tail = [self.random.randrange(4) for _ in range(LONG_PAGES - 3)]
            prompts.append(page_keys([start, 1, 2, *tail], 1))
        return prompts
