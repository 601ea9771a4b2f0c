"""Goal: a client that is refused hears why and when to come again, and an operator sees it."""

import asyncio
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from conductor.config import ConductorConfig, load_conductor
from conductor.service import admission_rules
from kvstore.protocol.errors import ConfigError
from tests.conductor.fakes import Client, FakeEngine, serving
from tests.loops import eventually, in_loop

CLASSES = (
    {"name": "default", "ttft_s": 1000.0},
    {"name": "chat", "ttft_s": 0.001, "priority": -1},
)


async def value(client: Client, name: str, **labels: str) -> float:
    status, text = await client.get("/metrics")
    assert status == 200
    found = [
        one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.name == f"kvstore_conductor_{name}" and one.labels == labels
    ]
    assert len(found) == 1, (name, labels)
    return found[0]


@in_loop
async def test_a_refused_client_gets_429_and_when_to_come_again() -> None:
    engine = FakeEngine("e", "mixed")
    sections = {"admission": {"mode": "prediction"}, "classes": CLASSES}
    async with serving(engine, policy={"name": "earliest-first-token"}, **sections) as client:
        prompt = list(range(50_000))
        status, _, headers = await client.complete(prompt, max_tokens=40)
        assert status == 200
        admitted = await client.decision(headers["X-Request-Id"])
        assert admitted["judgement"]["refused"] == ""
        assert admitted["judgement"]["output_tokens"] == 40
        assert admitted["judgement"]["ttft_s"] > 0.1

        body = {"model": "m", "prompt": prompt}
        for named in ({"X-Service-Class": "chat"}, {}):
            fields = {} if named else {"service_tier": "chat"}
            status, answer, headers = await client.post(
                "/v1/completions", {**body, **fields}, **named
            )
            assert (status, answer["error"]["code"]) == (429, "overloaded")
            assert answer["error"]["type"] == "rate_limit_error"
            assert int(headers["Retry-After"]) >= 1
            assert re.search(r"not 0.001 \(class chat\)", answer["error"]["message"])
        refused = await client.decision(headers["X-Request-Id"])
        assert refused["judgement"]["service_class"] == "chat"
        assert (refused["judgement"]["refused"], refused["attempts"]) == ("prefill", [])
        assert refused["outcome"] == "rejected"
        assert (
            await value(client, "admission_total", **{"class": "chat", "outcome": "prefill"}) == 2
        )
        assert (
            await value(client, "admission_total", **{"class": "default", "outcome": "admitted"})
            == 1
        )
        assert len(engine.requests) == 1


@in_loop
async def test_a_class_that_does_not_exist_is_an_error_in_the_header_and_ignored_in_the_body() -> (
    None
):
    engine = FakeEngine("e", "mixed")
    async with serving(engine, classes=CLASSES) as client:
        body = {"model": "m", "prompt": "x", "service_tier": "auto"}
        status, _, headers = await client.post("/v1/completions", body)
        assert status == 200
        assert engine.requests[0]["service_tier"] == "auto"
        decision = await client.decision(headers["X-Request-Id"])
        assert decision["judgement"]["service_class"] == "default"
        status, answer, _ = await client.post("/v1/completions", body, **{"X-Service-Class": "no"})
        assert (status, answer["error"]["param"]) == (400, "X-Service-Class")
        assert "chat" in answer["error"]["message"]


@in_loop
async def test_an_urgent_class_is_served_first() -> None:
    engine = FakeEngine("e", "mixed", max_running=1)
    async with serving(engine, classes=CLASSES) as client:
        engine.gate.clear()
        tasks = []
        for number, service in enumerate(["default", "default", "chat"]):
            body = {"model": "m", "prompt": f"{number}"}
            headers = {"X-Service-Class": service}
            tasks.append(asyncio.create_task(client.post("/v1/completions", body, **headers)))
            await eventually(lambda: client.conductor.proxy.active == len(tasks))
        await eventually(lambda: len(client.conductor.queue) == 2)
        engine.gate.set()
        await asyncio.gather(*tasks)
        assert [one["prompt"] for one in engine.requests] == ["0", "2", "1"]


@in_loop
async def test_what_answers_had_is_learned_and_its_error_told() -> None:
    engine = FakeEngine("e", "mixed")
    async with serving(engine) as client:
        for _ in range(3):
            await client.complete(stream=True)
        assert await value(client, "output_tokens_bias") > 1
        assert await value(client, "output_tokens_error", quantile="0.5") > 1


def test_without_classes_there_is_one_and_two_of_one_name_are_refused(tmp_path: Path) -> None:
    rules = admission_rules(ConductorConfig())
    assert [one.name for one in rules.classes] == ["default"]
    path = tmp_path / "conductor.toml"
    path.write_text('[[classes]]\nname = "a"\n[[classes]]\nname = "a"\n')
    with pytest.raises(ConfigError, match="a is there twice"):
        load_conductor(path, environ={})
    path.write_text("".join(f'[[classes]]\nname = "c{one}"\n' for one in range(65)))
    with pytest.raises(ConfigError, match="at most 64 are possible"):
        load_conductor(path, environ={})
