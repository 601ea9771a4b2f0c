"""Goal: what is said of an engine's prefix is right for all of its ranks and KV groups."""

import msgspec
import numpy as np
import pytest

from conductor.routing.columns import Prefix
from conductor.routing.engines import EngineInfo, EngineRegistry, Role
from conductor.routing.joining import RankEvents
from conductor.routing.naming import own_domain
from conductor.routing.places import engine_worker
from conductor.routing.prefixes import PrefixView
from kvstore.index.control import IndexReport, IndexSettings, Source, SourceBounds
from kvstore.index.feed import WorkerFeed
from kvstore.protocol.page import page_keys
from tests.local_index import LocalIndex

BLOCK = 4
TOKENS = list(range(8 * BLOCK))


class View:
    """One engine with some data-parallel ranks, and what is known of its prompts."""

    def __init__(self, ranks: int = 1, block: int = BLOCK) -> None:
        self._block = block
        bounds = SourceBounds(replay_s=1.0, verify_s=1.0, foreign_blocks=1000)
        self.index = LocalIndex(IndexSettings(1000, bounds))
        registry = EngineRegistry()
        info = EngineInfo(
            id="e", role=Role.MIXED, url="http://127.0.0.1:1", model="m", page_tokens=BLOCK,
            domain="model:m", ranks=tuple(RankEvents(n, None, None, None) for n in range(ranks)),
        )  # fmt: skip
        registry.register(info, 0.0)
        for number in range(ranks):
            self.index.follow(
                Source(
                    worker=engine_worker("e", number),
                    domain=own_domain(info),
                    block_tokens=block,
                    endpoint="ipc:///nowhere",
                )
            )
        self._view = PrefixView(self.index, registry, needed=True)
        self._view.remember(1, TOKENS, "", "m")
        for feed in self._feeds():
            feed.live(counts=True)

    def _feeds(self) -> list[WorkerFeed]:
        return [one.feed for one in self.index._service._followers]

    def stored(self, blocks: int, *, rank: int = 0, group: int = 0, **more: object) -> None:
        event = {
            "type": "BlockStored", "block_hashes": list(range(1, blocks + 1)), "medium": "GPU",
            "parent_block_hash": None, "token_ids": TOKENS[: blocks * self._block],
            "block_size": self._block, "group_idx": group, **more,
        }  # fmt: skip
        for _ in self._feeds()[rank].apply(msgspec.msgpack.encode([1.0, [event], None])):
            pass
        self._feeds()[rank].flush()

    def prefix(self) -> Prefix:
        return self._view.find(1, "m")["e"]


def test_ranks_with_the_same_prefix_are_left_to_the_engine():
    view = View(ranks=3)
    assert view.prefix() == Prefix(0, 0, 0, None)
    view.stored(2, rank=1)
    assert view.prefix() == Prefix(2 * BLOCK, 0, 2 * BLOCK, 1)
    view.stored(2, rank=0)
    view.stored(2, rank=2)
    assert view.prefix() == Prefix(2 * BLOCK, 0, 2 * BLOCK, None)


def test_the_only_rank_of_an_engine_is_named():
    assert View().prefix().rank == 0


@pytest.mark.parametrize("window", [2**31 + 1, 2**63, 2**64 - 1])
def test_a_window_that_no_engine_has_is_none(window: int):
    view = View(block=1)
    kind = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": window}
    view.stored(3, **kind)
    assert view.prefix().local == 3


def test_a_kv_group_that_the_report_does_not_know_yet_is_needed(monkeypatch: pytest.MonkeyPatch):
    view = View()
    view.stored(5)
    present = view.index.present()
    assert present.report.workers[0].groups == {0: 0}
    monkeypatch.setattr(LocalIndex, "present", lambda _: present)
    assert view.prefix().local == 5 * BLOCK
    view.stored(2, group=1)
    assert view.prefix().local == 2 * BLOCK
    started = present._replace(report=IndexReport())
    monkeypatch.setattr(LocalIndex, "present", lambda _: started)
    assert view.prefix().local == 2 * BLOCK, "of a process that has just started"


def test_a_block_with_a_lora_that_came_first_is_not_taken_for_one_without():
    keys = [bytes(key) for key in page_keys(np.array(TOKENS, dtype=np.uint32), BLOCK)]
    hashes = [int.from_bytes(key[:8], "big", signed=True) for key in keys]
    view = View()
    rest = {"block_hashes": hashes[1:3], "parent_block_hash": hashes[0]}
    view.stored(2, **rest, token_ids=TOKENS[BLOCK : 3 * BLOCK], lora_name="l")
    view.stored(1, block_hashes=hashes[:1])
    assert view.index.present().report.workers[0].kind == "keys"
    assert view.prefix().local == BLOCK
    view.stored(2, **rest, token_ids=TOKENS[BLOCK : 3 * BLOCK])
    assert view.prefix().local == 3 * BLOCK
