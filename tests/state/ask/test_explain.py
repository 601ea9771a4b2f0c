"""Goal: for every reason that a page is no hit, ``explain`` names that reason and no other."""

import pytest

from kvstore.state.ask.explain import HEADS_MAX, Explainer
from kvstore.state.choice.ghosts import Ghosts
from kvstore.state.tree.node import PrefixNode, Retention
from tests.state.ask.asked import SECOND, Asked
from tests.state.world import PAGE, drop_below, ended, key


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
