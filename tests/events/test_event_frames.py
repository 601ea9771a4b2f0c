"""The events' encoding: what vLLM's readers expect of us, and what we read of vLLM's."""

import msgspec

from kvstore.events import publisher as events
from kvstore.events.publisher import ClearedEvent, EventBatch, RemovedEvent, StoredEvent

KEY = bytes(range(32))
PARENT = bytes(32)


def stored() -> StoredEvent:
    return StoredEvent(
        block_hashes=[KEY], parent_block_hash=None, token_ids=[1, 2], block_size=2, medium="CPU"
    )


def test_a_stored_event_is_the_map_that_readers_of_vllm_events_expect():
    event = StoredEvent(
        block_hashes=[KEY, 2**64 - 1],
        parent_block_hash=PARENT,
        token_ids=[1, 2, 3, 4],
        block_size=2,
        medium="CPU",
        space="ab" * 32,
        shard=3,
        group="group1",
        window_pages=4,
        boot="0badcafe",
    )

    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(event))

    assert fields == {
        "type": "BlockStored",
        "block_hashes": [KEY, 2**64 - 1],
        "parent_block_hash": PARENT,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "medium": "CPU",
        "lora_id": None,
        "lora_name": None,
        "space": "ab" * 32,
        "shard": 3,
        "group": "group1",
        "window_pages": 4,
        "boot": "0badcafe",
    }


def test_our_own_fields_are_absent_when_unset_and_required_ones_present_when_none():
    stored_fields = msgspec.msgpack.decode(msgspec.msgpack.encode(stored()))
    removed = RemovedEvent(block_hashes=[KEY], medium="GPU")
    removed_fields = msgspec.msgpack.decode(msgspec.msgpack.encode(removed))

    assert {"space", "shard", "group", "window_pages", "boot"}.isdisjoint(stored_fields)
    assert stored_fields["parent_block_hash"] is stored_fields["lora_id"] is None
    assert removed_fields == {"type": "BlockRemoved", "block_hashes": [KEY], "medium": "GPU"}


def test_a_batch_decodes_to_what_was_published():
    batch = EventBatch(
        1.5,
        (stored(), RemovedEvent(block_hashes=[KEY], medium="CPU", shard=1), ClearedEvent()),
    )

    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=EventBatch)

    assert (decoded.ts, list(decoded.events)) == (batch.ts, list(batch.events))
    assert [type(event) for event in decoded.events] == [StoredEvent, RemovedEvent, ClearedEvent]


def test_fields_that_only_newer_engines_send_are_read_over():
    newer = [
        1795208795.899,
        [
            {
                "type": "BlockStored", "block_hashes": [3976809168820834801],
                "parent_block_hash": 9624975572939930000, "token_ids": [1, 2], "block_size": 2,
                "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None],
                "group_idx": 0, "kv_cache_spec_kind": "full_attention",
            },
            {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU", "group_idx": 0},
        ],
        0,
    ]  # fmt: skip

    batch = msgspec.msgpack.decode(msgspec.msgpack.encode(newer), type=EventBatch)

    assert batch.data_parallel_rank == 0
    assert isinstance(batch.events[0], StoredEvent)
    assert batch.events[0].parent_block_hash == 9624975572939930000
    assert batch.events[1] == RemovedEvent(block_hashes=[5], medium="GPU")


def test_a_batch_is_stamped_with_the_wall_clock_unless_a_clock_is_given():
    assert 1.7e9 < events.wall_clock() < 1e10
