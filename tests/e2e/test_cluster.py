"""The main job with real processes: node, Conductor, prefill and decode engines, real HTTP."""

import asyncio
import json
import signal
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench import demo, replay
from bench.cluster import Cluster, ClusterError, Options, request
from bench.completion import Completion, complete
from bench.conversation import turns
from kvstore.cli.remote import Remote
from kvstore.protocol.counts import NodeStats
from kvstore.server.answers import SessionList

pytestmark = pytest.mark.timeout(240)
PROMPT = [40 + index % 50 for index in range(200)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(Options(model="tiny", decodes=2, capacity_bytes=128 << 20)) as running:
        yield running


def ask(url: str, prompt: list[int], **parameters: Any) -> Completion:
    async def once() -> Completion:
        async with aiohttp.ClientSession() as session:
            return await complete(session, url, prompt, **parameters)

    return asyncio.run(once())


def assert_equal_and_complete(figures: dict[str, Any], handoff: str) -> None:
    """What the demo prints last: every token and hash is equal, and everything was measured."""
    assert figures["requests"] == figures["tokens_equal"] == figures["hashes_equal"] == 4
    assert figures["ways"] == {handoff: 4}
    for name in ("prompt_tokens", "restored_tokens", "ttft_cold_ms", "ttft_warm_ms",
                 "overhead_ms", "restore_gbps"):  # fmt: skip
        assert figures[name] > 0, name


def test_the_demo_over_the_store_ends_with_one_json_object(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "Cluster", lambda _options: nullcontext(cluster))
    parser = ArgumentParser()
    demo.add_arguments(parser)
    words = ["--quick", "--model", "tiny", "--max-tokens", "12"]

    assert demo.run(parser.parse_args(words, Namespace(json=True))) == 0

    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert_equal_and_complete(figures, "store")
    assert figures["restored_tokens"] >= 3 * 1728, "the shared document is restored"


def test_a_seeded_conversation_gets_the_tokens_of_one_engine_that_computes_everything(
    cluster: Cluster,
) -> None:
    rows = asyncio.run(demo.converse(cluster, turns(2, 2), 12, temperature=0.9))
    figures = demo.summary(rows)
    assert figures["tokens_equal"] == figures["requests"] == 4
    assert figures["hashes_equal"] == 4
    assert all(row.restored_tokens >= 1728 for row in rows[1:]), "the shared document is restored"


def test_a_chat_through_a_pair_gets_the_tokens_of_one_engine_and_reuses_the_last_turn(
    cluster: Cluster, wait_until: Any
) -> None:
    messages = [{"role": "system", "content": "You know every harbour. " * 20},
                {"role": "user", "content": "Where do ships wait?"}]  # fmt: skip
    asked = {"max_completion_tokens": 12, "temperature": 0.9, "seed": 5, "return_token_ids": True}
    hits: list[int] = []

    def chat(url: str) -> dict[str, Any]:
        body = {"messages": messages, **asked}
        answer: dict[str, Any] = request("POST", f"{url}/v1/chat/completions", body)
        return answer

    def known() -> bool:
        body = {"model": "reference-tiny", "tokens": tokens}
        found = request("POST", f"{cluster.conductor_url}/v1/index/match", body)["matches"]
        return any(one["tokens"] >= len(tokens) // 64 * 64 for one in found)

    for _ in range(2):
        shared, alone = chat(cluster.conductor_url), chat(cluster.mono_url)
        assert shared["choices"] == alone["choices"]
        assert len(shared["choices"][0]["token_ids"]) == 12
        [decision] = request("GET", f"{cluster.conductor_url}/v1/decisions?limit=1")["decisions"]
        assert (decision["route"], decision["outcome"]) == ("/v1/chat/completions", "ok")
        assert decision["attempts"][0]["plan"] == "pair"
        hits.append(decision["attempts"][0]["predicted_hit_tokens"])
        body = {"messages": messages}
        tokens = request("POST", f"{cluster.conductor_url}/tokenize", body)["tokens"]
        assert decision["prompt_tokens"] == len(tokens) == shared["usage"]["prompt_tokens"]
        wait_until(known, what="the pages of this turn")
        messages += [alone["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    assert hits[0] == 0
    assert hits[1] >= 448, "the first turn"


def test_requests_of_a_trace_reuse_what_an_oracle_says_can_be_reused(
    cluster: Cluster, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = []
    for number in range(24):
        ids = [0, 1, 2, number % 4 + 10, number + 100]
        length = 512 * len(ids) - 100
        entry = {"timestamp": 0, "input_length": length, "output_length": 9, "hash_ids": ids}
        lines.append(json.dumps(entry))
    trace.write_text("\n".join(lines))
    calls = replay.load(trace, requests=24, block_tokens=64, max_output=6)
    options = Namespace(speed=0.0, concurrency=1)
    shared = asyncio.run(replay.replay_calls("store", cluster.conductor_url, calls, options))
    alone = asyncio.run(replay.replay_calls("alone", cluster.mono_url, calls, options))
    assert replay.first_difference(shared, alone) == ""
    assert replay.restored_tokens(cluster, shared) == replay.oracle(calls) > 0


def test_nothing_is_held_once_the_requests_have_ended(cluster: Cluster, wait_until: Any) -> None:
    def idle() -> bool:
        stats = Remote(cluster.node_admin).get("/v1/stats", NodeStats).raw
        host = stats["host"]
        held = host["writing_bytes"] + host["pinned_bytes"] + host["limbo_bytes"]
        return stats["leases"] == stats["puts"] == held == 0

    wait_until(idle, what="no lease, put or held slot at the node")
    sessions = Remote(cluster.node_admin).get("/v1/sessions", SessionList).raw["sessions"]
    assert {session["name"] for session in sessions} == {"P1", "D1", "D2"}
    prefill = next(session for session in sessions if session["name"] == "P1")
    assert prefill["prefill_s_per_token"] > 0


def test_the_conductor_follows_the_node_and_knows_what_it_holds(
    cluster: Cluster, wait_until: Any
) -> None:
    asked = ask(cluster.conductor_url, PROMPT, max_tokens=3, temperature=0.0)

    def node_tokens() -> int:
        again = ask(cluster.conductor_url, PROMPT, max_tokens=1, temperature=0.0)
        url = f"{cluster.conductor_url}/v1/decisions/{again.request_id}"
        candidates = request("GET", url)["attempts"][0]["candidates"]
        return min(candidate["node_tokens"] for candidate in candidates)

    assert asked.tokens
    wait_until(lambda: node_tokens() == len(PROMPT) // 64 * 64, what="every full page of it")
    assert request("GET", f"{cluster.conductor_url}/v1/nodes")["nodes"][0]["events"].startswith(
        f"ipc://{cluster.directory}"
    )


def test_a_decision_says_why(cluster: Cluster) -> None:
    answer = ask(cluster.conductor_url, PROMPT, max_tokens=3, temperature=0.0)
    decision = request("GET", f"{cluster.conductor_url}/v1/decisions/{answer.request_id}")
    attempt = decision["attempts"][0]
    assert attempt["prefill"] == "P1"
    assert {candidate["engine"] for candidate in attempt["candidates"]} == {"P1", "D1", "D2"}
    assert decision["outcome"] == "ok"
    assert decision["ttft_s"] > 0


def test_engines_go_on_while_the_node_is_stopped_and_after_it_was_killed(cluster: Cluster) -> None:
    expected = ask(cluster.mono_url, PROMPT, max_tokens=6, temperature=0.0).tokens
    node = cluster.services["node"].process
    node.send_signal(signal.SIGSTOP)
    try:
        stopped = ask(cluster.conductor_url, PROMPT, max_tokens=6, temperature=0.0)
    finally:
        node.send_signal(signal.SIGCONT)
    assert stopped.tokens == expected
    node.kill()
    node.wait(10)
    killed = ask(cluster.conductor_url, [*PROMPT], max_tokens=6, temperature=0.0)
    assert killed.tokens == expected


def test_a_killed_decode_engine_is_replaced_and_without_any_the_answer_is_503(
    cluster: Cluster,
) -> None:
    expected = ask(cluster.mono_url, PROMPT, max_tokens=6, temperature=0.0).tokens
    cluster.services["D1"].process.kill()
    cluster.services["D1"].process.wait(10)
    for _ in range(2):  # whichever engine was next, the answer is right
        answer = ask(cluster.conductor_url, PROMPT, max_tokens=6, temperature=0.0)
        assert answer.tokens == expected
    cluster.services["D2"].process.kill()
    cluster.services["D2"].process.wait(10)
    with pytest.raises(ClusterError, match="503"):
        ask(cluster.conductor_url, PROMPT, max_tokens=6, temperature=0.0)


def test_the_demo_command_ends_with_one_json_object() -> None:
    command = [sys.executable, "-m", "bench", "demo", "--quick", "--json", "--model", "tiny"]
    command += ["--handoff", "push"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert_equal_and_complete(json.loads(done.stdout.splitlines()[-1]), "push")


def test_the_demo_refuses_a_file_without_questions(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("no colon here\n")
    command = [sys.executable, "-m", "bench", "demo", "--prompts", str(prompts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"{prompts}:1" in done.stderr


def test_the_example_runs() -> None:
    example = Path(__file__).parents[2] / "examples" / "embedded.py"
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "stored 3 pages, restored 3, equal: True" in done.stdout, done.stderr
