"""Goal: an index of a node's events has a page for as long as any tier has it, and no longer."""

import msgspec
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvstore.events.publisher import END_OF_REPLAY, EventBatch
from kvstore.index.control import Source
from kvstore.index.feed import PageFeeds
from kvstore.index.layout import TableLayout
from kvstore.index.scope import key_chains, scope_seed
from kvstore.index.table import IndexReader
from kvstore.index.writer import IndexWriter
from kvstore.protocol.page import CanonicalLayout, PrefixKey, ShardSpec, SpaceIdentity
from kvstore.server.publish import events_of
from kvstore.state.tree.actions import Action, Removed, Stored, TierRemoved, TierStored
from kvstore.state.tree.prefix_tree import PrefixTree, Shard
from tests.client.conftest import (
    READY,
    TIMEOUT_S,
    Daemon,
    arguments,
    content,
    identity,
    new_keys,
    open_space,
)
from tests.index.publishers import usable
from tests.local_index import anonymous_memory

SECRET = 7
SETS = 64
SPACE = PrefixTree(
    0,
    SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=2),
    [Shard(ShardSpec(layout=CanonicalLayout(4), layers=(0, 1), heads=(0, 1)), 16, 4096)],
)
KEYS = [PrefixKey(bytes([number]) * 32) for number in range(1, 4)]
ROOT = PrefixKey(b"")


class Index:
    """What a Conductor makes of one node's events."""

    def __init__(self) -> None:
        memory = anonymous_memory(TableLayout(1000, SETS).total_bytes)
        self._feeds = PageFeeds(IndexWriter(memory, 1000, SECRET, SETS), SECRET)
        self._table = IndexReader(memory.buffer)
        source = Source(worker="node/n", domain="node/n", endpoint="ipc:///nowhere", is_node=True)
        self._feed = self._feeds.feed(source, 100)
        self._feed.live(counts=True)

    def follow(self, *actions: Action) -> None:
        self.apply(msgspec.msgpack.encode(EventBatch(0.0, events_of(actions))))

    def apply(self, payload: bytes) -> None:
        for _ in self._feed.apply(payload):
            pass
        self._feed.flush()

    def prefix(self, space: str, keys: list[PrefixKey]) -> int:
        chains = key_chains(b"".join(keys), scope_seed(SECRET, "keys", space))
        return usable(self._table, "node/n", chains)

    @property
    def media(self) -> dict[str, int]:
        """Pages by medium, where there are any."""
        return {medium: n for medium, n in self._feeds.pages().get("node/n", {}).items() if n}

    def __len__(self) -> int:
        return len(self._feeds)


def test_a_page_is_there_until_it_has_left_its_last_tier():
    index = Index()
    for action, there in (
        (Stored(SPACE, 0, KEYS[:1], ROOT, b""), 1),
        (TierStored(SPACE, 0, KEYS[:1], ROOT, "ssd"), 1),
        (TierRemoved(SPACE, 0, KEYS[:1], ROOT, "host"), 1),
        (TierStored(SPACE, 0, KEYS[:1], ROOT, "host"), 1),
        (TierRemoved(SPACE, 0, KEYS[:1], ROOT, "ssd"), 1),
        (Removed(SPACE, 0, KEYS[:1], "evicted", ("host",)), 0),
    ):
        index.follow(action)
        assert index.prefix(SPACE.label, KEYS[:1]) == there, action
    assert len(index) == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["host", "ssd"]), st.booleans())))
def test_whatever_moves_the_index_knows_where_it_is(moves):
    index = Index()
    tiers: dict[int, set[str]] = {number: set() for number in range(3)}
    for number, tier, comes in moves:
        key, here = KEYS[number : number + 1], tiers[number]
        if comes and not here:
            index.follow(Stored(SPACE, 0, key, ROOT, b""))
            here.add("host")
        elif comes and tier not in here:
            index.follow(TierStored(SPACE, 0, key, ROOT, tier))
            here.add(tier)
        elif not comes and here == {"host", "ssd"}:
            index.follow(TierRemoved(SPACE, 0, key, ROOT, tier))
            here.remove(tier)
        elif not comes and here:
            index.follow(Removed(SPACE, 0, key, "evicted", tuple(here)))
            here.clear()
        for one, known in tiers.items():
            assert index.prefix(SPACE.label, [KEYS[one]]) == bool(known)
    for medium, tier in (("CPU", "host"), ("STORAGE", "ssd")):
        assert index.media.get(medium, 0) == sum(tier in known for known in tiers.values())


def replayed(daemon: Daemon) -> Index:
    """The index of one who comes late and asks for all there was."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    index = Index()
    try:
        dealer.rcvtimeo = int(TIMEOUT_S * 1000)
        dealer.connect(daemon.replay)
        dealer.send_multipart([b"", bytes(8)])
        while (message := dealer.recv_multipart())[2] != END_OF_REPLAY:
            index.apply(message[3])
    finally:
        dealer.close(linger=0)
        context.term()
    return index


def test_pages_on_disk_are_known_while_the_node_runs_and_after_it_began_again(
    spawn, tmp_path, wait_until
):
    settings = {
        "ssd__directories": tmp_path / "ssd", "ssd__capacity_bytes": "64MiB",
        "ssd__segment_bytes": "8MiB", "ssd__write": "through", "ssd__admission": "all",
    }  # fmt: skip

    def start(name: str) -> Daemon:
        return Daemon(spawn(arguments(tmp_path / name, **settings), ready=READY))

    def media(daemon: Daemon) -> dict[str, int]:
        return replayed(daemon).media

    model = identity().model
    first = start("one.sock")
    with first.connect() as store:
        space = open_space(store, model=model)
        keys = new_keys(space, 8)
        space.put(keys, content(8, space.page_bytes[0]))
        wait_until(lambda: media(first) == {"CPU": 8, "STORAGE": 8})
        space.persist(keys)
    assert first.process.stop() == 0

    again = start("two.sock")
    wait_until(lambda: media(again) == {"STORAGE": 8})
    assert replayed(again).prefix(space.identity.digest.hex(), list(keys)) == 8
