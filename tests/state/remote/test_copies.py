"""Goal: a node brings pages that a peer asks it to bring, and an engine's copies are waited for."""

import msgspec
import pytest

from kvstore.node.describe import describe
from kvstore.protocol import wire
from kvstore.state.remote import spreads
from kvstore.state.remote.jobs import SpreadEnd
from kvstore.state.tree.sessions import Peer
from tests.state.remote.remote_world import MS, RemoteWorld, S, leased
from tests.state.world import FULL, PAGE, WINDOW, chain

IDLE_MS = 60_000


@pytest.fixture
def world() -> RemoteWorld:
    made = RemoteWorld(shards=[FULL])
    made.now_ns = 1000 * S
    return made


@pytest.fixture
def engine(world: RemoteWorld) -> int:
    return world.engine()


@pytest.fixture
def peer(world: RemoteWorld) -> int:
    return connect_peer(world)


def connect_peer(world: RemoteWorld) -> int:
    return world.engine(Peer(-7, watched=False, remote=True, node="p"))


def bring(
    world: RemoteWorld, peer: int, path: str, first: int = 0, wait_ms: int = 5_000,
    idle_ms: int = 0, shard: int = 0,
) -> wire.Answer | None:  # fmt: skip
    keys = b"".join(chain(path))
    return world.ask(peer, wire.Bring(11, 0, shard, keys, first, wait_ms, idle_ms))


def replicate(
    world: RemoteWorld, engine: int, path: str, copies: int = 2, start: int = 0,
    wait_ms: int = 5_000,
) -> wire.Answer | None:  # fmt: skip
    keys = b"".join(chain(path, start))
    return world.ask(engine, wire.Replicate(12, 0, 0, keys, copies, wait_ms))


# Bring


def test_a_peer_that_asks_is_read_and_told_when_its_pages_are_here(world, peer):
    assert bring(world, peer, "abc") is None
    job = world.read(peer="p")
    assert job.keys == b"".join(chain("abc"))
    assert not world.locates, "who asks has them; the directory is not asked"
    assert job.copies

    world.end(job)

    assert world.answer(peer) == wire.Brought(11, 3)
    assert world.ready("abc") == "abc"
    counts = world.table.counts
    assert counts["lookup_pages"] == counts["hit_pages"] == counts["loaded_bytes"] == 0
    assert next(iter(world.space.nodes.values())).hits == 0
    world.check_nothing_held()


def test_pages_that_are_here_are_told_at_once(world, engine, peer):
    world.store(engine, "abc")
    assert bring(world, peer, "abc") == wire.Brought(11, 3)
    assert bring(world, peer, "abc", first=2) == wire.Brought(11, 1)
    assert bring(world, peer, "abcd", wait_ms=0) == wire.Brought(11, 3)
    assert not world.reads


def test_pages_that_are_leaving_are_not_said_to_be_here(world, engine, peer):
    world.store(engine, "abc")
    world.space.leaving.append(b"".join(chain("abx")))

    assert bring(world, peer, "abc") == wire.Brought(11, 0)
    assert bring(world, peer, "abc", first=2) == wire.Brought(11, 1), "c is none of them"
    world.space.leaving.clear()
    assert bring(world, peer, "abc") == wire.Brought(11, 3)
    assert not world.reads


def test_only_what_is_missing_is_read_and_heads_come_too(world, engine, peer):
    world.store(engine, "ab")
    assert bring(world, peer, "abcdef", first=4) is None
    job = world.read()
    assert job.before == b"".join(chain("ab"))
    assert job.keys == b"".join(chain("abcdef", 2))
    world.end(job)
    assert world.answer(peer) == wire.Brought(11, 2)


def test_what_a_peer_does_not_give_is_not_asked_again(world, peer):
    bring(world, peer, "abcd")
    world.end(world.read(), 2)
    assert world.answer(peer) == wire.Brought(11, 2)
    assert not world.reads


def test_a_request_ends_at_its_deadline_with_what_has_come(world, peer):
    bring(world, peer, "abcd", wait_ms=100)
    world.go(101 * MS)
    assert world.answer(peer) == wire.Brought(11, 0)
    world.end(world.read())
    assert bring(world, peer, "abcd") == wire.Brought(11, 4), "they came nevertheless"
    world.check_nothing_held()


def test_pages_that_have_left_who_asked_are_no_replicas_and_nothing_is_read_for_them(world, peer):
    world.desk.peer_standing("p", b"boot")
    bring(world, peer, "abcd")
    world.end(world.read())
    assert world.answer(peer) == wire.Brought(11, 4)
    assert all(one.replica for one in world.space.nodes.values())

    keys = b"".join(chain("abcdef"))
    assert world.ask(peer, wire.Bring(12, 0, 0, keys, 2, 0, 0, gone=True)) == wire.Brought(12, 2)

    replicas = [bool(world.space.index[one].replica) for one in chain("abcd")]
    assert replicas == [True, True, False, False]
    assert not world.reads, "who asked has none to give"


def test_the_pages_stay_when_who_asked_has_gone(world, peer):
    bring(world, peer, "abcd")
    world.desk.disconnect(peer, ended=True)
    world.end(world.read())
    assert world.ready("abcd") == "abcd"
    world.check_nothing_held()


def test_an_engine_shares_what_a_peer_lets_come(world, engine, peer):
    bring(world, peer, "abcd")
    assert world.acquire(engine, "abcd", begins=True) is None
    assert not world.locates, "it is known who has them"
    world.end(world.read())
    assert world.answer(peer) == wire.Brought(11, 4)
    assert leased(world.answer(engine)) == 4


def test_pages_used_later_are_not_evicted_for_those_of_a_peer(world, engine, peer):
    for path in ("abcdefgh", "ijklmnop", "qrstuvwx", "ABCDEFGH"):  # all of its memory
        world.store(engine, path)
        world.go(10 * S)

    assert bring(world, peer, "123", idle_ms=IDLE_MS) == wire.Brought(11, 0)
    assert not world.reads
    assert world.ready("abcdefgh") == "abcdefgh"

    assert bring(world, peer, "123", idle_ms=35_000) is None, "the first chain is colder"
    world.end(world.read())
    assert world.answer(peer) == wire.Brought(11, 3)
    assert world.ready("abcdefgh") == "abcde"
    assert world.ready("ijklmnop") == "ijklmnop"

    assert bring(world, peer, "1234567890", idle_ms=35_000) is None
    world.end_all()
    assert world.answer(peer) == wire.Brought(11, 8), "what came before is not evicted for it"
    assert world.ready("abcdefgh") == ""


def test_without_a_limit_they_are_evicted_as_for_a_put(world, engine, peer):
    for path in ("abcdefgh", "ijklmnop", "qrstuvwx", "ABCDEFGH"):
        world.store(engine, path)
    assert bring(world, peer, "123") is None
    world.end(world.read())
    assert world.answer(peer) == wire.Brought(11, 3)


def test_the_quota_of_a_session_bounds_what_comes_at_a_time():
    world = RemoteWorld(shards=[FULL], quota_pages=2)
    peer = connect_peer(world)
    bring(world, peer, "abcde")
    assert world.read().keys == b"".join(chain("ab"))
    while world.reads:
        world.end_all()
    assert world.answer(peer) == wire.Brought(11, 5)


def test_of_a_window_group_the_wanted_pages_come():
    world = RemoteWorld()
    peer = connect_peer(world)
    bring(world, peer, "abcdef", first=4, shard=1)
    job = world.read()
    assert job.shard == WINDOW
    assert job.keys == b"".join(chain("abcdef", 4))
    world.end(job)
    assert world.answer(peer) == wire.Brought(11, 2)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (wire.Bring(11, 0, 0, b"".join(chain("ab")), 2, 100), "first"),
        (wire.Bring(11, 0, 0, b"".join(chain("ab")), -1, 100), "first"),
        (wire.Bring(11, 0, 0, b"".join(chain("ab")), 0, 100, -1), "idle_ms"),
        (wire.Bring(11, 0, 0, b"".join(chain("ab")), 0, 1 << 40), "wait_ms"),
        (wire.Bring(11, 0, 3, b"".join(chain("ab")), 0, 100), "shards"),
        (wire.Bring(11, 9, 0, b"".join(chain("ab")), 0, 100), "space"),
        (wire.Bring(11, 0, 0, b"garbage", 0, 100), "keys"),
        (wire.Bring(11, 0, 0, b"", 0, 100), "keys"),
    ],
)
def test_a_wrong_request_is_refused_by_name_and_changes_nothing(world, peer, request_, field):
    refused = world.ask(peer, request_)
    assert isinstance(refused, wire.Failure)
    assert refused.field == field
    assert not world.reads
    assert not world.space.index.get(chain("a")[0])


def test_engines_do_not_ask_to_bring_and_nodes_do_not_ask_for_copies(world, engine, peer):
    for asked in (bring(world, engine, "ab"), replicate(world, peer, "ab")):
        assert isinstance(asked, wire.Failure)
        assert asked.code == "protocol"


def test_a_read_for_copies_is_no_use_of_the_pages(world, engine, peer):
    world.store(engine, "abc")
    asked = wire.Acquire(8, 1, 0, 0, b"".join(chain("abc")), 1000, copies=True)
    assert leased(world.ask(peer, asked)) == 3
    node = world.space.index.get(chain("abc")[-1])
    assert node is not None
    assert (node.hits, node.uses, node.used_ns, world.table.counts["loaded_bytes"]) == (0, 0, 0, 0)
    asked = wire.Acquire(8, 2, 0, 0, b"".join(chain("abc")), 1000)
    assert leased(world.ask(peer, asked)) == 3
    assert node.hits == 1


# Replicate


def test_copies_are_asked_of_the_peer_side_from_the_beginning_of_the_chain(world, engine):
    world.store(engine, "abcd")
    assert replicate(world, engine, "abcd", copies=3, start=2) is None
    (spread,) = world.spreads.values()
    assert (spread.keys, spread.first, spread.peers) == (b"".join(chain("abcd")), 2, 2)
    assert spread.shard == FULL
    assert world.now_ns < spread.deadline_ns < world.now_ns + 5 * S

    world.desk.peer_spread(SpreadEnd(spread.number, 1, 3))

    assert world.answer(engine) == wire.Replicated(12, 2, draining=3)
    world.check_nothing_held()


def test_an_answer_of_another_version_says_who_drains_or_not():
    of_older_node = msgspec.msgpack.encode([34, 12, 2])
    assert wire.decode_answer(of_older_node) == wire.Replicated(12, 2, draining=0)
    longer = msgspec.msgpack.encode([34, 12, 2, 1, "of a later version"])
    assert wire.decode_answer(longer) == wire.Replicated(12, 2, 1), "more fields are ignored"


def test_copies_that_nobody_tells_of_are_not_waited_for_past_the_deadline(world, engine):
    world.store(engine, "ab")
    replicate(world, engine, "ab", wait_ms=100)
    world.go(101 * MS)
    assert world.answer(engine) == wire.Replicated(12, 1)
    (number,) = world.spreads
    world.desk.peer_spread(SpreadEnd(number, 1))
    assert world.answer(engine) is None


def test_one_copy_is_there_already(world, engine):
    world.store(engine, "ab")
    assert replicate(world, engine, "ab", copies=1) == wire.Replicated(12, 1)
    assert replicate(world, engine, "ab", wait_ms=0) == wire.Replicated(12, 1)
    assert not world.spreads


def test_copies_of_pages_that_are_not_here_are_refused(world, engine):
    world.store(engine, "ab")
    refused = replicate(world, engine, "abc")
    assert isinstance(refused, wire.Failure)
    assert (refused.code, refused.message[:6]) == ("capacity", "1 of 3")


def test_a_page_to_be_read_once_is_not_copied(world, engine):
    world.commit(engine, "ab", world.begin(engine, "ab"), read_once=True)
    refused = replicate(world, engine, "ab")
    assert isinstance(refused, wire.Failure)
    assert refused.field == "keys"
    assert not world.spreads


@pytest.mark.parametrize("copies", [0, 17, -1])
def test_a_number_of_copies_is_refused_by_name(world, engine, copies):
    world.store(engine, "ab")
    refused = replicate(world, engine, "ab", copies=copies)
    assert isinstance(refused, wire.Failure)
    assert refused.field == "copies"


def test_too_many_requests_for_copies_are_refused(world, engine, monkeypatch):
    monkeypatch.setattr(spreads, "SPREADS_MAX", 1)
    world.store(engine, "ab")
    assert replicate(world, engine, "ab") is None
    refused = replicate(world, engine, "ab")
    assert isinstance(refused, wire.Failure)
    assert refused.code == "capacity"


def test_a_peer_that_gives_nothing_leaves_nothing_behind(world, peer):
    """A peer that is away gives nothing; its request ends at once, and holds nothing."""
    bring(world, peer, "abcd")
    world.end(world.read(), 0)
    assert world.answer(peer) == wire.Brought(11, 0)
    assert describe(world.node).host.free_bytes == PAGE * 8 * 4
    world.check_nothing_held()
