"""A real vLLM server, its node and a Conductor find each other as the documents say."""

import sys
import tempfile
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
        conductor = spawn(
            [sys.executable, "-m", "conductor.service", "--port", "0",
             "--set", f"http.operate_token={OPERATE}", "--set", "health.node_s=0.1"],
            ready=r"listening on (\S+)", env={"PYTHONPATH": str(ROOT)},
        ).ready.group(1)  # fmt: skip
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


def knows(conductor, wanted):
    """Whether the index knows so many pages of each worker, by their events."""
    shown = ask(f"{conductor}/v1/index")["workers"]
    pages = {one["worker"]: sum(n for m, n in one["pages"].items() if m != "EXPECTED")
             for one in shown}  # fmt: skip
    return all(pages.get(worker, 0) >= count for worker, count in wanted.items())
