"""Goal: what the local prefix cache gains and loses can be followed from outside."""

import msgspec
import zmq

from engine_adapters.reference.kv_events import EngineEvents
from kvstore.events.publisher import END_OF_REPLAY, EventBatch, RemovedEvent, StoredEvent
from kvstore.protocol.page import page_keys
from tests.engine_adapters.reference.conftest import Ask, MakeEngine

Batch = msgspec.msgpack.Decoder(
    tuple[float, list[StoredEvent | RemovedEvent], int | None]  # an EventBatch, with its events
)


def replayed(endpoint: str) -> list[StoredEvent | RemovedEvent]:
    """Every event since the start, in order."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.RCVTIMEO, 10_000)
        client.setsockopt(zmq.LINGER, 0)
        client.connect(endpoint)
        client.send_multipart([b"", (0).to_bytes(8, "big")])
        events: list[StoredEvent | RemovedEvent] = []
        while True:
            _, topic, sequence, payload = client.recv_multipart()
            if sequence == END_OF_REPLAY:
                return events
            assert topic.startswith(b"kv-events@P1@")
            events += Batch.decode(payload)[1]


def test_pages_are_announced_by_their_keys_alone_and_withdrawn(
    make_engine: MakeEngine, ask: Ask
) -> None:
    engine = make_engine(blocks=12)  # three pages
    events = EngineEvents("P1", engine.identity, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    engine.on_change = events.publish
    first, second = [7] * 130, [9] * 130
    ask(engine, first, 2).wait()
    ask(engine, second, 2).wait()
    assert engine.close(10.0)
    assert events.replay_endpoint is not None
    seen = replayed(events.replay_endpoint)
    events.close()
    stored = [event for event in seen if isinstance(event, StoredEvent)]
    keys = page_keys(first, 64)
    assert stored[0].block_hashes == [bytes(key) for key in keys]
    assert stored[0].parent_block_hash is None
    assert not any(event.token_ids for event in stored), "nobody who follows can read prompts"
    assert stored[0].space == engine.identity.digest.hex()
    assert stored[-1].block_hashes == [bytes(key) for key in page_keys(second, 64)]
    removed = [event.block_hashes[0] for event in seen if isinstance(event, RemovedEvent)]
    assert removed == [bytes(keys[1]), bytes(keys[0])], "a tail must go before its head"
    assert isinstance(EventBatch(0.0, seen).events[0], StoredEvent)
