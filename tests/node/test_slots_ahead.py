"""Goal: a slot that is reserved ahead is one client's alone, and never costs the others much."""

import pytest

from kvstore.node.describe import describe
from kvstore.protocol import wire
from kvstore.protocol.page import KEY_BYTES, PrefixKeys, page_keys
from kvstore.state.choice.eviction import GRACE_NS
from kvstore.state.table import ahead
from kvstore.state.tree.actions import PageStatus
from tests.node.test_protocol import DIGEST, IDENTITY, Wire

STORED, EXISTS = bytes([PageStatus.STORED]), bytes([PageStatus.EXISTS])


def page(at: int) -> PrefixKeys:
    """The only page of a prompt."""
    return page_keys(range(at * 100, at * 100 + IDENTITY.page_tokens), IDENTITY.page_tokens)


class Client:
    """A client of a node with room for reserved slots, which puts single pages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, share: int = 4) -> None:
        monkeypatch.setattr(ahead, "AHEAD_SHARE", share)
        self.wire = Wire()
        self.wire.join(1)
        self.node, self.pages = self.wire.node, self.wire.node.pages
        self._names = 100

    def name(self) -> int:
        self._names += 1
        return self._names

    def first(self, keys: PrefixKeys, shard: int = 0) -> tuple[int, bytes]:
        """Put a page with two requests, and ask for a slot: its number, and where it is."""
        put, following = self.wire.begin(1, keys, shard), self.name()
        answer = self.wire.ask(1, wire.CommitPut(0, put, DIGEST, ahead=following))
        assert isinstance(answer, wire.Committed)
        return following, answer.ahead

    def store(
        self,
        reserved: int,
        keys: PrefixKeys,
        following: int = 0,
        shard: int = 0,
        **fields: int | bytes,
    ) -> wire.Answer | None:
        request = wire.StorePage(
            0, reserved, 0, shard, keys.packed, keys.parent, DIGEST, ahead=following
        )
        for name, value in fields.items():
            setattr(request, name, value)
        return self.wire.ask(1, request)

    @property
    def held(self) -> tuple[int, int]:
        """Reserved slots, and bytes that are being written."""
        stats = describe(self.node)
        return stats.slots_ahead, stats.host.writing_bytes


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    return Client(monkeypatch)


def test_a_page_is_stored_with_one_request_in_the_slot_that_came_with_the_page_before(
    client: Client,
):
    put, address = client.first(page(1))
    assert len(address) == wire.ADDRESS.itemsize
    assert client.held[0] == 1

    following = client.name()
    answer = client.store(put, page(2), following)

    assert isinstance(answer, wire.Committed)
    assert answer.statuses == STORED
    assert len(answer.ahead) == wire.ADDRESS.itemsize
    assert answer.ahead != address
    assert client.wire.lookup(1, page(2)) == (1, 0)
    leased = client.wire.ask(1, wire.Acquire(0, 5, 0, 0, page(2).packed, 100))
    assert isinstance(leased, wire.Acquired)
    assert leased.addresses[8:] == address[8:], "it is where the client wrote it"
    assert client.pages.counts["stored_ahead_pages"] == 1


def test_a_page_that_is_there_leaves_the_slot_to_the_next_one(client: Client):
    put, address = client.first(page(1))
    following = client.name()

    answer = client.store(put, page(1), following)

    assert answer == wire.Committed(client.wire._requests, EXISTS, address)
    last = client.store(following, page(2))
    assert isinstance(last, wire.Committed)
    assert (last.statuses, last.ahead) == (STORED, b"")
    assert client.held == (0, 0)


def test_a_slot_that_is_given_back_is_free(client: Client):
    put, _ = client.first(page(1))

    client.wire.ask(1, wire.AbortPut(put))

    assert client.held == (0, 0)
    assert not client.pages.counts["aborted_puts"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("put", 99), ("ahead", 101), ("key", b"k"), ("key", bytes(KEY_BYTES)), ("parent", b"k"),
        ("parent", page(2).packed), ("digest", b"d"), ("tokens", b"t"), ("ttl_ms", -1),
    ],
    ids=["put", "ahead", "key", "no-key", "parent", "own-parent", "digest", "tokens", "ttl_ms"],
)  # fmt: skip
def test_a_wrong_request_is_refused_and_the_slot_stays(
    client: Client, field: str, value: int | bytes
):
    put, _ = client.first(page(1))
    held = client.held
    assert put == 101

    answer = client.store(put, page(2), **{field: value})

    assert isinstance(answer, wire.Failure)
    assert (answer.code, answer.field) == ("invalid_argument", field)
    assert client.held == held
    following = client.name()
    assert isinstance(client.store(put, page(3), following), wire.Committed)


def test_a_slot_of_another_shard_is_refused(client: Client):
    put, _ = client.first(page(1))

    answer = client.store(put, page(2), shard=1)

    assert isinstance(answer, wire.Failure)
    assert answer.field == "put"


def test_bytes_cannot_be_committed_to_a_slot_that_no_page_has(client: Client):
    put, _ = client.first(page(1))

    answer = client.wire.ask(1, wire.CommitPut(0, put, b""))

    assert isinstance(answer, wire.Failure)
    assert answer.field == "put"


def test_a_page_whose_head_is_gone_is_refused(client: Client):
    put, _ = client.first(page(1))
    chain = page_keys(range(1000, 1000 + 2 * IDENTITY.page_tokens), IDENTITY.page_tokens)

    answer = client.store(put, chain[1:])

    assert isinstance(answer, wire.Committed)
    assert answer.statuses == bytes([PageStatus.NO_PARENT])
    assert client.held == (0, 0)


def test_one_slot_of_a_shard_is_reserved_and_few_of_a_connection(
    client: Client, monkeypatch: pytest.MonkeyPatch
):
    client.first(page(1))
    _, second = client.first(page(2))
    assert not second
    assert client.held[0] == 1

    monkeypatch.setattr(ahead, "AHEAD_MAX", 1)
    _, other = client.first(page(1), shard=1)
    assert not other


def test_only_a_small_part_of_memory_is_reserved(monkeypatch: pytest.MonkeyPatch):
    client = Client(monkeypatch, share=1 << 20)

    _, address = client.first(page(1))

    assert not address
    assert client.held == (0, 0)


def test_no_page_that_was_just_stored_leaves_for_a_slot_in_advance(client: Client):
    put, _ = client.first(page(1))
    each = client.pages.ahead.size_bytes
    for at in range(describe(client.node).host.free_bytes // each):
        client.wire.begin(1, page(10 + at))
    client.wire.now_ns += 1
    client.wire.ask(1, wire.Acquire(0, 5, 0, 0, page(1).packed, 100))  # only the next one may leave

    answer = client.store(put, page(2), client.name())

    assert answer == wire.Committed(client.wire._requests, STORED)
    assert client.wire.lookup(1, page(2)) == (1, 0)


def test_a_full_node_makes_room_for_a_slot_in_advance(client: Client):
    put, _ = client.first(page(1))
    each = client.pages.ahead.size_bytes
    for at in range(describe(client.node).host.free_bytes // each):
        client.wire.store(1, page(10 + at))
    client.wire.now_ns += 1

    answer = client.store(put, page(2), client.name())

    assert isinstance(answer, wire.Committed)
    assert answer.ahead
    assert client.pages.counts["removed_evicted"] == 1
    assert client.wire.lookup(1, page(2)) == (1, 0)


def test_room_for_the_slot_after_it_is_made_when_no_client_waits(client: Client):
    put, _ = client.first(page(1))
    each = client.pages.ahead.size_bytes
    for at in range(describe(client.node).host.free_bytes // each):
        client.wire.store(1, page(10 + at))
    client.wire.now_ns += 1
    following = client.name()
    client.store(put, page(2), following)
    assert client.node.unfinished
    assert describe(client.node).host.free_bytes == 0

    client.node.go_on(client.wire.now_ns)

    assert not client.node.unfinished
    assert describe(client.node).host.free_bytes == each
    evicted = client.pages.counts["removed_evicted"]
    answer = client.store(following, page(3), client.name())
    assert isinstance(answer, wire.Committed)
    assert answer.ahead
    assert client.pages.counts["removed_evicted"] == evicted


def test_no_page_that_was_just_stored_leaves_for_the_slot_after_it(client: Client):
    put, _ = client.first(page(1))
    each = client.pages.ahead.size_bytes
    for at in range(describe(client.node).host.free_bytes // each):
        client.wire.begin(1, page(10 + at))
    client.wire.ask(1, wire.Acquire(0, 5, 0, 0, page(1).packed, 100))
    client.wire.now_ns += 1
    client.store(put, page(2), client.name())

    client.node.go_on(client.wire.now_ns + GRACE_NS)

    assert client.wire.lookup(1, page(2)) == (1, 0)


def test_a_slot_of_a_lost_connection_is_nobodys_until_its_process_touches_it_no_more(
    client: Client,
):
    client.first(page(1))

    client.node.disconnected(1, client.wire.now_ns, ended=False)
    lost = describe(client.node)
    assert (lost.slots_ahead, lost.host.limbo_bytes > 0) == (0, True)

    client.node.process_ended(1, client.wire.now_ns)
    ended = describe(client.node)
    assert (ended.host.limbo_bytes, ended.host.writing_bytes) == (0, 0)
    assert not ended.session_bytes


def test_an_older_client_is_given_no_slot(client: Client):
    put = client.wire.begin(1, page(1))

    answer = client.wire.ask(1, wire.CommitPut(0, put, DIGEST))

    assert answer == wire.Committed(client.wire._requests, STORED)
    assert client.held == (0, 0)
