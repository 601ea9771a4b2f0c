"""Goal: what the API explains names the nodes that have a page, and the first miss of a prompt."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from kvstore.protocol.explanation import Explanation
from kvstore.protocol.page import KEY_BYTES, CanonicalLayout, PrefixKey, PrefixKeys, ShardSpec
from kvstore.server.admin import prompts
from kvstore.server.inspect import Inspection
from kvstore.server.operations import ExplainKey, Operation
from kvstore.state.tree.prefix_tree import PrefixTree
from tests.state.ask.asked import Asked
from tests.state.world import FULL, FULL_2, chain, ended, identity, key


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_a_page_that_is_not_here_says_which_nodes_have_it_for_which_shards(asked):
    asked.world.store(asked.process, asked.space, "a")
    questions: list[tuple[object, ...]] = []

    def holders(identity, shards, page, answer):
        questions.append((identity, tuple(shards), page))
        held = [("p", FULL), ("p", FULL_2), ("q", FULL_2)] if page == key("ab") else []
        found: dict[str, list[int]] = {}
        for peer, shard in held:
            if shard in shards:
                found.setdefault(peer, []).append(shards.index(shard))
        answer(found)

    status = SimpleNamespace(others=SimpleNamespace(holders=holders))
    inspection = Inspection(SimpleNamespace(pages=asked.table), status)

    def why(path: str, **fields: object) -> Explanation:
        return ended(inspection.explain(ExplainKey(key=key(path).hex(), **fields)))

    label = asked.space.label
    found = why("ab")
    assert (found.verdict, found.space) == ("never_stored", label)
    assert found.peers == {"p": [0, 1], "q": [1]}
    assert found.text.endswith("; nodes p, q have it")
    assert questions == [(asked.space.identity, (FULL, FULL_2), key("ab"))]
    assert why("ab", space=label, shard=1).peers == {"p": [1], "q": [1]}
    assert questions[-1][1] == (FULL_2,), "only one shard was asked for"
    assert why("ab", space=label, shard=9).peers == {}
    assert why("x").peers == {}
    before = len(questions)
    assert why("a").verdict == "hit"
    assert len(questions) == before, "who has the page here asks nobody"


@pytest.fixture
def prompt(asked, monkeypatch):
    """``prompt(chains, space, shard)``: explains a prompt whose keys are those, by page size."""
    status = SimpleNamespace(others=None)
    inspection = Inspection(SimpleNamespace(pages=asked.table), status)

    async def ask(operation: Operation, _kind: object) -> object:
        return ended(inspection.handlers[type(operation)](operation))

    def run(
        chains: dict[int, list[PrefixKey]],
        space: PrefixTree | None = None,
        shard: int | None = None,
    ) -> Explanation:
        monkeypatch.setattr(
            prompts, "page_keys", lambda _tokens, size: PrefixKeys(b"".join(chains.get(size, [])))
        )
        tokens = [0] * max(size * len(keys) for size, keys in chains.items())
        label = space.label if space is not None else None
        return asyncio.run(prompts.explain(ask, tokens, label, shard))

    return run


def test_tokens_are_explained_by_the_first_page_that_is_missing(asked, prompt):
    asked.world.store(asked.process, asked.space, "abcd")
    asked.table.residents.drop(asked.space.nodes[key("abc")], 0, "corrupt")

    for space in (asked.space, None):
        found = prompt({1: chain("abcd")}, space)
        assert (found.hit_pages, found.asked_pages) == (2, 4)
        assert (found.verdict, found.key) == ("quarantined", key("abc").hex())
        assert found.text.startswith("2 of 4 pages are a hit; page 2: quarantined")
    whole = prompt({1: chain("ab")}, asked.space)
    assert (whole.verdict, whole.hit_pages) == ("hit", 2)
    assert prompt({1: chain("ab")}, asked.space, 1).verdict == "other_shard"


def test_tokens_are_asked_a_stretch_at_a_time(asked, prompt, monkeypatch):
    monkeypatch.setattr(prompts, "_STRETCH_BYTES", 2 * KEY_BYTES)
    asked.world.store(asked.process, asked.space, "abc")
    other = asked.other(model="n")
    asked.world.store(asked.process, other, "a")

    found = prompt({1: chain("abcdef")})

    assert (found.hit_pages, found.asked_pages, found.space) == (3, 6, asked.space.label)
    assert prompt({1: chain("abcdef")}, other).hit_pages == 1


def test_tokens_that_a_space_with_other_pages_has_say_so(asked, prompt):
    wanted = msgspec.structs.replace(identity(model="pairs"), page_tokens=2)
    half = ShardSpec(layout=CanonicalLayout(1024), layers=(0, 1), heads=(0, 1))
    pairs = asked.table.spaces.open(asked.process.session, wanted, [half])[0]
    asked.world.store(asked.process, asked.space, "a")
    asked.world.store(asked.process, pairs, "xy")

    found = prompt({1: chain("abcd"), 2: chain("xy")}, asked.space)

    assert (found.verdict, found.hit_pages, found.asked_pages) == ("other_space", 1, 4)
    assert found.space == pairs.label
    assert {one["field"] for one in found.differs} == {"model", "page_tokens"}
    short = prompt({1: chain("abcd"), 2: chain("q")}, asked.space)
    assert short.verdict == "never_stored"
    assert prompt({1: chain("abcd"), 2: chain("xy")}).space == pairs.label, "more tokens of it"
