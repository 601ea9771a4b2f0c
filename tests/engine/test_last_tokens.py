"""Goal: all tokens of a prompt are loaded, and no store reads what is then written once more."""

from kvstore.client.results import Hit
from kvstore.engine.identity import Group
from kvstore.engine.requests import ScheduledRequest
from tests.engine.engine import PLAIN, World
from tests.engine.test_scheduler import request, table


def test_all_tokens_are_loaded_where_the_engine_then_computes_the_last_one_again():
    world = World(takes_whole=True)
    world.store.answer = Hit(9)

    assert world.side.match(request(tokens=range(63)), PLAIN, 0) == (0, False)
    assert world.side.match(request("s", range(64)), PLAIN, 0) == (64, True)
    assert world.side.match(request("t", range(128)), PLAIN, 96) == (32, True)
    assert world.side.match(request("u", range(129)), PLAIN, 96) == (32, True)


def test_layers_that_are_waited_for_in_the_step_leave_a_token_to_compute():
    world = World(takes_whole=True, load="layerwise")
    world.store.answer = Hit(9)

    assert world.side.match(request(tokens=range(128)), PLAIN, 0) == (64, False)


def test_a_request_of_one_token_is_computed():
    """With no computed token the engine would ask for its blocks a second time."""
    group = Group(index=0, layers=4, block_tokens=1, block_bytes=128, kv_heads=2)
    world = World(groups=[group], takes_whole=True, page_tokens=1)
    world.store.answer = Hit(9)

    assert world.side.match(request(tokens=range(1)), PLAIN, 0) == (0, False)
    assert world.side.match(request("s", range(2)), PLAIN, 0) == (2, True)


def test_a_page_is_not_stored_from_a_block_that_another_request_will_write_to():
    world = World(takes_whole=True)
    world.store.answer = Hit(2)
    (load,) = world.load(request(tokens=range(128))).loads
    world.ended(load.job, 2)
    world.store.answer = Hit(0)
    # The engine shares the blocks now, and computes another request first.
    world.side.match(request("s", range(192)), PLAIN, 128)
    other = ScheduledRequest("s", 192, [table(6)])

    assert not world.step(other, tokens=64).stores
    # Whoever comes first in the step: stores begin after it.
    computed = world.step(other, ScheduledRequest("r", 128, [table(4)]), tokens=65).stores
    assert [store.blocks[0].blocks for store in computed] == [table(6)]


def test_what_a_request_that_has_ended_would_have_written_is_stored():
    world = World(takes_whole=True)
    world.store.answer = Hit(2)
    (load,) = world.load(request(tokens=range(128))).loads
    world.ended(load.job, 2)
    world.side.finished("r")
    world.store.answer = Hit(0)
    world.side.match(request("s", range(192)), PLAIN, 128)

    assert len(world.step(ScheduledRequest("s", 192, [table(6)]), tokens=64).stores) == 1


def test_blocks_of_a_whole_load_that_failed_are_stored_for_whoever_has_them_next():
    world = World(takes_whole=True)
    world.store.answer = Hit(2)
    (load,) = world.load(request(tokens=range(128))).loads
    world.ended(load.job, 0)
    world.store.answer = Hit(0)
    world.side.match(request("s", range(500, 628)), PLAIN, 0)

    assert len(world.step(ScheduledRequest("s", 128, [table(4)]), tokens=128).stores) == 1


def test_the_last_page_of_a_whole_load_that_fails_is_computed_and_stored_again():
    world = World(takes_whole=True)
    world.store.answer = Hit(2)
    asked = request(tokens=range(128))
    (load,) = world.load(asked).loads
    world.ended(load.job, 1)

    (store,) = world.step(ScheduledRequest("r", 128, [table(4)]), tokens=64).stores
    assert (store.page, store.blocks[0].blocks) == (1, [3, 4])
    assert world.side.match(asked, PLAIN, 0) == (0, False), "nothing is loaded for it again"
