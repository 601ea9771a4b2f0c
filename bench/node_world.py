"""A node alone with millions of pages, an engine that keeps it full, and an operator."""

from collections.abc import Callable
from time import monotonic_ns
from typing import Final

from bench.node_alone import PAGE_BYTES, TICKS_MAX, Engine, LoneNode
from bench.node_operator import Operator
from bench.node_watch import Collector, Watch
from kvstore.protocol.page import KEY_BYTES
from kvstore.server import operations
from kvstore.state.choice.eviction import GRACE_NS

PROMPT_PAGES: Final = 32
MANY_PAGES: Final = 100_000
"""That are dropped, leased, expire or have to go together; a quarter of a small node."""
BRANCH_PAGES: Final = 128
PUT_PAGES: Final = 512
OLD_S: Final = 1.1 * GRACE_NS / 1e9
SSD_PART: Final = 7 / 8
"""Of the pages of a node with an SSD tier, those that are on disk only."""


class RealClock:
    """The machine's time, and what was skipped of it."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def __call__(self) -> int:
        """Nanoseconds."""
        return monotonic_ns() + int(self.skipped_s * 1e9)

    def skip(self, seconds: float) -> None:
        """Let time pass at once."""
        self.skipped_s += seconds


class World:
    """A node with an engine that keeps it full, and an operator.

    Args:
        pages: number of pages of the node.
        policy: what leaves memory first.
        ssd: whether most pages are on disk.
    """

    def __init__(self, pages: int, policy: str, *, ssd: bool = False) -> None:
        self.policy = policy
        self.clock = RealClock()
        self.collector = Collector()
        self.watch = Watch(self.collector)
        on_disk = int(SSD_PART * pages) if ssd else 0
        self.lone = LoneNode(
            pages - on_disk, policy, self.clock, self.watch, at_once=False,
            ssd_pages=on_disk or None,
        )  # fmt: skip
        self.pages = self.lone.pages_max
        self.many = min(MANY_PAGES, self.pages // 4)
        self.operator = Operator(self.lone, self.watch)
        self._identities = iter(range(1, 1_000_000))
        self.engine = self.connect()
        #: Keys of prompts that were put, the oldest first.
        self.prompts: list[bytes] = []

    def close(self) -> None:
        """End what the operator began."""
        self.operator.close()

    def connect(self, page_bytes: int = PAGE_BYTES, model: str = "model") -> Engine:
        """Another engine."""
        return Engine(self.lone, next(self._identities), page_bytes, model)

    def label(self, engine: Engine) -> str:
        """What operators call an engine's space."""
        rows = self.operator.ask(operations.ListSpaces())["spaces"]
        (label,) = [str(row["space"]) for row in rows if row["model"] == engine.model.model]
        return label

    def begin(self) -> None:
        """All is prepared: from here on turns count."""
        self.watch.begin()

    def fill(self, engine: Engine | None = None) -> None:
        """Put prompts until memory is full, and let all pages grow old."""
        free = self.lone.desk.stats().host.free_bytes // PAGE_BYTES
        for _ in range(free // PROMPT_PAGES):
            self.put(engine)
        self.clock.skip(OLD_S)

    def put(self, engine: Engine | None = None) -> bytes:
        """Put one prompt more; its keys."""
        keys = self.lone.keys(PROMPT_PAGES)
        (engine or self.engine).put(keys)
        self.prompts.append(keys)
        return keys

    def chain(self, pages: int) -> bytes:
        """Put one long prompt; its keys."""
        keys, part = self.lone.keys(pages), PUT_PAGES * KEY_BYTES
        ends = range(0, len(keys), part)
        self.put_all([(keys[at : at + part], keys[max(0, at - KEY_BYTES) : at]) for at in ends])
        return keys

    def family(self) -> tuple[bytes, int]:
        """Put a page with many prompts below it; its key, and how many pages are below it."""
        head, prompts = self.lone.keys(1), self.many // BRANCH_PAGES
        branches = [(self.lone.keys(BRANCH_PAGES), head) for _ in range(prompts)]
        self.put_all([(head, b""), *branches])
        return head, prompts * BRANCH_PAGES

    def put_all(self, parts: list[tuple[bytes, bytes]], ttl_ms: int = 0) -> None:
        """Put pages, each part behind its parent; the policy takes none of them for the others.

        Args:
            parts: keys, and the key before them.
            ttl_ms: see :class:`~kvstore.protocol.wire.CommitPut`.
        """
        leases = []
        for keys, parent in parts:
            self.engine.put(keys, parent, ttl_ms)
            lease, generations = self.engine.acquire(keys)
            assert len(generations) == len(keys) // KEY_BYTES
            leases.append(lease)
        for lease in leases:
            self.engine.release(lease)

    def lend(self, lease_s: float) -> tuple[Engine, int]:
        """Another engine leases many pages of prompts; it, and how many leases that are."""
        engine, leased, leases = self.connect(), 0, 0
        for keys in reversed(self.prompts):
            _, generations = engine.acquire(keys, int(1000 * lease_s))
            leased += len(generations)
            leases += bool(generations)  # a prompt may have left with an extent of its class
            if leased >= self.many:
                return engine, leases
        raise AssertionError(f"only {leased} pages can be leased")

    def wait(self, done: Callable[[], bool]) -> None:
        """Tick until something is so."""
        for _ in range(TICKS_MAX):
            if done():
                return
            self.lone.tick()
        raise AssertionError("it does not come to an end")
