"""Goal: for every reason that a page is no hit, ``explain`` names that reason and no other."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from kvstore.protocol.page import KEY_BYTES, CanonicalLayout, PrefixKey, PrefixKeys, ShardSpec
from kvstore.server.admin import prompts
from kvstore.server.inspect import Inspection
from kvstore.server.operations import ExplainKey, Operation
from kvstore.state.ask.explain import HEADS_MAX, Explainer
from kvstore.state.ask.explanation import VERDICTS, Explanation
from kvstore.state.choice.ghosts import Ghosts
from kvstore.state.tree.node import PrefixNode, Retention
from kvstore.state.tree.prefix_tree import PrefixTree
from tests.state.world import FULL, FULL_2, PAGE, World, chain, drop_below, ended, identity, key

SECOND = 1_000_000_000


class Asked:
    """A small world, and questions to it at second 100."""

    def __init__(self) -> None:
        self.world = World(extents=1, slots_each=4)
        self.table = self.world.table
        self.process = self.world.process()
        self.space = self.world.space(self.process, (FULL, FULL_2))
        self.table.moment.now_ns = 90 * SECOND

    def other(self, **fields: str) -> PrefixTree:
        return self.table.spaces.open(self.process.session, identity(**fields), [FULL])[0]

    def why(
        self, path: str, space: PrefixTree | None = None, shard: int | None = None
    ) -> Explanation:
        explainer = Explainer(self.table, 100 * SECOND)
        found = ended(explainer.steps(key(path), space or self.space, shard))
        assert found.verdict in VERDICTS
        assert found.text
        return found


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_a_stored_page_is_a_hit_and_says_where(asked):
    asked.world.store(asked.process, asked.space, "ab")

    found = asked.why("ab")

    assert (found.verdict, found.shards) == ("hit", {"0": ["host"]})


def test_a_page_that_is_being_written_is_pending(asked):
    asked.world.begin(asked.process, asked.space, "a")

    assert (asked.why("a").verdict, asked.why("a").shards) == ("pending", {"0": ["writing"]})


def test_a_page_nobody_stored_was_never_stored(asked):
    assert asked.why("q").verdict == "never_stored"


def test_an_evicted_page_tells_when_by_what_and_for_what(asked):
    asked.world.store(asked.process, asked.space, "ab")
    other = asked.other(model="hungry")
    asked.world.store(asked.process, other, "wxyz")

    found = asked.why("ab")

    assert found.verdict == "evicted"
    assert "10.0 s ago by policy lru" in found.text
    assert f"slot of {PAGE} bytes" in found.text
    assert found.left["wanted_by"] == other.label
    assert found.left["stored_s_ago"] == 10.0


def test_a_page_evicted_for_its_spaces_quota_says_so(asked):
    asked.world.store(asked.process, asked.space, "ab")
    asked.table.quotas.set(asked.space, PAGE, 0, 4 * PAGE)
    asked.table.eviction.offer_all(asked.space.nodes.values(), anew=True)
    assert asked.table.room.shrink(asked.space, 8)

    found = asked.why("ab")
    assert (found.verdict, found.left["wanted_by"]) == ("evicted", asked.space.label)
    assert found.text.endswith("by policy lru because its space was over its quota")


def test_an_expired_page_says_so(asked):
    asked.world.store(asked.process, asked.space, "a", keep=Retention(expires_ns=95 * SECOND))
    asked.table.expire(96 * SECOND)

    assert asked.why("a").verdict == "expired"


def test_a_page_that_was_read_once_says_so(asked):
    asked.world.store(asked.process, asked.space, "a", keep=Retention(read_once=True))
    number, _ = asked.world.acquire(asked.process, asked.space, "a")
    asked.table.release(asked.process, number)

    assert asked.why("a").verdict == "read_once"


def test_a_corrupt_page_is_quarantined_and_what_followed_it_lost_its_head(asked):
    asked.world.store(asked.process, asked.space, "abc")
    asked.table.residents.drop(asked.space.nodes[key("ab")], 0, "corrupt")

    assert asked.why("ab").verdict == "quarantined"
    assert asked.why("a").verdict == "hit"
    found = asked.why("abc")
    assert found.verdict == "head_missing"
    assert (found.head.key, found.head.verdict) == (key("ab").hex(), "quarantined")


@pytest.mark.parametrize("cause", ["operator", "cleared"])
def test_what_an_operator_took_out_says_so(asked, cause):
    asked.world.store(asked.process, asked.space, "ab")

    assert drop_below(asked.table, asked.space.root, cause) == (2, 0)

    assert [asked.why(path).verdict for path in ("a", "ab")] == [cause, cause]


def test_a_page_whose_writer_gave_its_head_up_lost_its_head(asked):
    number, _, _ = asked.world.begin(asked.process, asked.space, "a")
    asked.world.store(asked.process, asked.space, "ab", start=1)
    asked.table.abort_put(asked.process, number)

    assert asked.why("ab").verdict == "head_missing"
    assert asked.why("a").verdict == "never_stored"


def test_a_page_of_another_space_says_which_field_differs(asked):
    asked.world.store(asked.process, asked.other(model="n", tenant="red"), "a")

    found = asked.why("a")

    assert found.verdict == "other_space"
    assert found.differs == [{"field": "model", "asked": "m", "there": "n"}]


def test_a_page_of_another_shard_says_which_field_differs(asked):
    asked.world.store(asked.process, asked.space, "a")

    found = asked.why("a", shard=1)

    assert found.verdict == "other_shard"
    assert found.differs == [{"field": "heads", "asked": (1, 2), "there": (0, 1)}]
    assert "not open" in asked.why("a", shard=7).text


def test_the_shard_that_left_says_why_while_another_stays(asked):
    asked.world.store(asked.process, asked.space, "a")
    asked.world.store(asked.process, asked.space, "a", shard=1)
    asked.table.residents.drop(asked.space.nodes[key("a")], 1, "corrupt")

    assert asked.why("a", shard=1).verdict == "quarantined"
    assert asked.why("a", shard=0).verdict == "hit"


def test_what_may_have_been_forgotten_is_not_called_never_stored(asked):
    asked.table.residents.ghosts = Ghosts(1)
    asked.world.store(asked.process, asked.space, "ab")
    drop_below(asked.table, asked.space.root, "operator")

    assert asked.why("a").verdict == "operator", "the last that left"
    found = asked.why("ab")
    assert found.verdict == "unknown"
    assert "1 are forgotten" in found.text


def test_without_a_space_the_best_answer_of_all_is_given(asked):
    asked.world.store(asked.process, asked.space, "a")
    other = asked.other(model="n")
    asked.world.store(asked.process, other, "a")
    drop_below(asked.table, other.root, "operator")

    explainer = Explainer(asked.table, 100 * SECOND)

    assert ended(explainer.steps(key("a"), None)).space == asked.space.label
    assert ended(explainer.steps(key("a"), other)).verdict == "operator"
    assert ended(explainer.steps(key("q"), None)).verdict == "never_stored"


# Pages of other nodes


def test_a_page_that_a_peer_gave_says_which_one(asked):
    asked.world.store(asked.process, asked.space, "a")
    for peer in "pq":
        asked.table.eviction.sources.changed(peer, b"boot")
    for path, start, peer in (("abc", 1, "p"), ("abcd", 3, "q")):
        number, _, put = asked.world.begin(asked.process, asked.space, path, start=start)
        digests = bytes(16 * len(put.slots))
        asked.table.commit_put(asked.process, number, digests, peer=peer)

    assert asked.why("a").read_from == ""
    found = asked.why("abc")
    assert (found.verdict, found.read_from) == ("hit", "p")
    assert found.text == "READY in host, read from node p"
    assert asked.why("ab").read_from == "p"
    assert asked.why("abcd").read_from == "q"


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


def test_a_page_whose_head_left_with_its_own_head_a_thousand_times_is_explained(asked):
    name = "a" * 1_000
    asked.table.residents.ghosts = Ghosts(10_000)
    for depth in range(len(name), 1, -1):
        node = PrefixNode(asked.space, key(name[:depth]), None)
        asked.table.residents.ghosts.head = key(name[: depth - 1])
        asked.table.residents.ghosts.add(node, 0, "head_lost", SECOND)

    found, heads = asked.why(name), 0
    while found.head is not None:
        found, heads = found.head, heads + 1

    assert heads == HEADS_MAX


def test_asking_changes_nothing(asked):
    asked.world.store(asked.process, asked.space, "ab")
    node = asked.space.nodes[key("ab")]
    before = (node.access, node.hits, dict(asked.table.counts))

    asked.why("ab")

    assert (node.access, node.hits, dict(asked.table.counts)) == before


@pytest.mark.parametrize(
    ("cause", "verdict", "said"),
    [
        ("reclaimed", "evicted", "segment was reclaimed 10.0 s ago"),
        ("unreadable", "unreadable", "the disk failed to read it"),
    ],
)
def test_a_page_that_the_disk_lost_says_how(asked, cause, verdict, said):
    asked.world.store(asked.process, asked.space, "a")
    asked.table.residents.drop(asked.space.nodes[key("a")], 0, cause)

    found = asked.why("a")
    assert (found.verdict, found.left["cause"]) == (verdict, cause)
    assert said in found.text
