"""What is loaded and stored for a request, decided without an engine."""

import pytest

from kvstore.client.results import Hit
from kvstore.engine.identity import Group
from kvstore.engine.messages import Report
from kvstore.engine.requests import PromptScope, Role, ScheduledRequest
from tests.engine.engine import BLOCK, PLAIN, Request, World

TOKENS = list(range(2, 302))
"""Four pages of 64 tokens and a rest of 44."""


def request(name="r", tokens=TOKENS, **more):
    return Request(name, list(tokens), **more)


def table(count=10, first=1):
    return list(range(first, first + count))


def test_what_the_store_has_is_loaded_asynchronously_into_the_requests_blocks():
    world = World()
    world.store.answer = Hit(4)

    assert world.side.match(request(), PLAIN, 0) == (256, True)
    (load,) = world.load(request()).loads

    assert load.request == "r"
    assert len(load.keys) == 4
    assert load.blocks[0].blocks == table(8)
    assert world.blocks.held == dict.fromkeys(table(8), 1)
    world.ended(load.job, 4)
    assert not world.blocks.held
    assert not world.side.busy


def test_at_least_one_token_is_left_to_compute():
    world = World()
    world.store.answer = Hit(9)

    assert world.side.match(request(tokens=range(64)), PLAIN, 0) == (0, False)
    assert world.side.match(request("s", range(65)), PLAIN, 0) == (64, True)
    assert world.side.match(request("t", range(128)), PLAIN, 0) == (64, True)


def test_blocks_that_the_engine_has_computed_are_not_written():
    world = World()
    world.store.answer = Hit(4)

    # Three blocks are there: a page and a half. The load begins with the half page.
    (load,) = world.load(request(), computed=3 * BLOCK).loads

    assert len(load.keys) == 3
    assert load.blocks[0].blocks == [0, 4, 5, 6, 7, 8]
    assert 3 not in world.blocks.held


def test_nothing_is_looked_up_that_the_engine_has_itself():
    world = World()
    world.store.answer = Hit(4)

    assert world.side.match(request(), PLAIN, 256) == (0, False)
    assert not world.store.asked


def test_keys_are_hashed_once_and_as_the_request_grows(monkeypatch):
    hashed: list[int] = []
    import kvstore.engine.chain as chain

    real = chain.extend_keys
    monkeypatch.setattr(chain, "extend_keys", lambda k, t: hashed.append(len(t)) or real(k, t))
    world = World()
    asked = request()
    world.side.match(asked, PLAIN, 0)
    world.side.match(asked, PLAIN, 0)
    asked.all_token_ids += range(64)
    world.side.match(asked, PLAIN, 0)

    assert hashed == [256, 64]
    assert world.store.asked[-1] == world.side._states["r"].keys()[:5]


def test_other_salts_and_adapters_give_other_keys():
    world = World()
    names = [(), (("cache_salt", "a"),), (("cache_salt", "b"),), (("lora", "a"),), (("lora", "b"),)]
    for number, parts in enumerate(names):
        world.side.match(request(str(number)), PromptScope(parts), 0)

    keys = {asked.packed for asked in world.store.asked}

    assert len(keys) == len(names)


def test_after_a_reset_nothing_stored_before_is_found():
    world = World()
    world.side.match(request("a"), PLAIN, 0)
    world.side.forget_all()
    world.side.match(request("b"), PLAIN, 0)

    assert world.store.asked[0][0] != world.store.asked[1][0]


def test_a_reset_empties_the_engines_own_cache_although_stores_hold_its_blocks():
    """Its own reset fails then, and its blocks would be stored under the new names."""
    world = World(blocks=40)
    world.side.see(request("a"), PLAIN)
    assert world.step(ScheduledRequest("a", 300, [table()])).stores
    world.side.forget_all()

    assert world.blocks.forgotten == set(range(40))


def test_pages_that_somebody_writes_are_waited_for_until_the_deadline():
    world = World(load_timeout_ms=500)
    world.store.answer = Hit(1, pending=3)
    asked = request()

    assert world.side.match(asked, PLAIN, 0) == (None, False)
    assert world.side.match(asked, PLAIN, 0) == (None, False)
    assert len(world.store.asked) == 1, "not asked again at once"
    world.now += 0.4
    assert world.side.match(asked, PLAIN, 0) == (None, False)
    world.now += 0.2
    assert world.side.match(asked, PLAIN, 0) == (64, True)


def test_a_preempted_request_that_waited_once_has_as_long_for_its_next_load():
    world = World(load_timeout_ms=500, load_timeout_ms_min=20)
    world.store.answer = Hit(1, pending=3)
    asked = request()
    assert world.side.match(asked, PLAIN, 0) == (None, False)
    world.store.answer = Hit(4)
    world.now += 0.3
    (load,) = world.load(asked).loads
    assert load.wait_s == pytest.approx(0.2), "what is left"
    world.ended(load.job, 4)

    world.now += 60.0
    (load,) = world.load(asked).loads
    assert load.wait_s == pytest.approx(0.5)


def test_pages_that_the_prefill_engine_promised_are_waited_for():
    promise = {"do_remote_prefill": True, "kvstore_pages": 4, "kvstore_page_tokens": 64}
    world = World()
    asked = request(kv_transfer_params=promise)

    assert world.side.match(asked, PLAIN, 0) == (None, False)
    world.store.answer = Hit(4)
    world.now += 0.1
    assert world.side.match(asked, PLAIN, 0) == (256, True)


@pytest.mark.parametrize("change", ["gone", "other pages"])
def test_a_promise_that_cannot_be_kept_is_not_waited_for(change):
    promise = {"do_remote_prefill": True, "kvstore_pages": 4, "kvstore_page_tokens": 64}
    world = World()
    if change == "gone":
        world.store.connected = False
    else:
        promise["kvstore_page_tokens"] = 128

    assert world.side.match(request(kv_transfer_params=promise), PLAIN, 0) == (0, False)


def test_computing_is_preferred_where_it_is_faster():
    world = World()
    step = world.step(tokens=1000)
    world.now += 0.001  # a microsecond a token
    world.side.reported(Report(step=step.number))
    world.store.answer = Hit(4, load_seconds=0.1)

    assert world.side.match(request(), PLAIN, 0) == (0, False)
    world.step(ScheduledRequest("r", 300, [table()]))
    counts = world.side.counts.take()
    assert (counts["slower_tokens"], counts["choices_compute_faster"]) == (256, 1)
    assert world.reports == [pytest.approx(1e-6)]


def test_a_request_that_is_asked_about_again_is_counted_once():
    world = World()
    world.side.pace.seconds_per_token = 1e-6
    world.store.answer = Hit(4, load_seconds=1.0)
    asked = request()

    # As while the engine has no blocks for it.
    for _ in range(50):
        assert world.side.match(asked, PLAIN, 0) == (0, False)
    assert "slower_tokens" not in world.side.counts.take(), "it may still be loaded"
    for tokens in (200, 300):
        world.step(ScheduledRequest("r", tokens, [table()]))

    assert world.side.counts.take()["slower_tokens"] == 256


def test_a_load_may_take_what_computing_takes_within_its_bounds():
    world = World(load_timeout_ms=2000, load_timeout_ms_min=20)
    world.store.answer = Hit(4)
    assert world.load(request("unmeasured")).loads[0].wait_s == 2.0
    for seconds_per_token, wait_s in ((1e-3, 0.256), (1.0, 2.0), (1e-6, 0.02)):
        world.side.pace.seconds_per_token = seconds_per_token
        (load,) = world.load(request(str(seconds_per_token))).loads

        assert load.wait_s == pytest.approx(wait_s)


def test_what_is_always_loaded_may_take_longer_than_computing():
    world = World(load_timeout_ms=2000, load_timeout_ms_min=20, loads="always")
    world.side.pace.seconds_per_token = 1e-6
    world.store.answer = Hit(4, load_seconds=1.0)

    assert world.load(request()).loads[0].wait_s == 2.0


def test_what_could_not_be_loaded_is_computed_and_stored_again():
    world = World()
    world.store.answer = Hit(4)
    asked = request()
    (load,) = world.load(asked).loads
    world.ended(load.job, 1)

    assert world.side.match(asked, PLAIN, 64) == (0, False), "no second attempt"
    (store,) = world.step(ScheduledRequest("r", 300, [table()])).stores

    assert store.keys == load.keys[1:4]
    assert store.blocks[0].blocks == [3, 4, 5, 6, 7, 8]


def test_a_late_load_keeps_its_blocks_and_its_request_goes_on_without_it():
    world = World()
    world.store.answer = Hit(4)
    asked = request()
    (load,) = world.load(asked).loads
    world.side.reported(Report(late={load.job}))

    assert world.side.match(asked, PLAIN, 0) == (0, False)
    assert world.blocks.held == dict.fromkeys(table(8), 1)
    assert world.side.busy
    world.side.finished("r")
    world.ended(load.job, 4)
    assert not world.blocks.held


def test_tokens_of_a_load_that_came_too_late_were_computed_and_count_so():
    world = World()
    world.store.answer = Hit(4)
    (load,) = world.load(request()).loads
    world.side.reported(Report(late={load.job}))
    world.ended(load.job, 4)

    assert world.side.counts.take()["load_failed_tokens"] == 256


def test_every_rank_must_have_ended_and_the_worst_counts():
    world = World(ranks=2)
    world.store.answer = Hit(4)
    (load,) = world.load(request()).loads
    world.ended(load.job, 4)

    assert world.blocks.held
    world.ended(load.job, 2)
    assert not world.blocks.held
    assert world.side.counts.take()["load_failed_tokens"] == 128


@pytest.mark.parametrize(("pages", "failed"), [(0, 256 - BLOCK), (1, 192), (4, 0)])
def test_tokens_that_the_engine_had_did_not_fail(pages, failed):
    world = World()
    world.store.answer = Hit(4)
    (load,) = world.load(request(), computed=BLOCK).loads
    assert load.known == BLOCK
    world.ended(load.job, pages)

    counts = world.side.counts.take()
    assert counts["hit_tokens"] == 256 - BLOCK
    assert counts.get("load_failed_tokens", 0) == failed


def test_a_step_is_not_idle_while_a_rank_waits_for_the_others_with_a_load():
    """It would wait there for its next load, although the request may go on before that."""
    world = World(ranks=2)
    world.store.answer = Hit(4)
    (load,) = world.load(request()).loads
    assert world.step().idle
    world.ended(load.job, 4)

    assert not world.step().idle
    world.side.reported(Report(late={load.job}))
    assert world.step().idle, "its request has gone on"
    world.ended(load.job, 4)
    assert world.step().idle


def test_pages_are_stored_once_as_chunks_complete_them():
    world = World()
    asked = request()
    world.side.see(asked, PLAIN)

    stores = [
        world.step(ScheduledRequest("r", tokens, [table()])).stores
        for tokens in (40, 100, 130, 130, 300)
    ]

    assert [[len(store.keys) for store in step] for step in stores] == [[], [1], [1], [], [2]]
    assert stores[-1][0].keys.parent == stores[2][0].keys[0]
    assert stores[-1][0].blocks[0].blocks == [5, 6, 7, 8]
    assert world.blocks.held == dict.fromkeys(table(8), 1)


def test_output_is_stored_unless_that_is_switched_off():
    for stored, pages in ((True, 5), (False, 4)):
        world = World(store_output=stored)
        asked = request(tokens=range(330), prompt=300)
        world.side.see(asked, PLAIN)
        (store,) = world.step(ScheduledRequest("r", 330, [table(11)])).stores

        assert len(store.keys) == pages


def test_stores_hold_a_bounded_share_of_the_engines_blocks():
    world = World(blocks=32)
    for name in ("a", "b"):
        world.side.see(request(name), PLAIN)

    first = world.step(
        ScheduledRequest("a", 300, [table()]), ScheduledRequest("b", 300, [table(first=20)])
    )
    assert len(first.stores) == 1
    assert world.side.counts.take()["skipped_pages"] == 4
    world.ended(first.stores[0].job, 4)
    assert len(world.step(ScheduledRequest("b", 300, [table(first=20)])).stores) == 1, "tried again"


def test_a_prompt_that_is_larger_than_that_share_is_stored_in_parts():
    world = World(blocks=24)  # six blocks, three pages, may be held
    world.side.see(request(), PLAIN)
    parts = []
    while step := world.step(ScheduledRequest("r", 300, [table()])).stores:
        (store,) = step
        assert len(world.blocks.held) <= 6
        parts.append(store.blocks[0].blocks)
        world.ended(store.job, len(store.keys))

    assert parts == [table(6), table(2, 7)]
    assert world.side.counts.take()["skipped_pages"] == 1


def test_roles_say_what_is_done():
    producer = World(role=Role(loads=False, stores=True))
    consumer = World(role=Role(loads=True, stores=False))
    for world in (producer, consumer):
        world.store.answer = Hit(4)
        world.side.see(request(), PLAIN)

    assert producer.side.match(request(), PLAIN, 0) == (0, False)
    assert consumer.side.match(request(), PLAIN, 0) == (256, True)
    assert producer.step(ScheduledRequest("r", 300, [table()])).stores
    assert not consumer.step(ScheduledRequest("r", 300, [table()])).stores


def test_only_a_request_that_is_handed_on_says_what_was_stored():
    world = World()
    for name, wanted in (("a", None), ("b", {"do_remote_decode": True})):
        world.side.see(request(name, kv_transfer_params=wanted), PLAIN)
        world.step(ScheduledRequest(name, 300, [table()]))

    assert world.side.finished("a") is None
    assert world.side.finished("b") == {
        "do_remote_prefill": True,
        "kvstore_pages": 4,
        "kvstore_page_tokens": 64,
        "kvstore_node": "here",
        "prompt_tokens": 300,
    }


def test_requests_that_tokens_do_not_name_are_left_alone():
    world = World()
    world.store.answer = Hit(4)
    unusable = PromptScope(usable=False)
    world.side.see(request(), unusable)

    assert world.side.match(request(), unusable, 0) == (0, False)
    assert not world.step(ScheduledRequest("r", 300, [table()])).stores


def test_images_are_named_by_the_engines_own_hashes():
    world = World()
    hashes = [bytes([n]) * 32 for n in range(9)]
    world.side.match(request("a", block_hashes=hashes), PromptScope(foreign=True), 0)
    other = [*hashes[:3], b"x" * 32, *hashes[4:]]
    world.side.match(request("b", block_hashes=other), PromptScope(foreign=True), 0)
    first, second = world.store.asked

    assert len(first) == 4
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_a_sliding_window_needs_and_holds_only_its_last_pages():
    window = Group(index=1, layers=4, block_tokens=BLOCK, block_bytes=128, kv_heads=2,
                   window_tokens=100)  # fmt: skip
    full = Group(index=0, layers=4, block_tokens=BLOCK, block_bytes=128, kv_heads=2)
    world = World(groups=(full, window))
    world.store.answer = Hit(4)
    asked = request()
    tokens, _ = world.side.match(asked, PLAIN, 0)
    # The engine puts its null block where the window has passed.
    world.side.allocated(asked, [table(), [0, 0, 0, 0, *table(6, 50)]], tokens)
    (load,) = world.step().loads

    assert [(part.group, part.first, part.blocks) for part in load.blocks] == [
        (0, 0, table(8)),
        (1, 2, table(4, 50)),
    ]
    world.ended(load.job, 0)
    (store,) = world.step(ScheduledRequest("r", 300, [table(), [0, 0, 0, *table(7, 49)]])).stores
    assert [(part.group, part.first, part.blocks) for part in store.blocks] == [
        (0, 0, table(8)),
        (1, 2, table(4, 50)),
    ]


def test_waiting_for_a_job_is_offered_only_when_it_frees_blocks():
    world = World()
    world.side.see(request(), PLAIN)
    world.step(ScheduledRequest("r", 300, [table()]))

    assert not world.side.frees_soon()
    world.blocks.only_ours = {3}
    assert world.side.frees_soon()
    world.now += 1.0
    assert world.side.frees_soon(), "it begins when the step is done"
    world.side.reported(None)
    world.now += 1.0
    assert not world.side.frees_soon(), "a node that is slow holds up no request that runs"
