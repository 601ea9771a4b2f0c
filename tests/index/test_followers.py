"""Following events over real ZMQ sockets: gaps, replay, restarts, loss, and engines' own hashes."""

import asyncio

import msgspec
import numpy as np
import pytest

from kvstore.events.publisher import ClearedEvent, EventPublisher
from kvstore.index.control import Source, SourceBounds
from kvstore.index.scope import scope_seed, token_chains
from tests.index.publishers import KEYS, following, node, removed, stored, usable, with_fake
from tests.loops import eventually, in_loop


@in_loop
async def test_a_real_publisher_is_followed_from_its_first_batch_on() -> None:
    async with following() as it:
        with EventPublisher(
            "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic=b"kvstore@n@aa"
        ) as publisher:
            publisher.publish([stored(KEYS[:4])])  # before anybody listened: comes by replay
            await it.follow(publisher.bound_endpoint, publisher.bound_replay_endpoint)
            await eventually(lambda: it.prefix() == 4)
            publisher.publish([stored(KEYS[4:9]), removed(KEYS[6:9])])
            await eventually(lambda: it.prefix() == 6)
            publisher.publish([ClearedEvent()])
            await eventually(lambda: it.prefix() == 0 and it.index.present().report.entries == 0)
            assert it.node.gaps_lost == 0
            await eventually(lambda: it.node.batches == 3)  # counted when it is applied whole


@in_loop
async def test_a_publisher_that_is_gone_counts_for_nothing_until_it_is_back_and_compared() -> None:
    async with following() as it:
        first = EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic=b"kvstore@n@aa")
        ends = (first.bound_endpoint, first.bound_replay_endpoint)
        try:
            first.publish([stored(KEYS[:4])])
            await it.follow(*ends)
            await eventually(lambda: it.prefix() == 4)
        finally:
            await asyncio.to_thread(first.close)
        await eventually(lambda: not it.node.current, "seen to be gone")
        with EventPublisher(*ends, topic=b"kvstore@n@bb") as second:
            await eventually(lambda: it.node.current, "connected again")
            assert it.prefix() == 0  # although the new one has published nothing at all
            assert it.node.restarts == 1
            second.publish([stored(KEYS[:2])])
            await eventually(lambda: it.prefix() == 2)


@in_loop
async def test_a_gap_is_filled_by_replay_and_nothing_is_dropped() -> None:
    async with with_fake() as (it, publisher):
        await publisher.send(0, stored(KEYS[:2]), live=False)
        await it.follow(publisher.endpoint, publisher.replay_endpoint)
        await publisher.subscribed()
        await publisher.send(1, stored(KEYS[2:4]), live=False)
        await publisher.send(2, removed(KEYS[3:4]), live=False)
        await publisher.send(3, stored(KEYS[3:6]))
        await eventually(lambda: it.prefix() == 6)
        assert it.node.gaps_lost == 0
        await eventually(lambda: it.node.batches == 4)


@in_loop
async def test_a_gap_that_cannot_be_filled_drops_what_the_worker_had() -> None:
    async with with_fake() as (it, publisher):
        await publisher.send(0, stored(KEYS[:2]), live=False)
        await it.follow(publisher.endpoint, publisher.replay_endpoint)
        await publisher.subscribed()
        assert it.prefix() == 2
        await publisher.send(2, stored(KEYS[:1]))
        await eventually(lambda: it.prefix() == 1, "only what came after the gap is believed")
        assert it.node.gaps_lost == 1


@in_loop
async def test_without_replay_a_gap_drops_what_the_worker_had() -> None:
    async with with_fake() as (it, publisher):
        await it.follow(publisher.endpoint, None)
        await publisher.subscribed()
        await publisher.send(0, stored(KEYS[:2]))
        await eventually(lambda: it.prefix() == 2)
        await publisher.send(5, stored(KEYS[:1]))
        await eventually(lambda: it.prefix() == 1)


@in_loop
async def test_another_boot_id_drops_the_old_life_and_replays_the_new_one() -> None:
    async with with_fake() as (it, publisher):
        await publisher.send(0, stored(KEYS[:8]), live=False)
        await it.follow(publisher.endpoint, publisher.replay_endpoint)
        await publisher.subscribed()
        assert it.prefix() == 8
        publisher.topic, publisher.kept = b"kvstore@n@bb", {}
        await publisher.send(0, stored(KEYS[:2]), live=False)
        await publisher.send(1, stored(KEYS[2:3]))
        await eventually(lambda: it.prefix() == 3)
        assert it.node.restarts == 1


@in_loop
async def test_without_boot_ids_a_sequence_that_runs_backwards_drops_the_old_life() -> None:
    async with with_fake(topic=b"") as (it, publisher):
        await it.follow(publisher.endpoint, None)
        await publisher.subscribed()
        for number in range(4):
            await publisher.send(number, stored(KEYS[number : number + 1]))
        await eventually(lambda: it.prefix() == 4)
        await publisher.send(0, stored(KEYS[:1]))
        await eventually(lambda: it.prefix() == 1)


@pytest.mark.parametrize("topic", [b"", b"vllm@x@boot"])
@in_loop
async def test_without_replay_what_was_known_counts_again_when_the_next_batch_fits(
    topic: bytes,
) -> None:
    """Who is there after the connection broke may be another life, which has nothing."""
    async with with_fake(topic=topic) as (it, publisher):
        await it.follow(publisher.endpoint, None)
        await publisher.subscribed()
        for number in range(3):
            await publisher.send(number, stored(KEYS[number : number + 1]))
        await eventually(lambda: it.prefix() == 3)
        await publisher.reconnected()
        await eventually(lambda: it.node.connected)
        assert (it.prefix(), it.node.current) == (0, False)
        verified_at = asyncio.get_running_loop().time() + 0.2  # nothing can be asked for
        await eventually(lambda: asyncio.get_running_loop().time() > verified_at)
        assert (it.prefix(), it.node.connected) == (0, True)
        assert "may have restarted" in it.node.why
        await publisher.send(3, stored(KEYS[3:4]))
        await eventually(lambda: it.prefix() == 4, "it is the same life")
        await publisher.reconnected()
        await eventually(lambda: it.node.connected)
        await publisher.send(0, stored(KEYS[:1]))
        await eventually(lambda: it.prefix() == 1, "another one")
        await publisher.reconnected()
        await publisher.send(7, stored(KEYS[:2]))
        await eventually(lambda: it.prefix() == 2, "something was missed")
        assert it.node.current


@in_loop
async def test_without_boot_ids_a_silent_restart_is_seen_by_its_last_batch() -> None:
    async with with_fake(topic=b"kv-events") as (it, publisher):
        for number in range(3):
            await publisher.send(number, stored(KEYS[number : number + 1]), live=False)
        await it.follow(publisher.endpoint, publisher.replay_endpoint)
        await publisher.subscribed()
        assert it.prefix() == 3
        publisher.kept = {}
        for number in range(3, -1, -1):  # the new life is as long as the old one, and different
            await publisher.send(number, stored(KEYS[number : number + 1], "GPU"), live=False)
        publisher.kept[2] = msgspec.msgpack.encode([2.0, [removed(KEYS[:1], "GPU")], None])
        await eventually(lambda: it.node.restarts == 1)
        await eventually(lambda: it.node.pages == {"GPU": 2})


@in_loop
async def test_batches_missed_at_the_end_are_found_although_nothing_more_is_published() -> None:
    async with with_fake() as (it, publisher):
        await it.follow(publisher.endpoint, publisher.replay_endpoint)
        await publisher.subscribed()
        await publisher.send(0, stored(KEYS[:5]), live=False)
        await eventually(lambda: it.prefix() == 5)


@in_loop
async def test_what_cannot_be_read_is_counted_and_drops_what_the_worker_had() -> None:
    async with with_fake() as (it, publisher):
        await publisher.send(0, stored(KEYS[:2]), live=False)
        await it.follow(publisher.endpoint, publisher.replay_endpoint)
        await publisher.subscribed()
        await publisher.send_raw([b"only", b"two"])
        await publisher.send_raw([publisher.topic, b"short", b"x"])
        await eventually(lambda: it.malformed() == 2)
        assert it.prefix() == 2  # these were no batches at all
        publisher.kept[1] = b"\xc1 not msgpack"
        await eventually(lambda: it.malformed() == 3 and it.prefix() == 0)
        await publisher.send(2, {"type": "BlockStored", "block_hashes": "no"})
        await eventually(lambda: it.malformed() == 4)
        await publisher.send(3, {"type": "SomethingNew", "x": 1}, stored(KEYS[:3]))
        await eventually(lambda: it.prefix() == 3 and it.node.skipped == 1)


@in_loop
async def test_a_replay_that_falls_silent_costs_what_was_known_and_not_the_follower() -> None:
    async with with_fake() as (it, publisher):
        it.index._service._followers._bounds = SourceBounds(
            replay_s=0.05, verify_s=0.05, foreign_blocks=100
        )
        await publisher.send(0, stored(KEYS[:2]), live=False)
        await it.follow(publisher.endpoint, publisher.replay_endpoint)
        await publisher.subscribed()
        await eventually(lambda: it.prefix() == 2)
        publisher.silent = True
        await eventually(lambda: it.prefix() == 0)
        publisher.silent = False
        await eventually(lambda: it.prefix() == 2)


@pytest.mark.parametrize("size", [16, 32, 64])
@in_loop
async def test_an_engine_with_hashes_of_its_own_is_indexed_by_its_tokens(size: int) -> None:
    tokens = list(range(1000, 1256))
    blocks = len(tokens) // size
    hashes = [2**63 + n for n in range(256 // size)]
    async with with_fake(topic=b"kv-events") as (it, publisher):
        it.index.follow(
            Source(worker="engine/v", domain="model:m", endpoint=publisher.endpoint, block_tokens=0)
        )
        await eventually(lambda: it.worker("engine/v").current)
        await publisher.subscribed()
        event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        await publisher.send(0, event)

        def prefix(lora: str = "") -> int:
            seed = scope_seed(it.table.secret, "tokens", "model:m", size, lora)
            chains = token_chains(np.array(tokens, dtype=np.uint32), size, seed)
            return usable(it.table, "engine/v", chains)

        await eventually(lambda: prefix() == blocks)
        with_lora = {**event, "block_hashes": [h + 100 for h in hashes], "lora_id": 1}
        gone = {"type": "BlockRemoved", "block_hashes": hashes[-1:], "medium": "GPU"}
        await publisher.send(1, with_lora, gone)
        await eventually(lambda: prefix() == blocks - 1)
        assert prefix("\0001") == blocks, "with this LoRA it is another prefix"
        assert prefix("1") == 0, "an id is no name"
        it.index.unfollow("engine/v")
        assert prefix() == 0
        await eventually(lambda: it.index.present().report.entries == 0)
        assert it.index.present().report.workers == []


@in_loop
async def test_a_source_that_is_named_again_is_followed_on_and_another_place_begins_anew() -> None:
    async with with_fake() as (it, publisher):
        await publisher.send(0, stored(KEYS[:2]), live=False)
        await it.follow(publisher.endpoint, publisher.replay_endpoint)
        await it.follow(publisher.endpoint, publisher.replay_endpoint)
        assert it.prefix() == 2
        it.index.follow(node(publisher.endpoint))
        assert it.prefix() == 0, "what the first place said may not be true of the second"
        await eventually(lambda: it.node.current)
