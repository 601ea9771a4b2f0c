"""Goal: pages that only peers have become a hit here, each read once, and trouble is a miss."""

import pytest

from kvstore import wire
from kvstore.page import KEY_BYTES
from kvstore.state.choice.admission import Admission
from kvstore.state.disk.jobs import DiskRead, DiskRules, SyncPolicy, WritePolicy
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.pages import DiskPages
from kvstore.state.remote import located, pages
from kvstore.state.remote.jobs import FetchEnd, Holding, PeerFetch
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.sessions import Peer
from tests.node.remote_world import MS, RemoteWorld, S
from tests.state.world import FULL, PAGE, STATE, WINDOW, chain

OTHER_NODE = Peer(1 << 40, watched=False, remote=True)


@pytest.fixture
def world() -> RemoteWorld:
    return RemoteWorld(shards=[FULL])


@pytest.fixture
def engine(world: RemoteWorld) -> int:
    return world.engine()


def leased(answer: wire.Answer | None) -> int:
    """How many pages were leased."""
    assert isinstance(answer, wire.Acquired)
    return len(answer.digests) // 16


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
    assert world.node.stats()["remote"]["in_flight_bytes"] == 4 * PAGE, "it counts until then"
    world.settle(job)
    world.release(engine)
    world.check_nothing_held()


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


def test_replicas_leave_memory_before_pages_of_equal_worth():
    world = RemoteWorld(extents=1, shards=[FULL])
    engine = world.engine()
    world.store(engine, "m")
    world.locate(engine, "r", ("p", 1))
    world.acquire(engine, "r")
    world.end_all()
    world.release(engine)
    world.store(engine, "n")
    for path in ("1", "2", "3", "4", "5"):
        world.store(engine, path)

    world.store(engine, "6")
    assert [world.ready(path) for path in ("m", "r", "n")] == ["m", "", "n"]
    world.store(engine, "7")
    assert world.ready("m") == "", "then the policy's own order"


def test_a_page_that_a_client_put_too_is_no_replica():
    world = RemoteWorld(shards=[FULL, WINDOW])
    engine = world.engine()
    world.locate(engine, "a", ("p", 1))
    for shard in (0, 1):
        world.acquire(engine, "a", shard=shard)
        world.end_all()
        world.answer(engine)
    node = world.space.index[chain("a")[0]]
    assert node.replica
    world.store(engine, "b")
    world.locate(engine, "b", ("p", 1))
    world.acquire(engine, "b", shard=1)
    world.end_all()
    assert not world.space.index[chain("b")[0]].replica


def test_a_fetch_does_not_wait_for_a_job_that_may_end_after_its_time(world, engine):
    other = world.engine()
    world.locate(engine, "abcd", ("p", 2))
    assert world.acquire(engine, "abcd") is None
    world.go(S + 1 * MS)
    world.locate(other, "abcd", ("p", 2), ("q", 4))
    assert world.acquire(other, "abcd") is None
    world.end(world.read(peer="p"))

    assert leased(world.answer(engine)) == 2
    assert world.answer(other) is None
    world.end(world.read(peer="q"))
    assert leased(world.answer(other)) == 4


def in_two_parts(world: RemoteWorld, engine: int) -> tuple[PeerFetch, PeerFetch]:
    """An engine waits for four pages of two peers, each of which gives two."""
    world.locate(engine, "abcd", ("p", 4), ("q", 4))
    assert world.acquire(engine, "abcd") is None
    head, tail = sorted(world.reads.values(), key=lambda job: len(job.before))
    assert (len(head.slots), len(tail.slots)) == (2, 2)
    return head, tail


def test_pages_that_came_stay_in_memory_for_who_waits_for_others(monkeypatch):
    monkeypatch.setattr(pages, "PART_BYTES_MIN", PAGE)
    world = RemoteWorld(extents=1, shards=[FULL])
    engine = world.engine()
    head, tail = in_two_parts(world, engine)
    world.end(tail)
    for path in "123456789":
        world.store(world.engine(), path)
    world.end(head)
    assert leased(world.answer(engine)) == 4


def test_pages_fetched_again_are_shared_although_an_older_job_ends(world, engine, monkeypatch):
    monkeypatch.setattr(pages, "PART_BYTES_MIN", PAGE)
    head, tail = in_two_parts(world, engine)
    world.end(head, 0, settled=False)
    second, third = world.engine(), world.engine()
    assert world.ready("abcd") == ""
    assert world.acquire(second, "abcd") is None
    [again] = [job for job in world.reads.values() if job is not tail]
    world.end(tail)
    assert world.acquire(third, "abcd") is None
    assert list(world.reads.values()) == [again]
    world.end(again)
    for one in (engine, second, third):
        assert leased(world.answer(one)) == 4


@pytest.mark.parametrize("first", ["disk", "peer"])
def test_a_run_that_is_partly_on_disk_and_partly_at_a_peer_waits_for_both(world, engine, first):
    rules = DiskRules(WritePolicy.BACK, SyncPolicy.ALWAYS, 1, 1 << 30)
    log = SegmentLog(4, 1 << 20)
    disk = world.table.disk = DiskPages(world.table, log, Admission("all", 0, 4 << 20), rules)
    world.store(engine, "ab")
    world.ask(engine, wire.Persist(3, 0, 0, b"".join(chain("ab")), 1000))
    while disk.jobs:
        world.node.disk_completed(disk.jobs.pop(0).job, None, world.now_ns)
    world.desk.flush()
    assert isinstance(world.answer(engine), wire.Persisted)
    for path in ("ab", "a"):
        assert world.table.release_memory(world.space.nodes[chain(path)[-1]])
    world.locate(engine, "abcd", ("p", 4))

    assert world.acquire(engine, "abcd") is None
    loads, disk.jobs[:] = list(disk.jobs), []
    assert [type(job) for job in loads] == [DiskRead, DiskRead]
    for source in (first, {"disk": "peer", "peer": "disk"}[first]):
        assert world.answer(engine) is None
        if source == "peer":
            world.end(world.read())
        for job in loads if source == "disk" else ():
            world.node.disk_completed(job.job, None, world.now_ns)
        world.desk.flush()

    assert leased(world.answer(engine)) == 4
    world.release(engine)
    world.check_nothing_held()


# ---- other nodes that read here --------------------------------------------------------------


def test_another_node_only_reads(world, engine):
    peer = world.engine(OTHER_NODE)
    world.store(engine, "ab")
    assert leased(world.acquire(peer, "ab")) == 2
    refused = world.ask(peer, wire.BeginPut(3, 1, 0, 0, chain("x")[0], b""))
    assert isinstance(refused, wire.Failure)
    assert refused.code == "protocol"
    persist = world.ask(peer, wire.Persist(3, 0, 0, chain("a")[0], 10))
    assert isinstance(persist, wire.Failure)


def test_another_node_is_told_of_no_third_one(world):
    peer = world.engine(OTHER_NODE)
    found = world.lookup(peer, "ab")
    assert (found.pending, found.remote) == (0, 0)
    assert leased(world.acquire(peer, "ab")) == 0
    assert not world.locates


def test_the_leases_of_another_node_end_with_its_connection(world, engine):
    peer = world.engine(OTHER_NODE)
    world.store(engine, "ab")
    assert leased(world.acquire(peer, "ab")) == 2
    world.desk.disconnect(peer, ended=False)
    world.check_nothing_held()
    assert world.node.stats()["sessions_total"] == 1


def test_the_leases_of_another_node_are_released_at_their_deadline(world, engine):
    peer = world.engine(OTHER_NODE)
    world.store(engine, "ab")
    assert leased(world.acquire(peer, "ab")) == 2
    world.go(61 * S)
    world.check_nothing_held()
    assert world.table.counts["expired_leases"] == 1


def test_another_node_reads_spaces_of_all_tenants_and_joins_no_session(world, engine):
    peer = world.engine(OTHER_NODE)
    opened = world.ask(
        peer, wire.OpenSpace(3, type(world.space.identity)(
            tenant="blue", model="m", kv_dtype="uint8", page_tokens=1), [FULL])
    )  # fmt: skip
    assert isinstance(opened, wire.SpaceOpened)
    [token] = [one.token for one in world.node.sessions.values() if not one.remote]
    inbox_peer = world.desk.connect(Peer(7, remote=True), world.inboxes[peer])
    world.desk.receive(inbox_peer, wire.Hello(1, 1, wire.PROTOCOL_MINOR, "n", token))
    welcome = world.answer(peer)
    assert isinstance(welcome, wire.Welcome)
    assert welcome.session != token


def test_keys_that_are_no_chain_harm_nobody(world, engine):
    keys = b"".join(chain("ab") + chain("a"))
    world.ask(engine, wire.Lookup(7, 0, [0], keys, 0))
    world.tell(("p", 3))
    world.ask(engine, wire.Acquire(8, 50, 0, 0, keys, 1000, 1000))
    world.end_all()
    assert world.ready("ab") == "ab"
    assert KEY_BYTES == 32
