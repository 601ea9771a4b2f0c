"""Goal: a message that cannot be right gets a Failure that names the field, and holds nothing."""

from collections.abc import Iterator

import msgspec
import pytest

from kvstore.node.describe import describe
from kvstore.node.node import WAIT_MS_MAX, Node
from kvstore.node.requests import NodeLimits
from kvstore.protocol import wire
from kvstore.protocol.page import CanonicalLayout, PrefixKeys, ShardSpec, SpaceIdentity, page_keys
from kvstore.state.table.invariants import check
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.sessions import Peer
from kvstore.state.tree.slots import SlotTable

MS = 1_000_000
IDENTITY = SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=2)
SHARDS = [
    ShardSpec(layout=CanonicalLayout(1024), layers=(0, 1), heads=(at, at + 1)) for at in (0, 1)
]
LEASE_MS_MAX = 1000
DIGEST = b"d" * 16


class Wire:
    """A node, and its answers to one message at a time."""

    def __init__(self, limits: NodeLimits | None = None) -> None:
        tokens = (bytes([number]) * 16 for number in range(1, 200))
        limits = limits or NodeLimits(1 << 20, LEASE_MS_MAX)
        self.node = Node("n", b"b" * 16, SlotTable(1 << 16, 4), limits, lambda: next(tokens))
        self.now_ns = 1
        self._requests = 0
        self._names = 0

    def ask(self, connection: int, message: wire.Request) -> wire.Answer | None:
        """The answer, or None if there is none yet."""
        if hasattr(message, "id"):
            self._requests += 1
            message.id = self._requests
        self.node.receive(connection, message, self.now_ns)
        check(self.node.pages)
        answers = self.answers(connection)
        assert len(answers) <= 1
        for answer in answers:
            assert getattr(answer, "id", None) == self._requests
        return answers[0] if answers else None

    def answers(self, connection: int) -> list[wire.Answer]:
        found = [answer for number, answer in self.node.outbox if number == connection]
        self.node.outbox = [pair for pair in self.node.outbox if pair[0] != connection]
        return found

    def join(
        self, connection: int, pid: int = 0, session: bytes = b"", peer: Peer | None = None
    ) -> wire.Welcome:
        self.node.connected(connection, peer or Peer(pid or connection))
        hello = wire.Hello(
            0, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, f"engine-{connection}", session
        )
        welcome = self.ask(connection, hello)
        assert isinstance(welcome, wire.Welcome)
        opened = self.ask(connection, wire.OpenSpace(0, IDENTITY, SHARDS))
        assert opened == wire.SpaceOpened(self._requests, 0, [0, 1])
        return welcome

    def begin(self, connection: int, keys: PrefixKeys, shard: int = 0) -> int:
        self._names += 1
        begin = wire.BeginPut(0, self._names, 0, shard, keys.packed, keys.parent)
        granted = self.ask(connection, begin)
        assert isinstance(granted, wire.PutGranted)
        assert set(granted.statuses) == {PageStatus.GRANTED}
        return self._names

    def store(self, connection: int, keys: PrefixKeys, shard: int = 0) -> None:
        put = self.begin(connection, keys, shard)
        committed = self.ask(connection, wire.CommitPut(0, put, DIGEST * len(keys)))
        assert isinstance(committed, wire.Committed)

    def lookup(
        self, connection: int, keys: PrefixKeys, wait_ms: int = 0, shards: tuple[int, ...] = (0,)
    ) -> tuple[int, int] | None:
        found = self.ask(connection, wire.Lookup(0, 0, list(shards), keys.packed, wait_ms))
        assert found is None or isinstance(found, wire.Found)
        return (found.pages, found.pending) if found is not None else None

    def found(self, connection: int) -> list[tuple[int, int]]:
        """What lookups that waited were answered meanwhile."""
        return [
            (answer.pages, answer.pending)
            for answer in self.answers(connection)
            if isinstance(answer, wire.Found)
        ]


@pytest.fixture
def node() -> Iterator[Wire]:
    """A node with one process, connection 1; nothing may be left when all have gone."""
    made = Wire()
    made.join(1)
    yield made
    for connection in list(made.node.processes):
        made.node.disconnected(connection, made.now_ns, ended=True)
    stats = describe(made.node)
    assert stats.sessions == []
    assert stats.leases == stats.puts == stats.waiting_requests == 0
    assert stats.host.writing_bytes == stats.host.pinned_bytes == 0
    assert stats.host.limbo_bytes == 0


KEYS = page_keys(range(12), 2)
K = KEYS.packed


@pytest.mark.parametrize(
    ("message", "code", "field"),
    [
        (wire.Hello(0, 2, 0, "e"), "protocol", ""),
        (wire.Hello(0, 1, 0, "again"), "protocol", ""),
        (wire.FetchExtents(b"", [0]), "", ""),
        (wire.Lookup(0, 7, [0], K), "invalid_argument", "space"),
        (wire.Lookup(0, -1, [0], K), "invalid_argument", "space"),
        (wire.Lookup(0, 0, [2], K), "invalid_argument", "shards"),
        (wire.Lookup(0, 0, [-1], K), "invalid_argument", "shards"),
        (wire.Lookup(0, 0, [], K), "invalid_argument", "shards"),
        (wire.Lookup(0, 0, [0], b""), "invalid_argument", "keys"),
        (wire.Lookup(0, 0, [0], K[:-1]), "invalid_argument", "keys"),
        (wire.Lookup(0, 0, [0], bytes(32 * 65_537)), "invalid_argument", "keys"),
        (wire.Lookup(0, 0, [0], K, -1), "invalid_argument", "wait_ms"),
        (wire.Lookup(0, 0, [0], K, WAIT_MS_MAX + 1), "invalid_argument", "wait_ms"),
        (wire.Acquire(0, 1, 0, 9, K, 10), "invalid_argument", "shards"),
        (wire.Acquire(0, 1, 0, 0, K[1:], 10), "invalid_argument", "keys"),
        (wire.Acquire(0, 1, 0, 0, K, 0), "invalid_argument", "lease_ms"),
        (wire.BeginPut(0, 1, 0, 5, K, b""), "invalid_argument", "shards"),
        (wire.BeginPut(0, 1, 0, 0, b"", b""), "invalid_argument", "keys"),
        (wire.BeginPut(0, 1, 0, 0, K, b"short"), "invalid_argument", "parent"),
        (wire.BeginPut(0, 1, 0, 0, K, K[32:64]), "invalid_argument", "parent"),
        (wire.BeginPut(0, 1, 0, 0, K, b"", bytes(47)), "invalid_argument", "tokens"),
        (wire.BeginPut(0, 1, 0, 0, bytes(32), b""), "invalid_argument", "keys"),
        (wire.BeginPut(0, 1, 0, 0, K[:64] + bytes(32), b""), "invalid_argument", "keys"),
        (wire.BeginPut(0, 1, 0, 0, K, bytes(32)), "invalid_argument", "parent"),
        (wire.CommitPut(0, 99, DIGEST), "invalid_argument", "put"),
        (wire.CommitPut(0, 99, DIGEST, -1), "invalid_argument", "ttl_ms"),
        (
            wire.OpenSpace(0, msgspec.structs.replace(IDENTITY, tenant="other"), SHARDS),
            "invalid_argument",
            "tenant",
        ),
        (wire.OpenSpace(0, IDENTITY, []), "invalid_argument", "shards"),
        (
            wire.OpenSpace(0, IDENTITY, [msgspec.structs.replace(SHARDS[0], layers=(0, 9))] * 1),
            "",
            "",
        ),
        (
            wire.OpenSpace(0, IDENTITY, [msgspec.structs.replace(SHARDS[0], layers=(0, 99))]),
            "invalid_argument",
            "page_bytes",
        ),
        (
            wire.OpenSpace(
                0, IDENTITY, [msgspec.structs.replace(SHARDS[0], layout=CanonicalLayout(64))]
            ),
            "layout_mismatch",
            "head_dim",
        ),
    ],
)
def test_a_message_that_cannot_be_right_fails_by_its_field(node, message, code, field):
    answer = node.ask(1, message)

    if not code:
        assert not isinstance(answer, wire.Failure)
        return
    assert isinstance(answer, wire.Failure)
    assert (answer.code, answer.field) == (code, field)
    assert answer.message
    assert node.node.pages.counts[f"refused_{code}"] == 1
    node.store(1, KEYS)
    assert node.lookup(1, KEYS) == (6, 0), "and nothing is in the way of the next message"


def test_a_key_may_hold_zeros_beside_those_of_its_neighbour(node):
    zeros = b"k" * 8 + bytes(24) + bytes(24) + b"k" * 8

    granted = node.ask(1, wire.BeginPut(0, 1, 0, 0, zeros, b""))

    assert isinstance(granted, wire.PutGranted)
    assert set(granted.statuses) == {PageStatus.GRANTED}


def test_a_wrong_commit_leaves_its_put_open(node):
    put = node.begin(1, KEYS)

    answer = node.ask(1, wire.CommitPut(0, put, DIGEST))

    assert isinstance(answer, wire.Failure)
    assert answer.field == "digests"
    assert node.ask(1, wire.CommitPut(0, put, DIGEST * 6)) is not None
    assert node.lookup(1, KEYS) == (6, 0)


def test_a_message_before_hello_is_refused(node):
    node.node.connected(5, Peer(5))

    answer = node.ask(5, wire.Lookup(0, 0, [0], K))

    assert isinstance(answer, wire.Failure)
    assert answer.code == "protocol"
    assert 5 not in node.node.processes


def test_an_unknown_session_token_makes_a_new_session_and_a_known_one_is_joined(node):
    first = node.join(2, session=b"unknown-token")
    second = node.join(3, session=first.session)

    assert first.session == second.session != b"unknown-token"
    assert len(node.node.sessions) == 2
    assert len(node.node.sessions[first.session].processes) == 2


def test_a_session_without_the_other_tenants_space_cannot_name_it(node):
    node.node.connected(2, Peer(2))
    node.ask(2, wire.Hello(0, 1, 0, "blue"))
    other = msgspec.structs.replace(IDENTITY, tenant="blue")
    opened = node.ask(2, wire.OpenSpace(0, other, SHARDS))
    assert isinstance(opened, wire.SpaceOpened)
    assert opened.space == 1

    answer = node.ask(2, wire.Lookup(0, 0, [0], K))

    assert isinstance(answer, wire.Failure)
    assert answer.field == "space"


# Lookups that wait


def test_a_waiting_lookup_is_answered_when_the_writer_commits(node):
    node.join(2)
    put = node.begin(1, KEYS[:4])

    assert node.lookup(2, KEYS, wait_ms=100) is None
    node.ask(1, wire.CommitPut(0, put, DIGEST * 4))

    assert node.found(2) == [(4, 0)]


def test_a_waiting_lookup_is_answered_when_the_writer_gives_up(node):
    node.join(2)
    node.store(1, KEYS[:2])
    put = node.begin(1, KEYS[2:4])

    assert node.lookup(2, KEYS, wait_ms=100) is None
    node.ask(1, wire.AbortPut(put))

    assert node.found(2) == [(2, 0)]


@pytest.mark.parametrize("ended", [True, False])
def test_a_waiting_lookup_is_answered_when_the_writer_is_gone(node, ended):
    node.join(2)
    node.begin(1, KEYS)

    assert node.lookup(2, KEYS, wait_ms=100) is None
    node.node.disconnected(1, node.now_ns, ended=ended)

    assert node.found(2) == [(0, 0)]


def test_a_waiting_lookup_is_answered_at_its_deadline_at_the_latest(node):
    node.join(2)
    node.begin(1, KEYS)
    assert node.lookup(2, KEYS, wait_ms=50) is None
    due_ns = node.now_ns + 50 * MS
    assert node.node.next_deadline_ns() == due_ns

    node.node.advance(due_ns - 1)
    assert node.found(2) == []
    node.node.advance(due_ns)
    assert node.found(2) == [(0, 6)]
    assert node.node.next_deadline_ns() == 0


def test_a_lookup_that_follows_several_puts_waits_for_all_of_them(node):
    node.join(2)
    first, second = node.begin(1, KEYS[:2]), node.begin(1, KEYS[2:5])

    assert node.lookup(2, KEYS, wait_ms=100) is None
    node.ask(1, wire.CommitPut(0, first, DIGEST * 2))
    assert node.found(2) == []
    node.ask(1, wire.CommitPut(0, second, DIGEST * 3))
    assert node.found(2) == [(5, 0)]


def test_a_lookup_for_several_ranks_waits_until_the_last_one_has_stored(node):
    node.join(2)
    ranks = [node.begin(1, KEYS[:3], shard) for shard in (0, 1)]

    assert node.lookup(2, KEYS, wait_ms=100, shards=(0, 1)) is None
    node.ask(1, wire.CommitPut(0, ranks[0], DIGEST * 3))
    assert node.found(2) == []
    assert node.lookup(1, KEYS, shards=(0, 1)) == (0, 3)
    node.ask(1, wire.CommitPut(0, ranks[1], DIGEST * 3))
    assert node.found(2) == [(3, 0)]


WINDOW = ShardSpec(
    layout=CanonicalLayout(512), layers=(1, 2), heads=(0, 1), group="state", window_pages=1
)


def test_a_lookup_that_needs_only_the_last_state_wakes_when_that_one_is_stored(node):
    node.join(2)
    node.ask(1, wire.OpenSpace(0, IDENTITY, [WINDOW]))
    node.store(1, KEYS[:4])
    state = node.begin(1, KEYS[3:4], shard=2)

    assert node.lookup(2, KEYS, wait_ms=100, shards=(0, 2)) is None
    node.ask(1, wire.CommitPut(0, state, DIGEST))

    assert node.found(2) == [(4, 0)]


def test_a_lookup_that_needs_a_window_wakes_when_the_last_page_of_it_is_stored(node):
    node.join(2)
    node.ask(1, wire.OpenSpace(0, IDENTITY, [msgspec.structs.replace(WINDOW, window_pages=2)]))
    node.store(1, KEYS[:4])
    first, second = node.begin(1, KEYS[2:3], shard=2), node.begin(1, KEYS[3:4], shard=2)

    assert node.lookup(2, KEYS, wait_ms=100, shards=(0, 2)) is None
    node.ask(1, wire.CommitPut(0, second, DIGEST))
    assert node.found(2) == []
    node.ask(1, wire.CommitPut(0, first, DIGEST))

    assert node.found(2) == [(4, 0)]


def test_a_miss_with_nothing_being_written_does_not_wait(node):
    assert node.lookup(1, KEYS, wait_ms=100) == (0, 0)


def test_waiters_that_left_are_forgotten(node):
    node.join(2)
    node.begin(1, KEYS)
    node.lookup(2, KEYS, wait_ms=100)

    node.node.disconnected(2, node.now_ns, ended=False)

    assert describe(node.node).waiting_requests == 0
    assert not node.node.waiting._by_thing, "not even an empty list for each key they waited for"


# What is left behind


def test_a_process_that_ends_gives_back_what_it_held(node):
    node.join(2, pid=77)
    node.store(2, KEYS[:2])
    node.begin(2, KEYS[2:4])
    node.ask(2, wire.Acquire(0, 9, 0, 0, KEYS[:2].packed, 100))

    assert node.node.waits_for(77)
    node.node.process_ended(77, node.now_ns)
    assert node.node.closing == [2]

    host = describe(node.node).host
    assert host.writing_bytes == host.pinned_bytes == 0
    assert node.lookup(1, KEYS) == (2, 0), "what it had stored stays"


def test_a_corrupt_page_goes_but_not_the_one_that_was_stored_in_its_place(node):
    node.store(1, KEYS[:2])
    leased = node.ask(1, wire.Acquire(0, 1, 0, 0, KEYS[:1].packed, 100))
    assert isinstance(leased, wire.Acquired)
    node.ask(1, wire.Release(1))
    generation = int.from_bytes(leased.addresses[4:8], "little")
    report = wire.Corrupt(0, 0, KEYS[0], generation)

    node.ask(1, report)
    assert node.lookup(1, KEYS) == (0, 0)
    node.store(1, KEYS[:2])
    node.ask(1, report)

    assert node.lookup(1, KEYS) == (2, 0), "the report was about an earlier page"


def test_a_prefill_speed_that_cannot_be_is_ignored(node):
    for told in (0.0, -1.0, 1e9, float("nan"), 0.002):
        node.ask(1, wire.ReportPrefill(told))

    assert describe(node.node).sessions[0].prefill_s_per_token == 0.002


@pytest.mark.parametrize("same_session", [True, False])
def test_nobody_releases_aborts_or_commits_what_another_process_holds(node, same_session):
    """Names of leases and puts are small numbers, which anybody can guess."""
    welcome = node.join(3)
    assert node.join(2, session=welcome.session if same_session else b"").session
    keys, others = page_keys(range(8), 2), page_keys(range(100, 104), 2)
    node.store(3, keys)
    leased = node.ask(3, wire.Acquire(0, 7, 0, 0, keys.packed, LEASE_MS_MAX))
    assert isinstance(leased, wire.Acquired)
    put = node.begin(3, others)
    held = describe(node.node).host

    for _ in range(3):
        node.ask(2, wire.Release(7))
        node.ask(2, wire.AbortPut(put))
        refused = node.ask(2, wire.CommitPut(0, put, DIGEST * len(others)))
        assert isinstance(refused, wire.Failure)
    for generation in (0, 1 << 20, (1 << 32) + int.from_bytes(leased.addresses[4:8], "little")):
        node.ask(2, wire.Corrupt(0, 0, keys[0], generation))
    assert describe(node.node).host == held
    assert node.lookup(2, keys) == (len(keys), 0)

    for _ in range(3):  # and whoever holds it gives it back once
        node.ask(3, wire.Release(7))
        node.ask(3, wire.AbortPut(put))
    after = describe(node.node).host
    assert after.pinned_bytes == after.writing_bytes == 0
    assert after.ready_bytes == held.ready_bytes
