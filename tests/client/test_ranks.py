"""Goal: engines of any number of ranks share pages at one node, and what ranks hold alike is once.

Workers are real, one client each; blocks have bytes that say of which layer, head and block they
are, so that a head in a wrong place is seen.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count, permutations
from time import monotonic

import numpy as np
import pytest

from kvstore.client.stores import Storer
from kvstore.engine.identity import EngineFacts, Group, shard_specs, space_identity
from kvstore.engine.messages import Blocks, Load, Store
from kvstore.engine.opening import Opening
from kvstore.engine.ranks import HeadSplit
from kvstore.engine.worker import WorkerSide, memory_of
from kvstore.mover.kvpool import KVPool
from kvstore.protocol import wire
from kvstore.protocol.page import PrefixKeys, page_keys
from tests.client.conftest import Daemon

LAYERS, BLOCKS, HEAD_BYTES, PAGE, BLOCK = 3, 40, 512, 4, 2
PAGES = 9
EACH = PAGE // BLOCK
_prompts = count(1)

Wait = Callable[[Callable[[], object]], object]


def true_block(prompt: int, layer: int, head: int, block: int) -> np.ndarray:
    """What a head of a layer computes for a block of a prompt."""
    return np.random.default_rng((prompt, layer, head, block)).integers(
        0, 256, HEAD_BYTES, dtype=np.uint8
    )


class Rank:
    """One worker with its memory: layer, block, head, bytes."""

    def __init__(self, store, facts: EngineFacts, rank: int, stage: int) -> None:
        self.layers = facts.stages[stage] if facts.stages else (0, LAYERS)
        held = HeadSplit(facts.groups[0].kv_heads, facts.ranks).rank_heads
        self.first_head = rank * facts.groups[0].kv_heads // facts.ranks
        depth = self.layers[1] - self.layers[0]
        self.memory = np.zeros((depth, BLOCKS, held, HEAD_BYTES), dtype=np.uint8)
        planes = tuple(int(plane.ctypes.data) for plane in self.memory)
        pool = KVPool(planes, held * HEAD_BYTES, held * HEAD_BYTES, BLOCKS, 1)
        identity = space_identity(facts, "ranks", PAGE)
        self.opening = Opening(store, identity, shard_specs(facts, PAGE), monotonic)
        memory = memory_of(facts, PAGE, pool, 0, rank, stage)
        self.side = WorkerSide(self.opening, [memory], monotonic)

    def blocks_of(self, prompt: int, blocks: list[int]) -> np.ndarray:
        """What its blocks must have for a prompt."""
        found = np.zeros((len(self.memory), len(blocks), *self.memory.shape[2:]), dtype=np.uint8)
        for layer, at, head in np.ndindex(found.shape[:3]):
            numbers = self.layers[0] + layer, self.first_head + head, at
            found[layer, at, head] = true_block(prompt, *numbers)
        return found


class Engine:
    """Ranks of one engine, and its scheduler's lookups."""

    def __init__(
        self, daemon: Daemon, steps: ExitStack, heads: int, ranks: int,
        stages: tuple[tuple[int, int], ...] = (), model: str = "",
    ) -> None:  # fmt: skip
        held = HeadSplit(heads, ranks).rank_heads
        group = Group(
            index=0, layers=LAYERS, block_tokens=BLOCK, block_bytes=held * HEAD_BYTES,
            kv_heads=heads,
        )  # fmt: skip
        facts = EngineFacts(
            engine="e", model=model or f"ranks-{heads}", revision="", kv_dtype="uint8", settings={},
            version="1", isa="", ranks=ranks, groups=(group,), stages=stages,
        )  # fmt: skip
        self.ranks = [
            Rank(steps.enter_context(daemon.connect()), facts, rank, stage)
            for stage in range(max(1, len(stages)))
            for rank in range(ranks)
        ]
        assert len(self.ranks) == facts.workers
        self.space = self.ranks[0].opening.get()

    def store(self, prompt: int, keys: PrefixKeys, wait_until: Wait, first: int = 0) -> None:
        """Compute a prompt and store its pages from ``first`` on, on all ranks at once."""
        blocks = list(np.random.default_rng(prompt).permutation(np.arange(1, BLOCKS)))
        blocks = [int(block) for block in blocks[: len(keys) * EACH]]
        for rank in self.ranks:
            rank.memory[:, blocks] = rank.blocks_of(prompt, blocks)
            part = [Blocks(0, 0, blocks[first * EACH :])]
            rank.side.start_stores([Store(1, keys[first:], part, first)])
        self.end(wait_until)

    def load(self, prompt: int, keys: PrefixKeys, wait_until: Wait) -> int:
        """Load a prompt's pages; returns the pages that all ranks have. They must be right."""
        blocks = list(range(2, 2 + len(keys) * EACH))
        for rank in self.ranks:
            rank.memory[:] = 255
            rank.side.start_loads([Load(1, "r", keys, [Blocks(0, 0, blocks)], 10.0, False)])
        pages = min(self.end(wait_until))
        for rank in self.ranks:
            right = rank.blocks_of(prompt, blocks[: pages * EACH])
            assert np.array_equal(rank.memory[:, blocks[: pages * EACH]], right)
        return pages

    def end(self, wait_until: Wait) -> list[int]:
        """Wait for the job of each rank; returns their pages."""
        found: list[int] = []
        for rank in self.ranks:
            ended: dict = {}
            wait_until(lambda ended=ended, rank=rank: ended.update(rank.side.poll().report.ended)
                       or ended)  # fmt: skip
            found += [end.pages for end in ended.values()]
        return found

    def counted(self, name: str) -> float:
        """The sum of a count of all ranks, since the last call."""
        return sum(rank.side.counts.take().get(name, 0) for rank in self.ranks)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for another one does so through a stall of the machine."""
    monkeypatch.setattr("kvstore.client.stores.TURN_WAIT_S", 10.0)


@pytest.fixture
def make(daemon: Daemon) -> Iterator[Callable[..., Engine]]:
    with ExitStack() as steps:
        yield lambda *given, **more: Engine(daemon, steps, *given, **more)


def new_prompt() -> tuple[int, PrefixKeys]:
    number = next(_prompts)
    return number, page_keys([number] * (PAGES * PAGE), PAGE)


def host_bytes(daemon: Daemon) -> int:
    with daemon.connect() as store:
        found = store.stats()["host"]
    return found["ready_bytes"]


@pytest.mark.parametrize("heads", [1, 4, 8])
def test_engines_of_one_two_four_and_eight_ranks_read_what_the_others_have_stored(
    make, wait_until, heads
):
    engines = [make(heads, ranks) for ranks in (1, 2, 4, 8)]
    for writer, reader in permutations(engines, 2):
        prompt, keys = new_prompt()
        writer.store(prompt, keys, wait_until)
        assert reader.space.lookup(keys).pages == PAGES
        assert reader.load(prompt, keys, wait_until) == PAGES


@pytest.mark.parametrize(("heads", "ranks", "copies"), [(1, 8, 8), (2, 8, 4), (4, 8, 2), (8, 8, 1)])
def test_what_ranks_hold_alike_is_put_and_kept_once(make, daemon, wait_until, heads, ranks, copies):
    engine = make(heads, ranks)
    (prompt, keys), before = new_prompt(), host_bytes(daemon)
    engine.store(prompt, keys, wait_until)

    held_by_all = ranks * PAGES * LAYERS * EACH * HEAD_BYTES
    assert engine.counted("stored_bytes") == held_by_all // copies
    slot = -(-LAYERS * EACH * HEAD_BYTES // 4096) * 4096
    assert host_bytes(daemon) - before == heads * PAGES * slot
    assert engine.load(prompt, keys, wait_until) == PAGES


def test_ranks_go_on_with_a_prompt_where_they_ended(make, wait_until):
    """And each writes the same pages whichever page a job begins with."""
    engine = make(1, 4)
    prompt, keys = new_prompt()
    engine.store(prompt, keys[:3], wait_until)
    engine.store(prompt, keys, wait_until, first=3)

    assert [rank.side.counts.take()["stored_pages"] for rank in engine.ranks] == [3, 2, 2, 2]
    assert engine.load(prompt, keys, wait_until) == PAGES


def test_what_one_rank_does_not_write_another_one_does(make, wait_until, monkeypatch):
    """It waits in vain once; then it writes all for a while, and waits for nobody."""
    monkeypatch.setattr("kvstore.client.stores.TURN_WAIT_S", 4.0)
    engine = make(1, 2)
    turns, put, lazy = Storer.put_turns, Storer.put, engine.ranks[1].opening.get()
    waits: list[bool] = []

    def only_the_first(self, keys, source, shard, keep, only):
        return turns(self, keys, source, shard, keep, only[: 1 if self is lazy._stores else None])

    def noted(self, *given, follows=False):
        waits.append(follows and self is not lazy._stores)
        return put(self, *given, follows=follows)

    monkeypatch.setattr(Storer, "put_turns", only_the_first)
    monkeypatch.setattr(Storer, "put", noted)
    for expected in (3, 0):
        prompt, keys = new_prompt()
        engine.store(prompt, keys, wait_until)
        assert sum(waits) == expected, "0 and 2 were written, 4 was not"
        assert engine.load(prompt, keys, wait_until) == PAGES
        waits.clear()


def test_at_an_older_node_each_rank_offers_all_pages(make, wait_until, monkeypatch):
    monkeypatch.setattr("kvstore.protocol.wire.TURNS_MINOR", wire.PROTOCOL_MINOR + 1)
    engine = make(1, 2)
    prompt, keys = new_prompt()
    engine.store(prompt, keys, wait_until)

    assert engine.counted("stored_bytes") == PAGES * LAYERS * EACH * HEAD_BYTES, "once all the same"
    assert engine.load(prompt, keys, wait_until) == PAGES


def test_a_page_is_a_hit_only_when_all_shards_of_a_cover_have_it(make, wait_until):
    """A rank of two has stored more than the other one."""
    two, one = make(4, 2), make(4, 1)
    prompt, keys = new_prompt()
    two.store(prompt, keys[:5], wait_until)
    first = two.ranks[0]
    blocks = list(range(1, 1 + PAGES * EACH))
    first.memory[:, blocks] = first.blocks_of(prompt, blocks)
    first.side.start_stores([Store(2, keys, [Blocks(0, 0, blocks)])])
    wait_until(lambda: first.side.poll().report.ended)

    assert one.space.lookup(keys).pages == two.space.lookup(keys).pages == 5
    assert one.load(prompt, keys, wait_until) == 5


def test_stages_of_a_pipeline_are_ranges_of_layers(make, wait_until):
    engine = make(4, 2, stages=((0, 1), (1, 3)))
    prompt, keys = new_prompt()
    engine.store(prompt, keys, wait_until)

    assert engine.space.lookup(keys).pages == PAGES
    assert engine.load(prompt, keys, wait_until) == PAGES
    assert make(4, 2).space.lookup(keys).pages == 0, "not those of another number of stages"
    assert make(4, 1, stages=((0, 1), (1, 3))).load(prompt, keys, wait_until) == PAGES
