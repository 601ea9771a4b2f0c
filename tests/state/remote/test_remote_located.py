"""Goal: what peers have is asked once, remembered for a moment, and never waited for long."""

import pytest

from kvstore.protocol import wire
from kvstore.state.remote import located
from kvstore.state.remote.jobs import FetchEnd, Holding
from tests.state.remote.remote_world import LEASE_MS, RemoteWorld, leased
from tests.state.world import FULL, FULL_2, chain, identity


@pytest.fixture
def world() -> RemoteWorld:
    return RemoteWorld(shards=[FULL])


@pytest.fixture
def engine(world: RemoteWorld) -> int:
    return world.engine()


def test_a_lookup_of_missing_pages_is_pending_at_once_until_the_directory_answers(world, engine):
    world.store(engine, "ab")

    found = world.lookup(engine, "abcdef")
    assert (found.pages, found.pending, found.remote) == (2, 4, 0)
    [question] = world.locates.values()
    assert question.keys == b"".join(chain("abcdef"))
    assert world.lookup(engine, "abcdef").pending == 4
    assert len(world.locates) == 1, "it is asked once"
    world.tell(("p", 5), ("q", 3))

    found = world.lookup(engine, "abcdef")
    assert (found.pages, found.pending, found.remote) == (2, 0, 3)
    assert 0 < found.remote_s < 1


def test_a_lookup_that_waits_is_answered_when_the_directory_answers(world, engine):
    assert world.lookup(engine, "abc", wait_ms=1000) is None
    world.tell(("p", 3))
    assert world.answer(engine).remote == 3


def test_nobody_has_the_pages_when_the_directory_does_not_answer_in_time(world, engine):
    assert world.lookup(engine, "abc", wait_ms=1000) is None
    world.go(located.LOCATE_NS)
    found = world.answer(engine)
    assert (found.pages, found.pending, found.remote) == (0, 0, 0)
    assert world.table.counts["locates_timed_out"] == 1

    number = next(iter(world.locates))
    world.desk.located(number, [Holding("p", 3)])
    assert world.lookup(engine, "abc").remote == 3, "late, but known now"


def test_a_hit_of_all_pages_asks_no_directory(world, engine):
    world.store(engine, "abc")
    assert world.lookup(engine, "abc").pages == 3
    assert not world.locates


def test_an_answer_serves_what_it_tells_of_and_for_a_second(world, engine):
    world.locate(engine, "abcd", ("p", 2))
    assert world.lookup(engine, "abxy").remote == 2, "nobody has what they do not share"
    assert world.lookup(engine, "ab").remote == 2
    assert not world.locates

    world.go(located.FRESH_NS + 1)
    assert world.lookup(engine, "ab").pending == 2


def test_an_answer_about_another_prompt_is_not_taken_for_more_than_the_common_part(world, engine):
    world.locate(engine, "abcd", ("p", 4))
    found = world.lookup(engine, "abxy")
    assert (found.pages, found.pending, found.remote) == (0, 4, 0)
    assert len(world.locates) == 1


def test_questions_beyond_the_limit_are_not_asked(world, engine, monkeypatch):
    monkeypatch.setattr(located, "ASKING_MAX", 2)
    for path in ("a", "b"):
        assert world.lookup(engine, path).pending == 1
    found = world.lookup(engine, "c")
    assert (found.pending, found.remote) == (0, 0)
    assert world.table.counts["locates_refused"] == 1


def test_answers_beyond_the_limits_go_the_oldest_first(world, engine, monkeypatch):
    monkeypatch.setattr(located, "CHAINS_MAX", 2)
    for path in ("a", "b", "c"):
        world.locate(engine, path, ("p", 1))
    assert len(world.remote.chains) == 2
    assert world.lookup(engine, "c").remote == 1
    assert world.lookup(engine, "a").pending == 1
    monkeypatch.setattr(located, "CHAINS_MAX", 256)
    monkeypatch.setattr(located, "KEYS_MAX", 8)
    world.locate(engine, "defghij", ("p", 1))
    assert len(world.remote.chains) == 2, "the question that has no answer, and the new one"


def test_an_engine_that_names_a_holder_gets_its_pages_without_a_question(world, engine):
    world.store(engine, "a")
    found = world.lookup(engine, "abcdef", holder="p", held=4)
    assert (found.pages, found.pending, found.remote) == (1, 0, 3)
    assert not world.locates
    assert world.table.counts["located_by_engines"] == 1
    assert world.lookup(engine, "abcdef", holder="p", held=4).remote == 3
    assert world.table.counts["located_by_engines"] == 1, "it is known already"

    assert world.acquire(engine, "abcd") is None
    assert world.read(peer="p").keys == b"".join(chain("abcd", 1))


def test_an_engine_that_names_a_holder_is_believed_though_nobody_had_the_pages(world, engine):
    assert world.locate(engine, "abcd").remote == 0
    assert world.lookup(engine, "abcd").remote == 0
    assert world.lookup(engine, "abcd", holder="p", held=4).remote == 4
    assert world.lookup(engine, "wxyz").pending == 4
    assert world.lookup(engine, "wxyz", holder="p", held=4).remote == 4, "while it is asked"
    world.tell(("q", 2))


def test_a_holder_that_has_no_more_than_this_node_is_of_no_interest(world, engine):
    world.store(engine, "ab")
    assert world.lookup(engine, "abcd", holder="p", held=2).pending == 2
    assert len(world.locates) == 1


def test_a_holder_that_gave_nothing_is_not_believed_for_a_second(world, engine):
    assert world.lookup(engine, "ab", holder="p", held=2).remote == 2
    assert world.acquire(engine, "ab") is None
    world.end(world.read(), 0)
    assert leased(world.answer(engine)) == 0
    assert world.lookup(engine, "ab", holder="p", held=2).remote == 0
    assert not world.reads


def has_none(world, job):
    """The peer answers that it has none of the pages."""
    del world.reads[job.job]
    world.desk.peer_fetched(FetchEnd(job.job, b"", None, settled=True))
    world.check()


def test_a_wrong_name_of_a_holder_costs_no_other_request_anything(world, engine):
    assert world.lookup(engine, "ab", holder="p", held=2).remote == 2
    assert world.acquire(engine, "ab") is None
    has_none(world, world.read())

    assert world.locate(engine, "cd", ("p", 2)).remote == 2, "it has said nothing of these"


def test_a_holder_that_has_none_is_not_believed_for_a_second_and_others_are_asked_for(
    world, engine
):
    assert world.lookup(engine, "ab", holder="p", held=2).remote == 2
    assert world.acquire(engine, "ab") is None
    has_none(world, world.read())

    assert world.lookup(engine, "ab", holder="p", held=2).pending == 2
    world.tell(("p", 2), ("q", 2))
    assert world.lookup(engine, "ab", holder="p", held=2).remote == 2
    assert world.acquire(engine, "ab") is None
    assert world.read().peer == "q"


@pytest.mark.parametrize(("holder", "held"), [("p" * 65, 1), ("p", -1)])
def test_no_name_of_a_holder_is_refused(world, engine, holder, held):
    answer = world.lookup(engine, "ab", holder=holder, held=held)
    assert isinstance(answer, wire.Failure)
    assert (answer.code, answer.field) == ("invalid_argument", "holder")
    assert not len(world.remote.chains)


def tell_all(world: RemoteWorld, pages: int) -> int:
    """Answer questions, those that an answer leads to as well; how many rounds it took."""
    for rounds in range(5):
        if not world.locates:
            return rounds
        for number in list(world.locates):
            del world.locates[number]
            world.desk.located(number, [Holding("p", pages)])
    return 5


def test_two_lookups_that_begin_alike_do_not_replace_the_questions_of_each_other(world, engine):
    other = world.engine()
    assert world.lookup(engine, "abcd", wait_ms=60_000) is None
    assert world.lookup(other, "abxy", wait_ms=60_000) is None
    assert tell_all(world, 4) == 1
    assert world.answer(engine).remote == world.answer(other).remote == 4


def test_two_shards_of_a_prompt_are_asked_for_once_each():
    world = RemoteWorld()
    engines = [world.engine(), world.engine()]
    for shard, engine in enumerate(engines):
        assert world.lookup(engine, "abc", wait_ms=60_000, shards=(shard,)) is None
    assert tell_all(world, 3) == 1
    assert [world.answer(engine).remote for engine in engines] == [3, 3]


def test_two_ranks_that_get_their_shards_of_a_prompt_ask_once_each():
    world = RemoteWorld(shards=[FULL, FULL_2])
    ranks = [world.engine(), world.engine()]
    for shard, rank in enumerate(ranks):
        keys = b"".join(chain("abc"))
        asked = wire.Acquire(8, 1, 0, shard, keys, LEASE_MS, 10_000, begins=True)
        assert world.ask(rank, asked) is None
    assert tell_all(world, 3) == 1
    world.end_all()
    assert [leased(world.answer(rank)) for rank in ranks] == [3, 3]


def test_what_lies_behind_the_longest_question_is_with_nobody(world, engine, monkeypatch):
    monkeypatch.setattr(located, "LOCATE_KEYS_MAX", 4)
    world.store(engine, "abcdef")
    found = world.lookup(engine, "abcdefgh", wait_ms=60_000)
    assert (found.pages, found.pending, found.remote) == (6, 0, 0)
    assert not world.locates
    found = world.lookup(engine, "abcdefgh", holder="p", held=8)
    assert (found.pages, found.pending, found.remote) == (6, 0, 0)


def test_a_question_whose_keys_a_later_one_had_can_be_forgotten(world, engine, monkeypatch):
    opened = world.ask(engine, wire.OpenSpace(2, identity(model="other"), [FULL]))
    assert world.lookup(engine, "abcd").pending == 4
    assert world.lookup(engine, "axyz").pending == 4
    first, second = world.locates
    world.desk.located(second, [])
    monkeypatch.setattr(located, "CHAINS_MAX", 2)
    world.ask(engine, wire.Lookup(7, opened.space, [0], b"".join(chain("a"))))
    world.check()

    world.desk.located(first, [])
    world.check()
    world.go(located.LOCATE_NS + located.KEPT_NS)
    assert not len(world.remote.chains)
