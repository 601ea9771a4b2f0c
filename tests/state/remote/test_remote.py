"""Goal: pages that only peers have become a hit here, each read once, and trouble is a miss."""

import pytest

from kvstore.node.describe import describe
from kvstore.protocol import wire
from kvstore.state.remote import pages
from kvstore.state.remote.jobs import FetchEnd, Holding
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.node import ORDINARY, Retention
from tests.state.remote.remote_world import MS, RemoteWorld, S, leased
from tests.state.world import FULL, PAGE, STATE, WINDOW, chain


@pytest.fixture
def world() -> RemoteWorld:
    return RemoteWorld(shards=[FULL])


@pytest.fixture
def engine(world: RemoteWorld) -> int:
    return world.engine()


def test_an_acquire_that_waits_brings_the_pages_and_leases_all(world, engine):
    world.store(engine, "ab")
    world.locate(engine, "abcdef", ("p", 6))

    assert world.acquire(engine, "abcdef") is None
    job = world.read(peer="p")
    assert job.keys == b"".join(chain("abcdef", 2))
    assert job.before == b"".join(chain("ab"))
    assert world.lookup(engine, "abcdef").pending == 4, "others wait for the same pages"
    world.end(job)

    assert leased(world.answer(engine)) == 6
    assert world.ready("abcdef") == "abcdef"
    assert world.table.counts["peer_fetched_pages"] == 4
    assert world.table.counts["stored_pages"] == 2
    world.release(engine)
    world.check_nothing_held()


def test_an_acquire_that_does_not_wait_fetches_nothing(world, engine):
    world.locate(engine, "ab", ("p", 2))
    assert leased(world.acquire(engine, "ab", wait_ms=0)) == 0
    assert not world.reads


def test_an_acquire_that_does_not_wait_tells_how_many_pages_a_wait_may_bring(world, engine):
    world.store(engine, "ab")
    world.locate(engine, "abcdef", ("p", 5))
    answer = world.acquire(engine, "abcdef", wait_ms=0)
    assert (leased(answer), answer.more, answer.remote) == (2, 3, 3)
    world.release(engine)
    answer = world.acquire(engine, "abcdef", start=3, wait_ms=0)
    assert (leased(answer), answer.more, answer.remote) == (0, 2, 2)
    assert not world.locates


def test_a_wait_may_bring_what_nobody_was_asked_for_yet(world, engine):
    """Nothing is known of a run whose first page is missing, unless the chain begins there."""
    unknown = world.acquire(engine, "abc", wait_ms=0)
    assert (leased(unknown), unknown.more) == (0, 0)
    first = world.acquire(engine, "abc", wait_ms=0, begins=True)
    assert (leased(first), first.more, first.remote) == (0, 3, 3)
    assert not world.locates

    assert world.acquire(engine, "abc", begins=True) is None
    world.tell(("p", 3))
    world.end(world.read(peer="p"))
    assert leased(world.answer(engine)) == 3
    world.release(engine)

    assert world.acquire(engine, "xyz", begins=True) is None
    world.tell()
    assert leased(world.answer(engine)) == 0
    nobody = world.acquire(engine, "xyz", wait_ms=0, begins=True)
    assert nobody.more == 0, "nobody has it"


def test_a_run_that_nobody_was_asked_for_is_fetched_behind_a_page_that_is_here(world, engine):
    unknown = world.acquire(engine, "abcdef", start=3, wait_ms=0, parent=True)
    assert (leased(unknown), unknown.more) == (0, 0), "the page before it is not here"
    world.store(engine, "abc")
    first = world.acquire(engine, "abcdef", start=3, wait_ms=0, parent=True)
    assert (leased(first), first.more, first.remote) == (0, 3, 3)

    assert world.acquire(engine, "abcdef", start=3, parent=True) is None
    world.tell(("p", 3))  # the page before them, and two
    world.end(world.read(peer="p"))
    assert leased(world.answer(engine)) == 2
    world.release(engine)
    assert world.lookup(engine, "abcde").pages == 5


def test_a_long_load_goes_on_with_the_answer_that_it_began_with(world, engine):
    world.locate(engine, "abcd", ("p", 4))
    world.go(2 * S)
    assert world.acquire(engine, "abcd", start=2, wait_ms=0).more == 2
    assert world.acquire(engine, "abcd", start=2) is None
    assert world.read(peer="p").keys == b"".join(chain("abcd"))
    assert not world.locates


def test_the_first_pages_of_a_run_are_kept_when_the_others_do_not_come(world, engine):
    world.store(engine, "ab")
    world.locate(engine, "abcdef", ("p", 6))
    assert world.acquire(engine, "abcdef") is None

    world.end(world.read(peer="p"), 3)

    assert leased(world.answer(engine)) == 5
    assert world.ready("abcdef") == "abcde"
    world.release(engine)
    world.check_nothing_held()


def test_an_acquire_long_after_the_lookup_asks_again(world, engine):
    world.store(engine, "a")
    world.locate(engine, "abc", ("p", 3))
    world.go(2 * S)

    assert world.acquire(engine, "abc") is None
    world.tell(("q", 3))
    world.end(world.read(peer="q"))
    assert leased(world.answer(engine)) == 3


def test_two_who_want_the_same_pages_share_one_fetch(world, engine):
    other = world.engine()
    world.locate(engine, "abcd", ("p", 4))

    assert world.acquire(engine, "abcd") is None
    assert world.acquire(other, "abc") is None
    world.end(world.read())

    assert (leased(world.answer(engine)), leased(world.answer(other))) == (4, 3)
    assert world.table.counts["peer_jobs"] == 1


def test_pages_that_a_peer_lacks_are_asked_of_another_holder_in_the_same_slots(world, engine):
    world.locate(engine, "abcd", ("p", 4), ("q", 4))
    assert world.acquire(engine, "abcd") is None
    first = world.read()

    world.end(first, 1)
    second = world.read()
    assert second.peer != first.peer
    assert second.keys == b"".join(chain("abcd", 1))
    assert second.slots == first.slots[1:]
    assert world.ready("abcd") == "a"
    world.end(second)

    assert leased(world.answer(engine)) == 4
    assert world.table.counts["peer_retried_pages"] == 3


def test_pages_that_lost_their_head_are_not_asked_of_another_holder(world, engine):
    """Others may have asked for them anew: then a page would be on its way here twice."""
    other = world.engine()
    world.store(engine, "a")
    world.locate(engine, "abc", ("p", 3), ("q", 3))
    assert world.acquire(engine, "abc") is None
    first = world.read()
    world.report(engine, "a")
    world.locate(other, "abc", ("q", 3))
    assert world.acquire(other, "abc") is None

    world.end(first, 0)

    again = world.read()
    assert (again.peer, again.keys) == ("q", b"".join(chain("abc")))
    assert world.table.counts["peer_retried_pages"] == 0
    world.end(again)
    assert (leased(world.answer(engine)), leased(world.answer(other))) == (3, 3)


def test_pages_of_peers_stay_as_long_as_they_stay_there(world, engine):
    world.locate(engine, "abcd", ("p", 4))
    assert world.acquire(engine, "abcd") is None
    short = Retention(world.now_ns + 100 * MS, read_once=False, memory_only=True)
    once = Retention(read_once=True, memory_only=True)

    world.end(world.read(), kept=[ORDINARY, short, once, once])

    answer = world.answer(engine)
    assert (leased(answer), answer.lasting) == (4, 1)
    world.release(engine)
    assert world.ready("abcd") == "ab", "they were read"
    world.go(100 * MS)
    assert world.ready("abcd") == "a"
    world.check_nothing_held()


def test_the_first_of_the_pages_that_came_keep_what_is_said_of_them(world, engine):
    world.locate(engine, "abcd", ("p", 4), ("q", 4))
    assert world.acquire(engine, "abcd") is None
    short = Retention(world.now_ns + 100 * MS, memory_only=True)

    world.end(world.read(), 3, kept=[ORDINARY, short, ORDINARY])
    world.end(world.read())

    assert leased(world.answer(engine)) == 4
    expires = [world.space.node_of(key).expires for key in chain("abcd")]
    assert expires == [{}, {0: short.expires_ns}, {}, {}]


def test_as_long_a_prefix_as_came_is_leased_when_no_holder_is_left(world, engine):
    world.locate(engine, "abcd", ("p", 4))
    assert world.acquire(engine, "abcd") is None
    world.end(world.read(), 2)
    assert leased(world.answer(engine)) == 2
    assert not world.reads


def test_a_job_that_is_not_settled_gives_no_page_and_its_slots_are_not_used(world, engine):
    world.locate(engine, "abcd", ("p", 4))
    assert world.acquire(engine, "abcd") is None
    job = world.read()
    world.end(job, 2, settled=False)

    assert leased(world.answer(engine)) == 0
    host = world.table.slots.stats()
    assert (host.limbo_bytes, host.ready_bytes) == (4 * PAGE, 0)
    assert describe(world.node).remote.in_flight_bytes == 4 * PAGE, "it counts until then"
    world.settle(job)
    world.release(engine)
    world.check_nothing_held()


@pytest.mark.parametrize("end", ["late", "unsettled"])
def test_a_job_that_is_given_up_during_a_check_is_no_mistake(world, engine, end):
    world.locate(engine, "abcd", ("p", 4))
    assert world.acquire(engine, "abcd", wait_ms=100) is None
    world.go(150 * MS)
    assert leased(world.answer(engine)) == 0, "nobody waits for the job"
    walk = world.remote.checks()
    for _ in range(len(list(world.remote.checks())) - 1):
        next(walk)

    if end == "late":
        world.go(60 * S)
    else:
        world.end(world.read(), 2, settled=False)

    assert world.table.counts["peer_late_jobs"] == (end == "late")
    assert len(list(walk)) <= 1, "it was the last stretch, or the one before it"


def test_what_an_unsettled_job_did_not_give_comes_from_another_holder_to_other_slots(world, engine):
    world.locate(engine, "abcd", ("p", 4), ("q", 4))
    assert world.acquire(engine, "abcd") is None
    first = world.read()
    world.end(first, 2, settled=False)
    second = world.read()
    assert second.peer != first.peer
    assert not set(first.slots) & set(second.slots)
    world.end(second)
    assert leased(world.answer(engine)) == 4
    world.settle(first)


def test_a_fetch_ends_after_two_seconds_whatever_the_request_would_wait(world, engine):
    world.locate(engine, "abcd", ("p", 4), ("q", 4))
    assert world.acquire(engine, "abcd", wait_ms=30_000) is None
    first = world.read()
    world.go(S)
    world.end(first, 1)
    second = world.read()
    assert second.deadline_ns == first.deadline_ns
    world.go(S - 1 * MS)
    assert world.answer(engine) is None
    world.late[second.job] = world.reads.pop(second.job)
    world.go(1 * MS)

    assert leased(world.answer(engine)) == 1
    assert world.table.counts["peer_late_jobs"] == 1
    world.desk.peer_fetched(FetchEnd(second.job, b"x" * 48, None, settled=False))
    assert world.table.slots.stats().limbo_bytes == 3 * PAGE
    world.settle(second)
    assert world.ready("abcd") == "a"


def test_a_request_is_answered_at_its_own_deadline_and_the_job_goes_on(world, engine):
    world.locate(engine, "ab", ("p", 2))
    assert world.acquire(engine, "ab", wait_ms=20) is None
    world.go(20 * MS)
    assert leased(world.answer(engine)) == 0
    world.end(world.read())
    assert world.ready("ab") == "ab"


def test_bytes_in_flight_stay_within_the_limit_and_the_rest_follows():
    world = RemoteWorld(in_flight_pages=3, shards=[FULL])
    engine, other = world.engine(), world.engine()
    world.locate(engine, "abcdefgh", ("p", 8))
    world.locate(other, "xyz", ("p", 3))

    assert world.acquire(engine, "abcdefgh") is None
    assert world.acquire(other, "xyz") is None
    assert len(world.read().slots) == 3
    world.end_all()

    assert (leased(world.answer(engine)), leased(world.answer(other))) == (8, 3)
    assert world.table.counts["peer_jobs"] >= 4


def test_a_run_is_split_among_peers_as_fast_as_they_were(world, engine, monkeypatch):
    monkeypatch.setattr(pages, "PART_BYTES_MIN", PAGE)
    for path, peer, took_ns in (("x", "fast", 1 * MS), ("y", "slow", 3 * MS)):
        world.locate(engine, path, (peer, 1))
        world.acquire(engine, path)
        world.now_ns += took_ns
        world.end_all()
        world.answer(engine)
    world.locate(engine, "abcdefgh", ("slow", 8), ("fast", 8))

    assert world.acquire(engine, "abcdefgh") is None
    assert world.read(peer="fast").keys == b"".join(chain("abcdef"))
    assert world.read(peer="slow").keys == b"".join(chain("abcdefgh", 6))
    world.end(world.read(peer="slow"))
    assert world.answer(engine) is None
    world.end_all()
    assert leased(world.answer(engine)) == 8


def test_the_time_of_a_fetch_is_estimated_from_what_was_measured(world, engine):
    cautious = world.locate(engine, "ab", ("p", 2)).remote_s
    world.acquire(engine, "ab")
    world.now_ns += 1 * S
    world.end_all()

    slower = world.locate(engine, "cd", ("p", 2)).remote_s
    assert cautious == pytest.approx(pages.START_S + 2 * PAGE / 100e6)
    assert slower == pytest.approx(pages.START_S + 1)


def test_a_peer_that_gave_nothing_is_not_asked_for_a_second(world, engine):
    world.locate(engine, "ab", ("p", 2))
    world.acquire(engine, "ab")
    world.end(world.read(), 0)

    assert world.locate(engine, "cd", ("p", 2)).remote == 0
    world.go(2 * S)
    assert world.locate(engine, "cd", ("p", 2)).remote == 2


def test_a_client_that_writes_the_same_page_meanwhile_is_told_that_it_is_coming(world, engine):
    world.locate(engine, "abc", ("p", 3))
    assert world.acquire(engine, "abc") is None
    assert set(world.begin(engine, "abcd")) == {PageStatus.PENDING, PageStatus.GRANTED}
    world.end(world.read(), 1)

    assert leased(world.answer(engine)) == 1
    assert world.commit(engine, "abcd", bytes([2, 2, 2, 0])) == bytes([PageStatus.DROPPED])


def test_pages_that_a_client_writes_are_not_fetched(world, engine):
    world.locate(engine, "abcd", ("p", 4))
    statuses = world.begin(engine, "ab")
    assert set(statuses) == {PageStatus.GRANTED}
    assert leased(world.acquire(engine, "abcd")) == 0
    assert not world.reads


def test_a_full_memory_gives_as_many_pages_as_fit():
    world = RemoteWorld(extents=1, shards=[FULL])
    engine = world.engine()
    world.store(engine, "uvwxyz")
    assert leased(world.acquire(engine, "uvwxyz")) == 6
    world.locate(engine, "abcd", ("p", 4))
    assert world.acquire(engine, "abcd") is None
    assert len(world.read().slots) == 2
    world.end_all()
    assert leased(world.answer(engine)) == 2


def test_a_fetch_beyond_the_quota_of_who_wants_it_is_refused_and_nothing_begins():
    world = RemoteWorld(quota_pages=3, shards=[FULL])
    engine = world.engine()
    world.locate(engine, "abcd", ("p", 4))
    refused = world.acquire(engine, "abcd")
    assert isinstance(refused, wire.Failure)
    assert refused.code == "capacity"
    assert not world.reads
    world.check_nothing_held()


def test_an_engine_that_leaves_stops_waiting_and_the_pages_come_nevertheless(world, engine):
    world.locate(engine, "ab", ("p", 2))
    assert world.acquire(engine, "ab") is None
    world.desk.disconnect(engine, ended=False)
    other = world.engine()
    world.end(world.read())
    world.check_nothing_held()
    assert world.ready("ab") == "ab"
    assert leased(world.acquire(other, "ab")) == 2


def test_of_a_group_with_a_window_only_the_pages_that_the_hit_needs_are_fetched():
    world = RemoteWorld(shards=[FULL, WINDOW, STATE])
    engine = world.engine()
    found = world.locate(engine, "abcdef", ("p", 5))
    assert found.remote == 5

    for shard, start in ((0, 0), (1, 3), (2, 4)):
        assert world.acquire(engine, "abcde", start, shard=shard) is None
    wanted = {job.shard: len(job.slots) for job in world.reads.values()}
    assert wanted == {FULL: 5, WINDOW: 2, STATE: 1}
    world.end_all()
    assert world.lookup(engine, "abcde", shards=(0, 1, 2)).pages == 5


def test_a_page_before_the_window_of_what_a_peer_has_is_not_asked_of_it():
    world = RemoteWorld(shards=[FULL, WINDOW])
    engine = world.engine()
    world.locate(engine, "abcdef", ("p", 6))
    assert leased(world.acquire(engine, "abcdef", 2, shard=1)) == 0
    assert not world.reads


def test_what_comes_before_the_asked_pages_is_fetched_too(world, engine):
    """An engine that has the head itself asks for the rest, which needs the head here."""
    world.locate(engine, "abcd", ("p", 4))
    assert world.acquire(engine, "abcd", 2) is None
    assert len(world.read().slots) == 4
    world.end_all()
    assert leased(world.answer(engine)) == 2


def test_a_late_answer_after_all_is_over_changes_nothing(world, engine):
    world.locate(engine, "ab", ("p", 2))
    world.acquire(engine, "ab")
    job = world.read()
    world.end(job)
    world.desk.peer_fetched(FetchEnd(job.job, b"", None, settled=True))
    world.desk.peer_settled(job.job)
    world.desk.located(999, [Holding("p", 2)])
    assert leased(world.answer(engine)) == 2


def test_a_peer_side_that_refuses_at_once_is_asked_for_each_holder(world, engine, monkeypatch):
    world.locate(engine, "ab", ("p", 2), ("q", 2))
    take = world.flush

    def refuse() -> None:
        take()
        for job in list(world.reads.values()):
            world.end(job, 0)

    monkeypatch.setattr(world, "flush", refuse)
    assert leased(world.acquire(engine, "ab")) == 0
    assert world.table.counts["peer_jobs"] == 2
    world.release(engine)
    world.check_nothing_held()
