"""Two servers of vLLM at two nodes: decode goes on with what prefill stored at the other node."""

import signal

from bench.cluster import NodeAt, cluster_settings, has_met, loopback, node_stats
from tests.conftest import wait_for
from tests.vllm.conftest import Node, prompt
from tests.vllm.servers import Server

PROMPTS = [prompt(length, seed) for seed, length in enumerate((300, 64, 65, 40, 500))]
PAGE_TOKENS = 64
HIT_TOKENS = 256 + 64 + 64 + 448
"""Whole pages."""
SHARDS = 2
"""The model has two KV heads."""
MEET_WAIT_S = 30.0


def two_nodes(spawn, folder):
    """Two nodes that have found each other, and where each is."""
    hosts = {name: loopback() for name in ("a", "b")}
    nodes, places = [], []
    for name in hosts:
        socket = folder / f"{name}.sock"
        nodes.append(Node(spawn, socket, **cluster_settings(name, hosts, 10_000)))
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

    at_a.process.send_signal(signal.SIGKILL)
    for tokens, wanted in zip(PROMPTS, expected, strict=True):
        answer = decode.complete(tokens, len(wanted))
        assert answer["choices"][0]["token_ids"] == wanted, "without the other node"
