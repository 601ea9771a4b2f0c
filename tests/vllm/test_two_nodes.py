"""Two servers of vLLM at two nodes: decode goes on with what prefill stored at the other one.

And a Conductor tells a server which other node has its prompt.
"""

import signal
import sys

from bench.cluster import NodeAt, cluster_settings, has_met, loopback, node_stats
from tests.conftest import ROOT, wait_for
from tests.vllm.conftest import Node, prompt
from tests.vllm.servers import Server, ask

PROMPTS = [prompt(length, seed) for seed, length in enumerate((300, 64, 65, 40, 500))]
PAGE_TOKENS = 64
HIT_TOKENS = 256 + 64 + 64 + 448
"""Whole pages."""
SHARDS = 2
"""The model has two KV heads."""
MEET_WAIT_S = 30.0
OPERATE = "operate-token-of-tests"
HINT_TOKENS = 256
"""Whole pages of the prompt that the Conductor says is elsewhere."""


def two_nodes(spawn, folder):
    """Two nodes that have found each other, and where each is."""
    hosts = {name: loopback() for name in ("a", "b")}
    nodes, places = [], []
    for name in hosts:
        socket = folder / f"{name}.sock"
        settings = cluster_settings(name, hosts, 10_000)
        settings |= {"events.endpoint": "ipc", "events.replay_endpoint": "ipc"}
        nodes.append(Node(spawn, socket, **settings))
        places.append(NodeAt(name, nodes[-1].address, "", f"unix://{socket}.admin"))
    for place, other in zip(places, "ba", strict=True):
        assert wait_for(lambda: has_met(node_stats(place), [other]), MEET_WAIT_S)  # noqa: B023
    return nodes, places


def test_a_decode_server_goes_on_with_pages_of_the_prefill_servers_node(
    spawn, python, model, plain, tmp_path, wait_until
):
    expected = plain.tokens(PROMPTS)
    (at_a, at_b), places = two_nodes(spawn, tmp_path)
    prefill, decode = (Server(spawn, python, model, node.address) for node in (at_a, at_b))
    for server in (prefill, decode):
        server.wait_ready()

    for tokens, wanted in zip(PROMPTS, expected, strict=True):
        asked = {"do_remote_decode": True}
        first = prefill.complete(tokens, 1, kv_transfer_params=asked)
        told = first["kv_transfer_params"]
        assert first["choices"][0]["token_ids"] == wanted[:1]
        assert told["kvstore_node"] == "a"
        answer = decode.complete(tokens, len(wanted), kv_transfer_params=told)
        assert answer["choices"][0]["token_ids"] == wanted

    # The usage of a request with a remote prefill tells of no cached tokens.
    wait_until(lambda: decode.metric("kvstore:loaded_tokens_total") == HIT_TOKENS, 20.0, "restored")
    assert decode.metric("kvstore:remote_hit_tokens_total") == HIT_TOKENS
    counts = node_stats(places[1])["counts"]
    fetched = SHARDS * HIT_TOKENS // PAGE_TOKENS
    assert counts["peer_fetched_pages"] == fetched, "from the other node"
    assert counts["located_by_engines"] == 4, "it asked nobody where they are"
    assert not counts.get("corrupt_pages")
    told_by_the_conductor(spawn, plain, prefill, decode, places, wait_until)
    a_hint_of_another_version_is_ignored(plain, decode)

    at_a.process.send_signal(signal.SIGKILL)
    for tokens, wanted in zip(PROMPTS, expected, strict=True):
        answer = decode.complete(tokens, len(wanted))
        assert answer["choices"][0]["token_ids"] == wanted, "without the other node"


def told_by_the_conductor(spawn, plain, at_a, at_b, places, wait_until):
    """A server at node ``b`` is asked for a prompt that only node ``a`` has."""
    conductor = spawn(
        [sys.executable, "-m", "conductor.service", "--port", "0",
         "--set", f"http.operate_token={OPERATE}", "--set", "health.node_s=0.1"],
        ready=r"listening on (\S+)", env={"PYTHONPATH": str(ROOT)},
    ).ready.group(1)  # fmt: skip
    ask(f"{conductor}/v1/engines", {"id": "B", "role": "mixed", "url": at_b.url}, OPERATE)
    for place in places:
        ask(f"{conductor}/v1/nodes", {"url": place.admin}, OPERATE)
    tokens = prompt(HINT_TOKENS + 44, 11)
    (wanted,) = plain.tokens([tokens])
    at_a.complete(tokens, 1)

    def known():
        found = ask(f"{conductor}/v1/index/match", {"model": "tiny", "tokens": tokens})
        return any(row["tokens"] == HINT_TOKENS for row in found["matches"])

    wait_until(known, MEET_WAIT_S, "node a has the prompt")
    before = at_b.metric("kvstore:remote_hit_tokens_total")
    body = {
        "model": "tiny", "prompt": tokens, "max_tokens": len(wanted), "temperature": 0.0,
        "return_token_ids": True,
    }  # fmt: skip
    answer = ask(f"{conductor}/v1/completions", body)
    assert answer["choices"][0]["token_ids"] == wanted
    assert at_b.metric("kvstore:fetch_hints_total") == 1
    assert at_b.metric("kvstore:hints_ignored_total") == 0
    assert at_b.metric("kvstore:remote_hit_tokens_total") - before == HINT_TOKENS
    assert node_stats(places[1])["counts"]["located_by_engines"] == 5


def a_hint_of_another_version_is_ignored(plain, server):
    """It is counted, and the request is answered as without it."""
    tokens = prompt(300, 12)
    (wanted,) = plain.tokens([tokens])
    action = {"action_id": "1", "action_type": "kv.fetch", "action_version": "9.0", "payload": {}}
    hints = {"protocol_version": "0.1", "message_id": "1", "actions": [action]}
    answer = server.complete(tokens, len(wanted), kv_transfer_params={"kv_hints": hints})
    assert answer["choices"][0]["token_ids"] == wanted
    assert server.metric("kvstore:hints_ignored_total") == 1
    assert server.metric("kvstore:fetch_hints_total") == 1, "the one of before"
