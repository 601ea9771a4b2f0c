"""Goal: what the node did is told to indexes and to Prometheus, no more and no less."""

import os

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from kvstore.config import EventsConfig, SocketConfig
from kvstore.events.publisher import ClearedEvent, RemovedEvent, StoredEvent
from kvstore.node.describe import describe
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.protocol.counts import NO_EVENTS, AdminCounts, NodeStats, SelfCheckCounts
from kvstore.protocol.page import CanonicalLayout, PrefixKey, ShardSpec, SpaceIdentity
from kvstore.server.metrics import render
from kvstore.server.publish import Publication, events_of
from kvstore.state.tree.actions import Abandoned, Removed, Stored, TierRemoved, TierStored
from kvstore.state.tree.prefix_tree import PrefixTree, Shard
from kvstore.state.tree.slots import SlotTable

SHARDS = [
    Shard(
        ShardSpec(
            layout=CanonicalLayout(4), layers=(at, at + 1), heads=(0, 1),
            group=f"group{at // 2}", window_pages=(0, 5)[at // 2],
        ), 16, 4096,
    )
    for at in range(4)
]  # fmt: skip
SPACES = [
    PrefixTree(at, SpaceIdentity(model=f"m{at}", kv_dtype="uint8", page_tokens=2), list(SHARDS))
    for at in (0, 1)
]


def keys(*numbers: int) -> list[PrefixKey]:
    return [PrefixKey(number.to_bytes(32, "big")) for number in numbers]


def test_a_stored_run_carries_its_parent_tokens_space_and_shard():
    tokens = (7).to_bytes(4, "little") * 2 + (2**32 - 1).to_bytes(4, "little") * 2
    stored = Stored(SPACES[1], 3, keys(5, 6), keys(4)[0], tokens)
    (event,) = events_of([stored], tokens=True)

    assert event == StoredEvent(
        block_hashes=keys(5, 6),
        parent_block_hash=keys(4)[0],
        token_ids=[7, 7, 2**32 - 1, 2**32 - 1],
        block_size=2,
        medium="CPU",
        space=SPACES[1].label,
        shard=3,
        shard_digest=SHARDS[3].spec.digest.hex()[:16],
        group="group1",
        window_pages=5,
    )


def test_tokens_are_told_only_to_those_who_ask_for_them():
    tokens = (7).to_bytes(4, "little") * 4
    (event,) = events_of([Stored(SPACES[1], 3, keys(5, 6), keys(4)[0], tokens)])

    assert isinstance(event, StoredEvent)
    assert (event.block_hashes, event.token_ids) == (keys(5, 6), [])


def test_a_chains_start_has_no_parent_and_unknown_tokens_are_empty():
    (event,) = events_of([Stored(SPACES[0], 0, keys(1), PrefixKey(b""), b"")])

    assert isinstance(event, StoredEvent)
    assert event.parent_block_hash is None
    assert event.token_ids == []


def test_removals_of_one_shard_that_follow_each_other_are_one_event():
    def removed(space: int, shard: int, *numbers: int) -> Removed:
        return Removed(SPACES[space], shard, keys(*numbers), "evicted")

    stored = Stored(SPACES[0], 0, keys(9), PrefixKey(b""), b"")
    events = events_of(
        [removed(0, 0, 3), removed(0, 0, 2), removed(0, 1, 2), stored, removed(0, 1, 1),
         removed(1, 1, 1)]
    )  # fmt: skip

    told = [
        (event.block_hashes, event.space, event.shard)
        for event in events
        if isinstance(event, RemovedEvent)
    ]
    assert told == [
        (keys(3, 2), SPACES[0].label, 0),
        (keys(2), SPACES[0].label, 1),
        (keys(1), SPACES[0].label, 1),
        (keys(1), SPACES[1].label, 1),
    ]
    assert isinstance(events[2], StoredEvent), "the order of what happened is kept"


def test_every_event_names_its_shard_by_its_digest_too():
    page = (SPACES[0], 2, keys(1), PrefixKey(b""))
    actions = [Stored(*page, b""), TierStored(*page, "ssd"), TierRemoved(*page, "host"),
               Removed(SPACES[0], 2, keys(1), "evicted", ("host", "ssd"))]  # fmt: skip

    events = [event for event in events_of(actions) if not isinstance(event, ClearedEvent)]

    assert len(events) == 6
    assert {(event.shard, event.shard_digest) for event in events} == {(2, SHARDS[2].event_label)}


@pytest.mark.parametrize(("shard", "group", "window"), [(1, "group0", 0), (2, "group1", 5)])
def test_every_event_names_the_group_of_its_shard_and_what_a_hit_needs_of_it(shard, group, window):
    page = (SPACES[0], shard, keys(1), PrefixKey(b""))
    actions = [Stored(*page, b""), TierStored(*page, "ssd"), TierRemoved(*page, "host"),
               Removed(SPACES[0], shard, keys(1), "evicted", ("host", "ssd"))]  # fmt: skip

    events = [event for event in events_of(actions) if not isinstance(event, ClearedEvent)]

    assert len(events) == 6
    assert {event.group for event in events} == {group}
    stored = [event for event in events if isinstance(event, StoredEvent)]
    assert {event.window_pages for event in stored} == {window}


def test_pages_that_were_never_ready_are_not_told_of():
    assert events_of([Abandoned(SPACES[0], keys(1))]) == []
    assert events_of([]) == []


def test_events_can_be_configured_off():
    off = Publication(EventsConfig(endpoint=""), SocketConfig(), "n", b"b" * 16)

    off.publish([Stored(SPACES[0], 0, keys(1), PrefixKey(b""), b"")])

    assert (off.endpoint, off.replay_endpoint, off.stats()) == ("", "", NO_EVENTS)
    off.close()


EVENTS = structs.replace(
    NO_EVENTS, batches_sent=4, batches_dropped=1, followers=2, snapshots_served=3,
    snapshots_refused=2, snapshots_s=1.5, audits_served=7,
)  # fmt: skip


@pytest.mark.parametrize("events", [NO_EVENTS, EVENTS], ids=["off", "on"])
def test_metrics_are_what_prometheus_can_read(events):
    node = Node("n", b"b", SlotTable(1 << 16, 2, 1), NodeLimits(1, 1), lambda: b"t")
    node.pages.counts.update(removed_evicted=5, refused_protocol=2, lookup_pages=9, hit_pages=4)
    for took_ns in (10_000, 60_000, 10**12):
        node.pages.meter.wait.observe(took_ns)
    stats = NodeStats(
        **structs.asdict(describe(node, None, SelfCheckCounts(rounds=3, pages=5))),
        populated_bytes=7, missing_bytes=3 << 20, memory_failures=5, connections=3,
        accepted_connections=9, loop_lag_s=0.5, events=events, version="1.2", mover="native",
        admin=AdminCounts(pid=1, restarts=2), unready="", pid=os.getpid(), uptime_s=7.0,
        cluster=None,
    )  # fmt: skip

    text = render(stats).decode()

    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert found["kvstore_host_capacity_bytes",] == 2 << 16
    assert found["kvstore_host_bytes", ("state", "withheld")] == 1 << 16
    assert found["kvstore_host_bytes", ("state", "free")] == 2 << 16
    assert found["kvstore_removed_total", ("cause", "evicted")] == 5
    assert found["kvstore_refused_total", ("code", "protocol")] == 2
    assert found["kvstore_removed_total", ("cause", "corrupt")] == 0, "a first one is an increase"
    waits = [found["kvstore_wait_seconds_bucket", ("le", le)] for le in ("5e-05", "0.0001", "+Inf")]
    assert waits == [1, 2, 3]
    assert found["kvstore_wait_seconds_count",] == 3
    assert found["kvstore_wait_seconds_sum",] == pytest.approx(1000.00007)
    assert found["kvstore_lookup_pages_total",] == 9
    assert found["kvstore_hit_pages_total",] == 4
    assert found["kvstore_admin_restarts_total",] == 2
    assert found["kvstore_loop_lag_seconds",] == 0.5
    (build,) = [dict(name[1:]) for name in found if name[0] == "kvstore_build_info"]
    assert build["core"] == stats.core
    if events is EVENTS:
        assert found["kvstore_event_batches_total",] == 4
        assert found["kvstore_event_snapshot_seconds_total",] == 1.5
        ended = {name[1:]: value for name, value in found.items() if "questions_total" in name[0]}
        assert len(ended) == 6
        assert ended[("end", "refused"), ("kind", "snapshots")] == 2
        assert ended[("end", "served"), ("kind", "audits")] == 7


def test_a_tier_is_a_medium_and_runs_of_pages_are_one_event():
    root = PrefixKey(b"")
    actions = [TierStored(SPACES[0], 0, keys(1), root, "ssd"),
               TierStored(SPACES[0], 0, keys(2), keys(1)[0], "ssd"),
               TierStored(SPACES[0], 0, keys(7), root, "ssd")]  # fmt: skip

    first, second = events_of(actions)

    assert isinstance(first, StoredEvent)
    assert isinstance(second, StoredEvent)
    assert (first.block_hashes, first.parent_block_hash) == (keys(1, 2), None)
    assert (first.medium, first.block_size, first.token_ids) == ("STORAGE", 2, [])
    assert second.block_hashes == keys(7)


def test_what_left_one_tier_is_told_of_as_stored_in_the_other_behind_it():
    root = PrefixKey(b"")
    actions = [TierRemoved(SPACES[0], 0, keys(2), keys(1)[0], "host"),
               TierRemoved(SPACES[0], 0, keys(1), root, "host")]  # fmt: skip

    removed, stored = events_of(actions)

    assert isinstance(removed, RemovedEvent)
    assert (removed.block_hashes, removed.medium) == (keys(2, 1), "CPU")
    assert isinstance(stored, StoredEvent)
    assert (stored.block_hashes, stored.parent_block_hash) == (keys(1, 2), None)
    assert stored.medium == "STORAGE"


@pytest.mark.parametrize("kind", [TierStored, TierRemoved])
@pytest.mark.parametrize(
    ("first", "second", "asked", "told"),
    [
        (b"aaaabbbb", b"ccccdddd", True, [0x61616161, 0x62626262, 0x63636363, 0x64646464]),
        (b"aaaabbbb", b"", True, []),
        (b"aaaabbbb", b"ccccdddd", False, []),
    ],
)
def test_pages_that_change_their_tier_tell_all_their_tokens_or_none(
    kind, first, second, asked, told
):
    moved = [kind(SPACES[0], 0, keys(1), PrefixKey(b""), "host", first),
             kind(SPACES[0], 0, keys(2), keys(1)[0], "host", second)]  # fmt: skip
    if kind is TierRemoved:
        moved.reverse()  # leaves leave first

    event = events_of(moved, tokens=asked)[-1]

    assert isinstance(event, StoredEvent)
    assert (event.block_hashes, event.token_ids) == (keys(1, 2), told)


def test_what_leaves_the_index_leaves_every_tier_it_was_in():
    events = events_of([Removed(SPACES[0], 0, keys(1), "corrupt", ("host", "ssd"))])

    assert [event.medium for event in events if isinstance(event, RemovedEvent)] == [
        "CPU",
        "STORAGE",
    ]
