"""Goal: pages of other nodes are loaded where that is faster, and nothing waits long for them."""

import pytest

from kvstore.client.results import Hit
from tests.engine.engine import PAGE, PLAIN, Request, World

TOKENS = list(range(2, 302))
"""Four pages of 64 tokens and a rest of 44."""
SECONDS_PER_TOKEN = 1e-3


@pytest.fixture
def world() -> World:
    made = World()
    made.side.pace.seconds_per_token = SECONDS_PER_TOKEN
    return made


def request(name="r", **more):
    return Request(name, list(TOKENS), **more)


def test_pages_of_other_nodes_are_loaded_with_those_of_this_one(world):
    world.store.answer = Hit(1, remote=3, remote_seconds=0.1)
    (load,) = world.load(request()).loads
    assert len(load.keys) == 4

    world.ended(load.job, 4)
    counts = world.side.counts.take()
    assert counts["hit_tokens"] == 4 * PAGE
    assert counts["remote_hit_tokens"] == 3 * PAGE


def test_hits_are_counted_by_where_they_are(world):
    world.store.answer = Hit(3, tiers={"host": 1, "ssd": 2}, remote=1, remote_seconds=0.01)
    (load,) = world.load(request()).loads
    assert len(load.keys) == 4
    side = world.side
    assert side.hit_sources("r", 4 * PAGE) == (2 * PAGE, PAGE)
    assert side.hit_sources("r", PAGE + 3) == (3, PAGE), "the last pages are the remote ones"
    assert side.hit_sources("unknown", PAGE) == (0, 0)
    counts = side.counts.take()
    assert (counts["disk_hit_tokens"], counts["remote_hit_tokens"]) == (2 * PAGE, PAGE)


def test_pages_that_only_other_nodes_have_are_a_hit_too(world):
    world.store.answer = Hit(0, remote=4, remote_seconds=0.1)
    assert world.side.match(request(), PLAIN, 0) == (4 * PAGE, True)


def test_pages_of_other_nodes_are_left_where_computing_them_is_faster(world):
    world.store.answer = Hit(1, remote=3, remote_seconds=3 * PAGE * SECONDS_PER_TOKEN * 1.1)
    assert world.side.match(request(), PLAIN, 0) == (PAGE, True)
    world.step()
    (load,) = world.load(request("again")).loads
    assert len(load.keys) == 1
    assert "remote_hit_tokens" not in world.side.counts.take()


def test_only_tokens_that_the_engine_lacks_count_for_the_comparison(world):
    world.store.answer = Hit(0, remote=4, remote_seconds=2.5 * PAGE * SECONDS_PER_TOKEN)
    assert world.side.match(request(), PLAIN, 0) == (4 * PAGE, True)
    world.step()
    computed = 3 * PAGE + PAGE // 2  # a whole page is fetched for the rest of it
    assert world.side.match(request("s"), PLAIN, computed) == (0, False)


def test_pages_of_other_nodes_are_not_loaded_without_those_before_them(world):
    world.store.answer = Hit(1, load_seconds=1.0, remote=3, remote_seconds=0.001)
    assert world.side.match(request(), PLAIN, 0) == (0, False)


def test_a_prompt_that_nobody_has_waits_for_one_answer(world):
    world.store.answer = Hit(0, pending=4)
    asked = request()
    assert world.side.match(asked, PLAIN, 0) == (None, False)
    world.store.answer = Hit(0)
    world.now += 0.002
    assert world.side.match(asked, PLAIN, 0) == (0, False)
    assert len(world.store.asked) == 2


def test_the_wait_for_an_answer_that_does_not_come_ends_as_any_wait_does(world):
    world.store.answer = Hit(0, pending=4)
    asked = request()
    assert world.side.match(asked, PLAIN, 0) == (None, False)
    world.now += 4 * PAGE * SECONDS_PER_TOKEN
    assert world.side.match(asked, PLAIN, 0) == (0, False)


def test_a_load_that_brings_fewer_pages_than_other_nodes_promised_is_a_shorter_load(world):
    world.store.answer = Hit(1, remote=3, remote_seconds=0.1)
    asked = request()
    (load,) = world.load(asked).loads
    world.ended(load.job, 2)

    assert world.side.counts.take()["load_failed_tokens"] == 2 * PAGE
    assert not world.blocks.held
    assert world.side.match(asked, PLAIN, 2 * PAGE) == (0, False), "the rest is computed"
    assert world.side._states["r"].stored == 2, "and then stored here"


def test_fetches_from_other_nodes_say_nothing_of_the_speed_of_this_one(world):
    world.store.answer = Hit(1, remote=3, remote_seconds=0.1)
    for number in range(5):
        (load,) = world.load(request(str(number))).loads
        world.ended(load.job, 4, 0.15)
    costs = world.side.chooser.costs

    assert costs.is_known("remote")
    assert not costs.is_known("host")


def test_the_node_of_the_prefill_engine_is_named_in_the_lookup(world):
    promise = {
        "do_remote_prefill": True, "kvstore_pages": 4, "kvstore_page_tokens": 64,
        "kvstore_node": "there",
    }  # fmt: skip
    world.store.answer = Hit(0, remote=4, remote_seconds=0.1)
    assert world.side.match(request(kv_transfer_params=promise), PLAIN, 0) == (4 * PAGE, True)
    assert world.store.told == ("there", 4)
    world.side.match(request("s"), PLAIN, 0)
    assert world.store.told == ("", 0)
