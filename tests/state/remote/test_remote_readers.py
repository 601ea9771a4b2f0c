"""Goal: other nodes only read here and hold nothing for long; copies of their pages go first."""

import pytest

from kvstore.node.describe import describe
from kvstore.protocol import wire
from kvstore.protocol.page import KEY_BYTES
from kvstore.state.choice.admission import Admission
from kvstore.state.choice.eviction import GRACE_NS, REPLICA_AGES
from kvstore.state.choice.sources import SOURCES_MAX, Sources
from kvstore.state.disk.jobs import DiskRead, DiskRules, SyncPolicy, WritePolicy
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.pages import DiskPages
from kvstore.state.remote import pages
from kvstore.state.remote.jobs import PeerFetch
from kvstore.state.tree.sessions import Peer
from tests.state.remote.remote_world import MS, RemoteWorld, S, leased
from tests.state.world import FULL, FULL_2, PAGE, WINDOW, chain

OTHER_NODE = Peer(1 << 40, watched=False, remote=True)


@pytest.fixture
def world() -> RemoteWorld:
    return RemoteWorld(shards=[FULL])


@pytest.fixture
def engine(world: RemoteWorld) -> int:
    return world.engine()


def test_replicas_leave_memory_before_pages_of_equal_worth():
    world = RemoteWorld(extents=1, shards=[FULL])
    engine = world.engine()
    world.desk.peer_standing("p", b"boot")
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


def fetch(world: RemoteWorld, engine: int, path: str) -> None:
    """Have a page of a peer here, with a session that stays up."""
    world.desk.peer_standing("p", b"boot")
    world.locate(engine, path, ("p", 1))
    world.acquire(engine, path)
    world.end_all()
    world.release(engine)


def test_a_replica_leaves_memory_before_any_number_of_older_pages():
    world = RemoteWorld(extents=5, shards=[FULL])  # 40 slots
    engine = world.engine()
    own = [chr(0x100 + at) for at in range(37)]
    for path in own:
        world.store(engine, path)
    for path in "xyz":
        fetch(world, engine, path)

    for path in "uvw":
        fetch(world, engine, path)

    assert [path for path in "xyzuvw" if world.ready(path)] == ["u", "v", "w"]
    assert all(world.ready(path) for path in own), "a peer has none of these"


def test_a_replica_that_is_asked_for_all_the_time_stays_while_others_are_not_asked_for():
    world = RemoteWorld(extents=1, shards=[FULL])  # 8 slots
    engine = world.engine()
    for path in "abcdefg":
        world.store(engine, path)
    fetch(world, engine, "r")
    for _ in range(2 * REPLICA_AGES):
        assert leased(world.acquire(engine, "r")) == 1
        world.release(engine)

    world.go(GRACE_NS)
    world.store(engine, "x")

    assert (world.ready("r"), world.ready("a")) == ("r", "")


def test_a_page_that_a_client_put_after_it_was_fetched_stays_as_others_do():
    world = RemoteWorld(extents=1, shards=[FULL, FULL_2])  # 8 slots
    world.table.eviction.change_policy("lru")
    engine = world.engine()
    world.desk.peer_standing("p", b"boot")
    world.locate(engine, "a", ("p", 1))
    world.acquire(engine, "a")
    world.end_all()
    world.release(engine)
    world.commit(engine, "a", world.begin(engine, "a", shard=1), shard=1)
    assert not world.space.index[chain("a")[0]].replica
    for path in "bcdefg":
        world.store(engine, path)
    for path in "ag":
        assert leased(world.acquire(engine, path)) == 1
        world.release(engine)

    world.go(GRACE_NS)
    world.store(engine, "h")

    assert (world.ready("a"), world.ready("b")) == ("a", "")


@pytest.mark.parametrize(
    "boot", [b"", b"boot", b"later"], ids=["none", "the same boot", "another boot"]
)
def test_a_replica_counts_as_the_last_copy_while_the_boot_that_gave_it_has_no_session(boot):
    world = RemoteWorld(extents=1, shards=[FULL])
    engine = world.engine()
    world.desk.peer_standing("p", b"boot")
    for path in "mn":
        world.store(engine, path)
    world.locate(engine, "r", ("p", 1))
    world.acquire(engine, "r")
    world.end_all()
    world.release(engine)
    for path in "12345":
        world.store(engine, path)

    world.desk.peer_standing("p", b"")
    if boot:
        world.desk.peer_standing("p", boot)

    world.store(engine, "6")

    gone = "r" if boot == b"boot" else "m"
    assert [path for path in "mnr" if not world.ready(path)] == [gone]


def test_no_more_than_64_nodes_are_remembered_as_sources():
    sources = Sources()
    sources.changed("stays", b"boot")
    for number in range(2 * SOURCES_MAX):
        sources.changed(f"n{number}", b"boot")
        sources.changed(f"n{number}", b"")
    first = sources.of("stays")
    sources.changed("n0", b"boot")

    assert first == sources.of("stays") > 0
    assert sources.of("n0") > 2 * SOURCES_MAX, "it was forgotten"
    assert sources.reachable == {first, sources.of("n0")}


def test_a_page_that_a_client_put_too_is_no_replica():
    world = RemoteWorld(shards=[FULL, WINDOW])
    engine = world.engine()
    world.desk.peer_standing("p", b"boot")
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
    disk = world.table.residents.disk = DiskPages(
        world.table.residents, log, Admission("all", 0, 4 << 20), rules
    )
    world.store(engine, "ab")
    world.ask(engine, wire.Persist(3, 0, 0, b"".join(chain("ab")), 1000))
    while disk.jobs:
        world.node.disk_completed(disk.jobs.pop(0).job, None, world.now_ns)
    world.desk.flush()
    assert isinstance(world.answer(engine), wire.Persisted)
    for path in ("ab", "a"):
        assert world.table.residents.release_memory(world.space.nodes[chain(path)[-1]])
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
    assert describe(world.node).sessions_total == 1


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
