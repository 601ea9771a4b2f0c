"""Goal: the pages of a conversation are kept after each of its requests, if the user wants that."""

import pytest

from kvstore.client.results import Hit
from kvstore.engine.conversations import NAME_CHARS_MAX
from kvstore.engine.messages import Report
from kvstore.engine.requests import ScheduledRequest
from kvstore.engine.states import RequestState
from kvstore.protocol import wire
from tests.engine.engine import PLAIN, World
from tests.engine.test_scheduler import request, table


def test_a_conversation_is_kept_once_the_stores_of_its_request_have_ended():
    world = World(retain={"seconds": 600, "bytes": 1 << 30})
    world.side.see(request(session_id="chat"), PLAIN)
    (store,) = world.step(ScheduledRequest("r", 300, [table()])).stores

    world.side.finished("r")
    world.side.reported(Report())
    assert world.store.kept == []
    world.ended(store.job, 4)

    assert world.store.kept == [("chat", 4, 600.0, 1 << 30)]
    world.side.reported(Report())
    assert len(world.store.kept) == 1


def test_a_conversation_whose_pages_were_all_found_is_kept_for_longer():
    world = World(retain={"seconds": 600})
    world.store.answer = Hit(4)
    asked = request(session_id="c" * 300)
    world.load(asked)
    world.side.finished("r")
    world.ended(1, 4)

    ((name, pages, _, _),) = world.store.kept
    assert (len(name), pages) == (64, 4), "a name that is too long is hashed"


def test_a_name_that_is_no_utf_8_is_hashed_too():
    world = World(retain={"seconds": 600})
    world.store.answer = Hit(4)
    for job, name in enumerate(["\ud800", "\ud800" * 300], start=1):
        world.load(request(session_id=name))
        world.side.finished("r")
        world.ended(job, 4)

    assert len({name for name, *_ in world.store.kept if len(name) == 64}) == 2


@pytest.mark.parametrize(
    ("options", "more"), [({}, {"session_id": "chat"}), ({"retain": {"seconds": 600}}, {})]
)
def test_nothing_is_kept_without_a_time_and_a_conversation(options, more):
    world = World(**options)
    world.side.see(request(**more), PLAIN)
    (store,) = world.step(ScheduledRequest("r", 300, [table()])).stores

    world.side.finished("r")
    world.ended(store.job, 4)

    assert world.store.kept == []


def test_the_longest_name_that_is_not_hashed_is_one_that_a_node_takes():
    assert NAME_CHARS_MAX == wire.CONVERSATION_CHARS_MAX


def test_without_a_time_no_token_is_hashed_for_a_conversation(monkeypatch):
    world = World()
    world.side.see(request(session_id="chat"), PLAIN)
    monkeypatch.setattr(RequestState, "keys", lambda _: pytest.fail("it hashes"))

    world.side.finished("r")
