"""Real vLLM servers, their node and a Conductor find each other as the documents say."""

import json
import sys
import tempfile
import urllib.request
from pathlib import Path

from tests.conftest import ROOT
from tests.vllm.conftest import Node, prompt
from tests.vllm.engines import ENGINE
from tests.vllm.servers import Server, ask

OPERATE, READ = "operate-token-of-tests", "read-token-of-the-node"
PAGE_TOKENS = 64
WAIT_S = 60.0
BLOCK_TOKENS = ENGINE["block_size"]


def test_the_second_decision_predicts_the_hit_that_vllm_reports(
    spawn, python, model, tmp_path, wait_until
):
    node = Node(
        spawn, tmp_path / "kv.sock", **{
            "events.endpoint": "ipc", "events.replay_endpoint": "ipc", "http.read_token": READ,
        }
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        server = Server(spawn, python, model, node.address, events=Path(folder))
        server.wait_ready()
        conductor = conductor_of(spawn)
        engine = {"id": "P", "role": "mixed", "url": server.url}
        registered = {"url": node.process.ready.group(2), "read_token": READ}
        ask(f"{conductor}/v1/engines", engine, OPERATE)
        ask(f"{conductor}/v1/nodes", registered, OPERATE)

        wait_until(lambda: not ask(f"{conductor}/v1/engines/P")["gaps"], WAIT_S, "no gaps")
        shown = ask(f"{conductor}/v1/engines/P")
        assert (shown["model"], shown["node"]) == ("tiny", "local")
        assert (shown["page_tokens"], shown["block_tokens"]) == (PAGE_TOKENS, BLOCK_TOKENS)
        assert (len(shown["spaces"]), len(shown["shards"])) == (1, 2)
        first, wanted = prompt(300, 7), {"engine/P": 300 // BLOCK_TOKENS, "node/local": 4}
        for tokens in (first, first + prompt(100, 8)):
            body = {"model": "tiny", "prompt": tokens, "max_tokens": 4, "temperature": 0.0}
            ask(f"{conductor}/v1/completions", body)
            wait_until(lambda: knows(conductor, wanted), WAIT_S, "pages are known")

        [second, before] = ask(f"{conductor}/v1/decisions?limit=2")["decisions"]
        assert before["attempts"][-1]["predicted_hit_tokens"] == 0
        attempt = second["attempts"][-1]
        reported = attempt["served"]["cached_tokens"]
        assert reported >= 300 // BLOCK_TOKENS * BLOCK_TOKENS
        assert abs(attempt["predicted_hit_tokens"] - reported) <= PAGE_TOKENS
        [candidate] = attempt["candidates"]
        assert candidate["local_tokens"] == reported, "blocks of the engine's own size"
        assert candidate["node_tokens"] == 300 // PAGE_TOKENS * PAGE_TOKENS

        body = {"model": "tiny", "prompt": first, "max_tokens": 4, "session_id": "agent-7"}
        ask(f"{conductor}/v1/completions", body)
        url = f"{node.process.ready.group(2)}/v1/conversations"
        wait_until(lambda: ask(url, token=READ)["conversations"], WAIT_S, "it is kept")
        (kept,) = ask(url, token=READ)["conversations"]
        assert (kept["conversation"], kept["pages"]) == ("agent-7", 300 // PAGE_TOKENS)


FIELDS = {"min_tokens": 8, "stop": ["no such text"], "stop_token_ids": [511], "echo": False,
          "logprobs": True, "top_logprobs": 2, "truncate_prompt_tokens": 900}  # fmt: skip
"""None of them changes the tokens. A prefill server would refuse the first one."""


def test_a_chat_through_a_pair_gets_the_tokens_of_one_engine_and_its_hit_was_expected(
    spawn, python, model, plain, tmp_path, wait_until
):
    node = Node(
        spawn, tmp_path / "kv.sock", **{
            "events.endpoint": "ipc", "events.replay_endpoint": "ipc", "http.read_token": READ,
        }
    )  # fmt: skip
    config = tmp_path / "conductor.toml"
    config.write_text(f'[[models]]\nname = "tiny"\ntokenizer = "{model}"\n')
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        servers = {}
        for name in ("P", "D"):
            events = Path(folder) / name
            events.mkdir()
            servers[name] = Server(spawn, python, model, node.address, events=events)
        conductor = conductor_of(spawn, "--config", str(config))
        registered = {"url": node.process.ready.group(2), "read_token": READ}
        ask(f"{conductor}/v1/nodes", registered, OPERATE)
        for name, role in (("P", "prefill"), ("D", "decode")):
            servers[name].wait_ready()
            engine = {"id": name, "role": role, "url": servers[name].url}
            ask(f"{conductor}/v1/engines", engine, OPERATE)
        for name in servers:
            wait_until(lambda: not ask(f"{conductor}/v1/engines/{name}")["gaps"], WAIT_S, "no gaps")  # noqa: B023

        messages = [{"role": "system", "content": "You know every page of this store. " * 6},
                    {"role": "user", "content": "Where are mine?"}]  # fmt: skip
        known = 0
        for stream, more in ((False, {}), (True, FIELDS)):
            asked = {"model": "tiny", "messages": messages}
            tokens = ask(f"{conductor}/tokenize", asked)["tokens"]
            [wanted] = plain.tokens([tokens])
            body = {**asked, "max_completion_tokens": len(wanted), "temperature": 0.0,
                    "return_token_ids": True, "stream": stream, **more}  # fmt: skip
            found, said = chat(conductor, body)
            assert found == wanted, "the tokens of an engine without a cache"

            [decision] = ask(f"{conductor}/v1/decisions?limit=1")["decisions"]
            assert (decision["outcome"], decision["prompt_tokens"]) == ("ok", len(tokens))
            [attempt] = decision["attempts"]
            assert (attempt["plan"], attempt["prefill"], attempt["decode"]) == ("pair", "P", "D")
            assert attempt["predicted_hit_tokens"] == known // BLOCK_TOKENS * BLOCK_TOKENS
            assert attempt["prefilled"]["cached_tokens"] >= attempt["predicted_hit_tokens"]
            known = len(tokens)
            blocks = {"engine/P": known // BLOCK_TOKENS, "node/local": known // PAGE_TOKENS}
            wait_until(lambda: knows(conductor, blocks), WAIT_S, "pages are known")  # noqa: B023
            messages += [{"role": "assistant", "content": said},
                         {"role": "user", "content": "And those of others?"}]  # fmt: skip

        loaded = servers["D"].metric("kvstore:loaded_tokens_total")
        assert loaded >= known // PAGE_TOKENS * PAGE_TOKENS, "what P has stored"
        shown = [ask(f"{conductor}/v1/engines/{name}")["others"] for name in servers]
        assert shown == [{"running": 0.0, "waiting": 0.0}] * 2, "nobody else asks"
        with urllib.request.urlopen(f"{conductor}/metrics", timeout=10) as answer:
            assert b'local_tokenizer{kind="chat",model="tiny"} 1.0' in answer.read()


def conductor_of(spawn, *more):
    """The URL of a Conductor."""
    process = spawn(
        [sys.executable, "-m", "conductor.service", "--port", "0",
         "--set", f"http.operate_token={OPERATE}", "--set", "health.node_s=0.1", *more],
        ready=r"listening on (\S+)", env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return process.ready.group(1)


def chat(url, body):
    """The tokens of an answer, and its text."""
    if not body["stream"]:
        [choice] = ask(f"{url}/v1/chat/completions", body)["choices"]
        return choice["token_ids"], choice["message"]["content"]
    call = urllib.request.Request(
        f"{url}/v1/chat/completions", data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(call, timeout=60) as answer:
        lines = [line.removeprefix(b"data: ") for line in answer if line.startswith(b"data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    tokens = [token for choice in choices for token in choice.get("token_ids") or []]
    return tokens, "".join(choice["delta"].get("content") or "" for choice in choices)


def knows(conductor, wanted):
    """Whether the index knows so many pages of each worker, by their events."""
    shown = ask(f"{conductor}/v1/index")["workers"]
    pages = {one["worker"]: sum(n for m, n in one["pages"].items() if m != "EXPECTED")
             for one in shown}  # fmt: skip
    return all(pages.get(worker, 0) >= count for worker, count in wanted.items())
