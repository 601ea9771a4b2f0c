"""Goal: whatever a node answers, a read misses, a put fails retryably, and nothing else is raised.

The node is one by hand, whose memory is real. Its answers are of another kind, or do not fit what
was asked for.
"""

import os
import struct
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from kvstore.client.mapping import Mapping
from kvstore.client.results import MISS
from kvstore.client.store import KVStore
from kvstore.protocol import wire
from kvstore.protocol.errors import KVStoreError, PeerUnreachable, ProtocolError
from tests.client.conftest import SIZE, content, new_keys, open_space
from tests.client.peer import TIMEOUT_S, Peer, answer
from tests.connecting import connect

PAGES = 4
PONG = wire.Pong(0)
GRANTED, STORED = 0, 5

Answered = dict[type, wire.Answer]


def addresses(count: int) -> bytes:
    return b"".join(struct.pack("<IIQ", 0, 1, at * SIZE) for at in range(count))


RIGHT: Answered = {
    wire.OpenSpace: wire.SpaceOpened(0, 0, [0]),
    wire.Lookup: wire.Found(0, PAGES, 0),
    wire.Acquire: wire.Acquired(0, addresses(PAGES), bytes(16 * PAGES)),
    wire.BeginPut: wire.PutGranted(0, bytes([GRANTED] * PAGES), addresses(PAGES)),
    wire.CommitPut: wire.Committed(0, bytes([STORED] * PAGES)),
    wire.Persist: wire.Persisted(0),
    wire.Replicate: wire.Replicated(0, 2),
    wire.Stats: wire.StatsReply(0, b"{}"),
}


@pytest.fixture
def node(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answered]:
    """What a node answers to each kind of request; it has one extent, and no disk."""
    memory = os.memfd_create("extent")
    os.ftruncate(memory, 1 << 20)

    def fetch(
        numbers: Sequence[int], _: Sequence[int], keep: Callable[[int], None]
    ) -> Sequence[int]:
        for _number in numbers:
            keep(os.dup(memory))
        return ()

    made = Mapping.__init__
    monkeypatch.setattr(Mapping, "__init__", lambda self, boot, _: made(self, boot, fetch))
    answers = dict(RIGHT)

    def told(request: wire.Request) -> wire.Answer | None:
        said = answers.get(type(request))
        if said is None:
            return answer(request)
        return msgspec.structs.replace(said, id=getattr(request, "id", 0))

    peer.answer = told
    yield answers
    os.close(memory)


@pytest.fixture
def store(peer: Peer, node: Answered) -> Iterator[KVStore]:
    with connect(f"unix://{peer.path}", timeout_s=TIMEOUT_S) as made:
        yield made


def test_right_answers_are_taken(store):
    space = open_space(store)
    keys = new_keys(space, PAGES)

    assert space.lookup(keys).pages == PAGES
    assert space.put(keys, content(PAGES, SIZE)).stored == PAGES
    space.persist(keys)
    space.replicate(keys, 2)
    assert store.stats() == {}
    assert space.get(keys, content(PAGES, SIZE)) == 0, "its digests are wrong"
    assert store.troubles == {"corrupt": 1}


@pytest.mark.parametrize(
    "found", [PONG, wire.Found(0, 5, 0), wire.Found(0, 2, 3), wire.Found(0, 2, 0, 0, 3)]
)
def test_a_lookup_misses_if_its_answer_cannot_be(store, node, found):
    space = open_space(store)
    node[wire.Lookup] = found

    assert space.lookup(new_keys(space, PAGES)) == MISS
    assert store.troubles == {"protocol": 1}


def acquired(there: int, digests: int, **more: int) -> wire.Acquired:
    return wire.Acquired(0, addresses(5)[:there], bytes(digests), **more)


@pytest.mark.parametrize(
    "leased",
    [PONG, acquired(80, 80), acquired(63, 64), acquired(64, 63), acquired(48, 64),
     acquired(64, 48), acquired(0, 64), acquired(64, 64, lasting=-1)],
)  # fmt: skip
@pytest.mark.parametrize("way", ["get", "view"])
def test_a_read_misses_if_its_lease_cannot_be(store, node, leased, way):
    space = open_space(store)
    keys, into = new_keys(space, PAGES), content(PAGES, SIZE)
    before = [bytes(page) for page in into]
    node[wire.Acquire] = leased

    if way == "get":
        assert space.get(keys, into) == 0
    else:
        with space.get(keys) as views:
            assert not len(views)
    assert store.troubles == {"protocol": 1}
    assert [bytes(page) for page in into] == before


def granted(statuses: int, there: int, status: int = GRANTED) -> wire.PutGranted:
    return wire.PutGranted(0, bytes([status] * statuses), addresses(5)[:there])


def committed(statuses: int, ahead: bytes = b"", status: int = STORED) -> wire.Committed:
    return wire.Committed(0, bytes([status] * statuses), ahead)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (wire.BeginPut, PONG), (wire.BeginPut, granted(4, 80)), (wire.BeginPut, granted(4, 48)),
        (wire.BeginPut, granted(4, 63)), (wire.BeginPut, granted(5, 80)),
        (wire.BeginPut, granted(0, 0)), (wire.BeginPut, granted(4, 16, STORED)),
        (wire.CommitPut, PONG), (wire.CommitPut, committed(0)), (wire.CommitPut, committed(5)),
        (wire.CommitPut, committed(4, b"x")), (wire.CommitPut, committed(4, addresses(1))),
        (wire.BeginPut, granted(4, 0, 7)), (wire.CommitPut, committed(4, b"", 7)),
        (wire.CommitPut, committed(4, b"", GRANTED)),
    ],
)  # fmt: skip
def test_a_put_fails_if_what_it_is_told_cannot_be(store, node, asked, said):
    space = open_space(store)
    node[asked] = said

    with pytest.raises(ProtocolError, match="does not fit"):
        space.put(new_keys(space, PAGES), content(PAGES, SIZE))


@pytest.mark.parametrize(
    ("asked", "said", "call"),
    [
        (wire.Persist, PONG, lambda space, keys, _: space.persist(keys)),
        (wire.Replicate, PONG, lambda space, keys, _: space.replicate(keys, 2)),
        (wire.Stats, PONG, lambda _space, _keys, store: store.stats()),
        (wire.Stats, wire.StatsReply(0, b"{"), lambda _space, _keys, store: store.stats()),
        (wire.Stats, wire.StatsReply(0, b"[1]"), lambda _space, _keys, store: store.stats()),
    ],
)
def test_nothing_is_taken_for_done_by_another_answer(store, node, asked, said, call):
    space = open_space(store)
    keys = new_keys(space, PAGES)
    node[asked] = said

    with pytest.raises(ProtocolError):
        call(space, keys, store)


@pytest.mark.parametrize("said", [PONG, wire.SpaceOpened(0, 0, []), wire.SpaceOpened(0, 0, [0, 1])])
def test_a_space_with_other_shards_is_not_opened(store, node, said):
    node[wire.OpenSpace] = said

    with pytest.raises(KVStoreError) as raised:
        open_space(store)
    assert isinstance(raised.value, ProtocolError | PeerUnreachable)


def test_a_node_that_says_something_else_at_first_is_none(peer):
    peer.answer = lambda request: wire.Pong(request.id) if isinstance(request, wire.Hello) else None

    with KVStore.connect(f"unix://{peer.path}", timeout_s=TIMEOUT_S) as store:
        assert not store.connected
