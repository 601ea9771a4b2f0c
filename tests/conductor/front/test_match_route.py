"""``POST /v1/index/match``: one prompt or a batch, by tokens or keys; and what the index tells."""

from typing import Any

import msgspec
import pytest

from conductor.front import matching
from conductor.front.openai import BadRequestError
from kvstore.events.publisher import EventPublisher
from tests.conductor.fakes import Client, FakeEngine, like_vllm, serving
from tests.conductor.test_service import LOOPBACK, PROMPT, keys_of, stored
from tests.local_index import LocalIndex
from tests.loops import eventually, in_loop

TOKENS = list(PROMPT.encode())
KEYS = [bytes(key).hex() for key in keys_of(PROMPT)]
KEY = "ab" * 32


async def match(client: Client, **body: object) -> tuple[int, Any]:
    status, answer, _ = await client.post("/v1/index/match", {"model": "m", **body})
    return status, answer


@in_loop
async def test_tokens_and_keys_of_a_batch_are_matched_each_as_it_would_be_alone() -> None:
    with EventPublisher(LOOPBACK, LOOPBACK, topic=b"kv-events@b@aa") as publisher:
        engine = FakeEngine(
            "b", "mixed", events=publisher.bound_endpoint,
            events_replay=publisher.bound_replay_endpoint,
        )  # fmt: skip
        async with serving(engine) as client:
            publisher.publish([stored(keys_of(PROMPT)[:3])])
            await eventually(lambda: client.entries == 3)
            await eventually(lambda: client.is_current("engine/b"))
            found = {"engine": "b", "worker": "engine/b", "medium": "GPU", "peer": False}
            expected = {**found, "medium": "EXPECTED", "tokens": 0}
            own = {**found, "tokens": 12}
            by_tokens = {"prompt_tokens": len(TOKENS), "matches": [expected, own]}
            by_keys = {"keys": 4, "matches": [{**found, "tokens": 12}]}
            assert await match(client, tokens=TOKENS) == (200, by_tokens)
            assert await match(client, keys=KEYS) == (200, by_keys)
            other = {"keys": 1, "matches": [{**found, "tokens": 0}]}
            prompts = [{"tokens": TOKENS}, {"keys": KEYS}, {"keys": [KEY]}]
            status, answer = await match(client, prompts=prompts)
            assert (status, answer) == (200, {"prompts": [by_tokens, by_keys, other]})


REFUSED: list[tuple[dict[str, object], str]] = [
    ({}, "tokens"),
    ({"tokens": [1], "keys": [KEY]}, "tokens"),
    ({"tokens": [1], "prompts": [{"tokens": [1]}]}, "prompts"),
    ({"prompts": []}, "prompts"),
    ({"prompts": [{"tokens": [1]}] * 65}, "prompts"),
    ({"prompts": [{}]}, "prompts"),
    ({"prompts": [{"tokens": [1], "keys": [KEY]}]}, "prompts"),
    ({"prompts": [{"tokens": [1], "lora": "sql"}]}, "prompts"),
    ({"prompts": [{"tokens": [-1]}]}, "prompts"),
    ({"tokens": [1 << 32]}, "tokens"),
    ({"keys": ["ab" * 31]}, "keys"),
    ({"keys": [KEY + "\n"]}, "keys"),
    ({"keys": ["zz" * 32]}, "keys"),
    ({"keys": [7]}, "keys"),
    ({"keys": [KEY], "lora": "sql"}, "lora"),
    ({"keys": [KEY], "cache_salt": "s"}, "cache_salt"),
    ({"tokens": [1], "lora": 5}, "lora"),
    ({"tokens": [1], "cache_salt": "s" * 4097}, "cache_salt"),
]


@in_loop
async def test_what_cannot_be_matched_is_refused_by_its_field() -> None:
    engine = like_vllm("e")
    engine.adapters = {"sql": None}
    async with serving(engine) as client:
        for body, field in REFUSED:
            status, answer = await match(client, **body)
            assert (status, answer["error"]["param"]) == (400, field), (body, answer)
        assert (await match(client, tokens=TOKENS, lora="sql"))[0] == 200
        assert (await match(client, tokens=TOKENS, model="sql"))[0] == 200
        for wrong, field in (({"lora": "law"}, "lora"), ({"model": "law"}, "model")):
            status, answer = await match(client, tokens=TOKENS, **wrong)
            error = answer["error"]
            assert (status, error["code"], error["param"]) == (404, "model_not_found", field)


@pytest.mark.parametrize(("limit", "field"), [("TOKENS_MAX", "tokens"), ("KEYS_MAX", "keys")])
def test_a_batch_has_the_limits_of_one_prompt(
    monkeypatch: pytest.MonkeyPatch, limit: str, field: str
) -> None:
    monkeypatch.setattr(matching, limit, 4)

    def asked(*sizes: int) -> int:
        prompts = [{field: ([1] if field == "tokens" else [KEY]) * size} for size in sizes]
        body = msgspec.convert({"model": "m", "prompts": prompts}, matching.MatchBody)
        return len(body.asked())

    assert asked(2, 2) == 2
    with pytest.raises(BadRequestError, match=f"more than 4 {field} together"):
        asked(2, 3)


@in_loop
async def test_the_index_tells_how_often_its_process_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as client:
        shown = (await client.get("/v1/index"))[1]
        assert shown["faults"] == {"ended": 0, "backlog": 0}
        counts = property(lambda _: {"ended": 2, "backlog": 3})
        monkeypatch.setattr(LocalIndex, "fault_counts", counts)
        shown = (await client.get("/v1/index"))[1]
        assert shown["faults"] == {"ended": 2, "backlog": 3}
