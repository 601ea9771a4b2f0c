"""Goal: what was predicted of the first token stands in the decision, and how wrong it was."""

import pytest

from conductor.routing.decisions import Attempt, Decision
from tests.conductor.fakes import OPERATE, FakeEngine, like_vllm, serving
from tests.loops import in_loop


def decision(predicted_s: float | None, ttft_s: float | None, *, stream: bool = True) -> Decision:
    attempt = Attempt(
        plan="alone", prefill="e", decode="e", reason="", predicted_hit_tokens=0,
        candidates=None, assigned_s=1.0, predicted_ttft_s=predicted_s,  # type: ignore[arg-type]
    )  # fmt: skip
    return Decision(
        id="x",
        at="",
        route="/",
        model="m",
        policy="p",
        stream=stream,
        attempts=[attempt],
        ttft_s=ttft_s,
    )


def test_the_error_is_that_of_the_seconds_from_the_assignment_on() -> None:
    assert decision(1.0, 3.0).ttft_error == pytest.approx(0.5)
    assert decision(3.0, 3.0).ttft_error == pytest.approx(0.5)
    assert decision(2.0, 3.0).ttft_error == pytest.approx(0.0)
    assert decision(None, 3.0).ttft_error is None
    assert decision(1.0, None).ttft_error is None
    assert decision(1.0, 3.0, stream=False).ttft_error is None, "it is known of streams only"
    assert Decision(id="x", at="", route="/", model="m", policy="p", stream=True).ttft_error is None


@pytest.mark.parametrize("policy", ["earliest-first-token", "longest-prefix"])
@in_loop
async def test_a_policy_with_costs_predicts_and_its_errors_are_told(policy: str) -> None:
    async with serving(FakeEngine("e", "mixed"), policy={"name": policy}) as client:
        for _ in range(3):
            _, _, headers = await client.complete(list(range(2_000)), stream=True)
        [attempt] = (await client.decision(headers["X-Request-Id"]))["attempts"]
        _, text = await client.get("/metrics", Authorization=f"Bearer {OPERATE}")
        told = 'ttft_error{quantile="0.5"}' in text
        if policy == "longest-prefix":
            assert (attempt["predicted_ttft_s"], told) == (None, False)
        else:
            assert attempt["predicted_ttft_s"] > 0
            assert told


@in_loop
async def test_an_engine_may_tell_its_shape_and_hardware_and_nonsense_is_left_out() -> None:
    tells = FakeEngine("a", "mixed", shape="reference-tiny", hardware="cpu")
    raves = FakeEngine("b", "mixed", shape="reference-tiny", hardware="abacus")
    silent = like_vllm("c")
    async with serving(tells, raves, silent) as client:
        known = {one.info.id: one.info for one in client.conductor.registry}
        assert (known["a"].shape, known["a"].hardware) == ("reference-tiny", "cpu")
        assert (known["b"].shape, known["b"].hardware) == ("", "")
        assert (known["c"].shape, known["c"].hardware) == ("", "")
        body = {
            "id": "a", "role": "mixed", "url": tells.url, "shape": "llama3-8b", "hardware": "h100",
        }  # fmt: skip
        assert (await client.operate("/v1/engines", body))[0] == 201
        said = client.conductor.registry.get("a")
        assert said is not None
        assert (said.info.shape, said.info.hardware) == ("llama3-8b", "h100")
