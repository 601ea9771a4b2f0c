"""Goal: every admin route answers what its type says, and nothing else."""

import json

import msgspec
import pytest

from conductor.front import answers
from tests.conductor.fakes import FakeEngine, serving
from tests.loops import in_loop

TYPES = {
    "/v1/models": answers.Models,
    "/v1/engines": answers.RegisteredEngines,
    "/v1/engines/e": answers.EngineRow,
    "/v1/nodes": answers.FollowedNodes,
    "/v1/index": answers.IndexState,
    "/v1/advice": answers.ModelAdvice,
}


@pytest.mark.parametrize("path", TYPES)
@in_loop
async def test_an_answer_is_of_its_type_to_the_last_field(path: str) -> None:
    async with serving(FakeEngine("e", "mixed")) as client:
        await client.complete()
        status, answer = await client.get(path)

        typed = msgspec.convert(answer, TYPES[path], strict=True)

    assert status == 200
    assert json.loads(msgspec.json.encode(typed)) == answer
