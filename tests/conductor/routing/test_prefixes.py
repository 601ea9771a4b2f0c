"""What a prompt need not compute at an engine: its own blocks, and the pages of its node."""

import msgspec
import numpy as np
import pytest

from conductor.routing.columns import Prefix
from conductor.routing.engines import EngineInfo, EngineRegistry, Role
from conductor.routing.joining import RankEvents
from conductor.routing.naming import own_domain
from conductor.routing.places import engine_worker, node_worker
from conductor.routing.prefixes import PrefixView
from kvstore.engine.identity import chain_seed
from kvstore.index.control import IndexSettings, Source, SourceBounds
from kvstore.protocol.page import page_keys
from tests.local_index import LocalIndex

SPACE = "ab" * 32
ONE, LEFT, RIGHT = "1" * 64, "2" * 64, "3" * 64
TOKENS = list(range(100, 140))
PAGE = 4


class Cluster:
    """Engines ``e`` and more of model ``m``, and node ``n``, without connections."""

    def __init__(self) -> None:
        bounds = SourceBounds(replay_s=1.0, verify_s=1.0, foreign_blocks=1000)
        self.index = LocalIndex(IndexSettings(10_000, bounds))
        self.registry = EngineRegistry()
        self.view = PrefixView(self.index, self.registry, needed=True)

    def engine(self, name: str = "e", **fields: object) -> EngineInfo:
        told = {"domain": SPACE, "page_tokens": PAGE, "node": "n", "model": "m", **fields}
        info = EngineInfo(id=name, role=Role.MIXED, url="http://x:1", **told)
        self.registry.register(info, 0.0)
        return info

    def follows(self, worker: str, domain: str = "") -> None:
        self.index.follow(Source(worker=worker, domain=domain, endpoint="ipc:///nowhere"))
        self._feed(worker).live(counts=True)

    def _feed(self, worker: str):
        [feed] = [one.feed for one in self.index._service._followers if one.source.worker == worker]
        return feed

    def tell(self, worker: str, **event: object) -> None:
        told = {"type": "BlockStored", "parent_block_hash": None, "token_ids": [], **event}
        for _ in self._feed(worker).apply(msgspec.msgpack.encode([1.0, [told], None])):
            pass
        self._feed(worker).flush()

    def pages(
        self,
        shard: str,
        first: int,
        last: int,
        salt: str = "",
        node: str = "n",
        medium: str = "CPU",
    ) -> None:
        """A node has these pages of the prompt, of one shard."""
        seed = chain_seed([("cache_salt", salt)] if salt else [])
        keys = [bytes(key) for key in page_keys(TOKENS, PAGE, seed=seed)]
        self.tell(
            node_worker(node), block_hashes=keys[first:last], block_size=PAGE, medium=medium,
            space=SPACE, shard=0, shard_digest=shard[:16],
        )  # fmt: skip

    def blocks(self, worker: str, count: int, size: int = 2, **event: object) -> None:
        """An engine with hashes of its own has these blocks of the prompt."""
        self.tell(
            worker, block_hashes=list(range(1, count + 1)), token_ids=TOKENS[: count * size],
            block_size=size, medium="GPU", **event,
        )  # fmt: skip

    def at(self, seconds: float) -> None:
        """Let what is expected begin or end."""
        service = self.index._service
        for change in service._expected.due(int(seconds * 1e9)):
            service._pages.expect(change)

    def prefix(self, name: str = "e", salt: str = "", model: str = "m") -> Prefix:
        self.view.remember(1, TOKENS, salt, model)
        return self.view.find(1, model)[name]


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster()
    cluster.follows(node_worker("n"))
    return cluster


def test_a_page_on_a_node_counts_if_all_shards_of_the_engine_are_there(cluster: Cluster):
    cluster.engine("whole", shards=(ONE,))
    cluster.engine("halves", shards=(LEFT, RIGHT))
    cluster.pages(ONE, 0, 6)
    cluster.pages(LEFT, 0, 5)
    cluster.pages(RIGHT, 0, 3)
    assert cluster.prefix("whole").node == 6 * PAGE
    assert cluster.prefix("halves").node == 3 * PAGE


def test_an_engine_whose_shards_are_unknown_needs_all_that_the_node_has(cluster: Cluster):
    cluster.engine()
    cluster.pages(ONE, 0, 6)
    cluster.pages(LEFT, 0, 5)
    assert cluster.prefix().node == 5 * PAGE


def test_of_a_shard_with_a_window_only_the_last_pages_are_needed(cluster: Cluster):
    cluster.engine(shards=(ONE, LEFT), windows={LEFT: 2})
    cluster.pages(ONE, 0, 8)
    assert cluster.prefix().node == 0
    cluster.pages(LEFT, 3, 5)
    assert cluster.prefix().node == 5 * PAGE


def test_what_is_in_the_engine_or_on_its_node_is_usable_together(cluster: Cluster):
    info = cluster.engine(shards=(ONE,))
    cluster.follows(engine_worker("e"), own_domain(info))
    cluster.blocks(engine_worker("e"), 5)  # 10 tokens: into the third page
    cluster.pages(ONE, 2, 4)
    assert cluster.prefix()[:3] == (10, 0, 16)


def test_what_an_engine_lacks_is_in_the_memory_or_on_the_disk_of_its_node(cluster: Cluster):
    info = cluster.engine(shards=(ONE,))
    cluster.follows(engine_worker("e"), own_domain(info))
    cluster.pages(ONE, 0, 8)
    assert cluster.prefix() == Prefix(0, 32, 32, 0, 0, 32, 0)
    cluster.pages(ONE, 0, 10, medium="STORAGE")
    assert cluster.prefix() == Prefix(0, 40, 40, 0, 0, 32, 8)
    cluster.blocks(engine_worker("e"), 5)
    assert cluster.prefix() == Prefix(10, 40, 40, 0, 0, 22, 8)
    cluster.view.expect(1, "e", 0, 10.0, 12.0)
    cluster.at(10.0)
    assert cluster.prefix() == Prefix(10, 40, 40, 0, 0, 0, 0), "it will have all of it soon"


def test_pages_of_a_node_that_are_all_on_its_disk_are_not_in_its_memory(cluster: Cluster):
    cluster.engine("whole", shards=(ONE,))
    cluster.engine("halves", shards=(LEFT, RIGHT))
    cluster.pages(ONE, 0, 6, medium="STORAGE")
    cluster.pages(LEFT, 0, 6, medium="STORAGE")
    cluster.pages(LEFT, 0, 4)
    cluster.pages(RIGHT, 0, 5)
    assert cluster.prefix("whole")[2:] == (24, 0, 0, 0, 24)
    assert cluster.prefix("halves")[2:] == (20, 0, 0, 16, 4)


def test_what_an_engine_has_behind_a_gap_is_not_fetched(cluster: Cluster):
    info = cluster.engine(shards=(ONE,))
    cluster.follows(engine_worker("e"), own_domain(info))
    cluster.blocks(engine_worker("e"), 8)
    cluster.tell(engine_worker("e"), type="BlockRemoved", block_hashes=[1, 2], medium="GPU")
    cluster.pages(ONE, 0, 1)
    cluster.pages(ONE, 0, 2, medium="STORAGE")
    assert cluster.prefix() == Prefix(0, 8, 16, 0, 0, 4, 4)


def test_a_salt_is_of_both_the_engines_blocks_and_the_nodes_pages(cluster: Cluster):
    info = cluster.engine(shards=(ONE,))
    cluster.follows(engine_worker("e"), own_domain(info))
    cluster.blocks(engine_worker("e"), 3)
    cluster.pages(ONE, 0, 2, salt="s")
    assert cluster.prefix()[:3] == (6, 0, 6)
    assert cluster.prefix(salt="s")[:3] == (0, 8, 8)
    salted = {"block_hashes": [7], "token_ids": TOKENS[:2], "block_size": 2, "medium": "GPU"}
    cluster.tell(engine_worker("e"), **salted, extra_keys=[["s"]])
    assert cluster.prefix(salt="s")[:3] == (2, 8, 8)
    assert cluster.prefix(salt="t")[:3] == (0, 0, 0)


def test_a_prefix_in_an_engine_needs_every_kv_group(cluster: Cluster):
    info = cluster.engine()
    cluster.follows(engine_worker("e"), own_domain(info))
    spec = {"kv_cache_spec_kind": "full_attention", "group_idx": 0}
    cluster.blocks(engine_worker("e"), 6, **spec)
    assert cluster.prefix().local == 12
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 2}
    cluster.blocks(engine_worker("e"), 4, **window, group_idx=1)
    assert cluster.prefix().local == 8


def test_of_several_ranks_the_one_with_the_longest_prefix_counts(cluster: Cluster):
    ranks = tuple(RankEvents(number, f"tcp://h:{number}", None, None) for number in range(3))
    info = cluster.engine(ranks=ranks, node=None)
    for number, blocks in ((0, 2), (1, 7), (2, 3)):
        cluster.follows(engine_worker("e", number), own_domain(info))
        cluster.blocks(engine_worker("e", number), blocks)
    assert cluster.prefix() == Prefix(14, 0, 14, 1)


def test_what_a_worker_that_does_not_count_has_is_not_usable(cluster: Cluster):
    cluster.engine(shards=(ONE,))
    cluster.pages(ONE, 0, 6)
    cluster._feed(node_worker("n")).live(counts=False)
    assert cluster.prefix()[:3] == (0, 0, 0)
    cluster._feed(node_worker("n")).live(counts=True)
    assert cluster.prefix().node == 6 * PAGE


def test_an_expected_prompt_is_usable_for_its_time_and_no_local_one(cluster: Cluster):
    info = cluster.engine(node=None)
    cluster.follows(engine_worker("e"), own_domain(info))
    cluster.blocks(engine_worker("e"), 1)
    assert cluster.prefix()[:3] == (2, 0, 2)
    cluster.view.expect(1, "e", 0, 10.0, 12.0)
    assert cluster.prefix()[:3] == (2, 0, 2)
    cluster.at(10.0)
    assert cluster.prefix()[:3] == (2, 0, len(TOKENS))
    cluster.at(12.0)
    assert cluster.prefix()[:3] == (2, 0, 2)


def test_a_prompt_that_is_sent_there_does_not_say_what_waiting_blocks_are(cluster: Cluster):
    info, worker = cluster.engine(node=None), engine_worker("e")
    cluster.follows(worker, own_domain(info))
    cluster.blocks(worker, 1)
    known = {"block_size": 2, "medium": "GPU"}
    behind = TOKENS[4:8]
    cluster.tell(
        worker, block_hashes=[22, 23], parent_block_hash=21, token_ids=behind, **known
    )  # fmt: skip
    cluster.view.expect(1, "e", 0, 10.0, 12.0)
    assert cluster.prefix()[:3] == (2, 0, 2)
    cluster.view.expect(1, "e", 0, 10.0, 12.0)
    cluster.at(10.0)
    assert cluster.prefix()[:3] == (2, 0, len(TOKENS)), "expected for a time, and nothing else"
    cluster.at(12.0)
    assert cluster.index.present().report.workers[-1].waiting == 2
    cluster.tell(
        worker, block_hashes=[21], parent_block_hash=1, token_ids=[9_998, 9_999], **known
    )  # fmt: skip
    assert cluster.index.present().report.workers[-1].waiting == 0
    assert cluster.prefix()[:3] == (2, 0, 2), "they were those of another prompt"


def test_tokens_that_fill_no_block_have_no_prefix(cluster: Cluster):
    cluster.engine(shards=(ONE,))
    cluster.pages(ONE, 0, 6)
    cluster.view.remember(2, np.array(TOKENS[:3]), "", "m")
    found = cluster.view.find(2, "m")
    assert found["e"][:3] == (0, 0, 0)


def test_keys_of_prompts_are_equal_as_far_as_the_prompts_are(cluster: Cluster):
    cluster.engine(shards=(ONE,))
    for number, tokens in enumerate((TOKENS, TOKENS[:21] + [7] * 12, TOKENS[:3])):
        cluster.view.remember(number, tokens, "", "m")
    first, second, short = (cluster.view.keys(number, "m").tolist() for number in range(3))
    assert (len(first), len(second), short) == (10, 8, [])
    assert first[:5] == second[:5]
    assert not set(first[5:]) & set(second[5:])
    assert cluster.view.keys(99, "m").tolist() == []
    unused = PrefixView(cluster.index, cluster.registry, needed=False)
    unused.remember(0, TOKENS, "", "m")
    assert unused.keys(0, "m").tolist() == []


def test_a_prompt_is_matched_at_each_worker_medium_by_medium(cluster: Cluster):
    info = cluster.engine(shards=(ONE,))
    cluster.follows(engine_worker("e"), own_domain(info))
    cluster.blocks(engine_worker("e"), 3)
    cluster.pages(ONE, 0, 2)
    cluster.view.remember(1, TOKENS, "", "m")
    cluster.view.expect(1, "e", 0, 1.0, 2.0)
    cluster.at(1.0)
    [matches] = cluster.view.match("m", [TOKENS])
    assert [(one.worker, one.medium, one.tokens) for one in matches] == [
        ("engine/e", "EXPECTED", 40), ("engine/e", "GPU", 6), ("node/n", "CPU", 8),
    ]  # fmt: skip
    assert {one.engine for one in matches} == {"e"}
    assert cluster.view.match("other", [TOKENS]) == [[]]
    [other] = cluster.view.match("m", [[1, 2, 3, 4]])
    assert other
    assert all(one.tokens == 0 for one in other)
