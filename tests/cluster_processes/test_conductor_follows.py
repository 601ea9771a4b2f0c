"""Goal: a Conductor finds the nodes in a real etcd or Redis, and forgets those that end."""

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.cluster import LISTENING, request, script
from bench.completion import complete
from bench.store_servers import EtcdServer, RedisServer
from tests.cluster_processes.conftest import ClusterNode, ClusterScene
from tests.cluster_processes.store_scenes import KINDS, start_server
from tests.conftest import Spawn, WaitUntil, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
OPERATE = "operate-token-of-tests"
READ = "read-token-of-all-nodes"
PROMPT = [40 + index % 50 for index in range(300)]
FULL_PAGES = 256
"""Tokens of the prompt in full pages of 64."""
LEASE_WAIT_S = 8.0
"""Shorter than the lease: the record of a node that ends is taken away."""
ENGINE_WAIT_S = 90.0


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EtcdServer | RedisServer]:
    with start_server(request.param, tmp_path / "server") as made:
        yield made


class Following:
    """A Conductor that was told of a store, and of no node."""

    def __init__(self, spawn: Spawn, server: EtcdServer | RedisServer, folder: Path) -> None:
        token = folder / "read-token"
        token.write_text(f"{READ}\n")
        kind = "etcd" if isinstance(server, EtcdServer) else "redis"
        settings = {
            "http.port": 0, "http.operate_token": OPERATE, "cluster.name": "blue",
            "cluster.membership": kind, "cluster.read_token_file": token,
            f"{kind}.endpoints": server.endpoint,
        }  # fmt: skip
        flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        self.process = spawn([script("kvstore-conductor"), *flags], ready=LISTENING)
        self.url = self.process.ready.group(1)

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {one["id"]: one for one in self.get("/v1/nodes")["nodes"]}

    def state(self) -> str:
        return str(self.get("/v1/nodes")["membership"]["state"])

    def follows(self, *names: str) -> bool:
        """Whether exactly these nodes are followed, and their pages count."""
        workers = self.get("/v1/index")["workers"]
        current = {one["worker"] for one in workers if one["current"]}
        return set(self.nodes()) == set(names) and {f"node/{name}" for name in names} <= current

    def get(self, path: str) -> Any:
        return request("GET", f"{self.url}{path}")

    def register(self, engine: str, role: str, url: str) -> None:
        body = {"id": engine, "role": role, "url": url}
        request("POST", f"{self.url}/v1/engines", body, OPERATE)

    def matched(self, worker: str) -> int:
        """Tokens of the prompt that a worker has in memory."""
        body = {"model": "reference-tiny", "tokens": PROMPT}
        matches = request("POST", f"{self.url}/v1/index/match", body)["matches"]
        return max((one["tokens"] for one in matches if one["worker"] == worker), default=0)

    def candidates(self, prompt: list[int]) -> dict[str, dict[str, Any]]:
        """The candidates of a request's decision, by engine."""
        answer = ask(self.url, prompt)
        [attempt] = self.get(f"/v1/decisions/{answer}")["attempts"]
        return {one["engine"]: one for one in attempt["candidates"]}


def ask(url: str, prompt: list[int]) -> str:
    """Compute one token; returns the id of the request."""

    async def once() -> str:
        async with aiohttp.ClientSession() as session:
            done = await complete(session, url, prompt, max_tokens=1, temperature=0.0)
            return done.request_id

    return asyncio.run(once())


def start_engine(spawn: Spawn, name: str, mode: str, node: ClusterNode) -> str:
    """A reference engine at a node; returns its URL."""
    arguments = [sys.executable, "-m", "engine_adapters.reference", "--mode", mode, "--id", name]
    arguments += ["--store", node.address, "--prefix-cache", "off", "--kv-blocks", "256"]
    return spawn(arguments, ready=LISTENING, timeout_s=ENGINE_WAIT_S).ready.group(1)


def test_nodes_are_found_without_a_list_and_a_candidate_shows_what_its_peer_has(
    scene: ClusterScene,
    server: EtcdServer | RedisServer,
    spawn: Spawn,
    tmp_path: Path,
    wait_until: WaitUntil,
) -> None:
    conductor = Following(spawn, server, tmp_path)
    a, b = scene.add("a", "b")
    kind = "etcd" if isinstance(server, EtcdServer) else "redis"
    told = {
        "cluster__membership": kind,
        f"{kind}__endpoints": server.endpoint,
        "http__read_token": READ,
    }
    told |= {"events__endpoint": "ipc", "events__replay_endpoint": "ipc"}
    for node in (a, b):
        node.start([], **told)
    wait_until(lambda: conductor.follows("a", "b"), what="both nodes followed")
    assert {one["source"] for one in conductor.nodes().values()} == {"membership"}

    at_a = start_engine(spawn, "P", "prefill", a)
    at_b = start_engine(spawn, "D", "decode", b)
    conductor.register("P", "prefill", at_a)
    conductor.register("D", "decode", at_b)
    ask(at_a, PROMPT)
    wait_until(lambda: conductor.matched("node/a") == FULL_PAGES, what="the prompt's pages on a")
    wait_until(lambda: conductor.get("/v1/engines/D")["peers"] == ["a"], what="D at its node")
    shown = conductor.candidates(PROMPT)
    assert (shown["P"]["node_tokens"], shown["P"]["peer_tokens"]) == (FULL_PAGES, 0)
    assert (shown["D"]["usable_tokens"], shown["D"]["peer_tokens"]) == (0, FULL_PAGES)

    a.signal(signal.SIGKILL)
    assert wait_for(lambda: set(conductor.nodes()) == {"b"}, LEASE_WAIT_S), conductor.nodes()
    wait_until(lambda: conductor.get("/v1/engines/D")["peers"] == [])

    server.kill()
    wait_until(lambda: conductor.state() == "away")
    assert conductor.follows("b"), "what was told stays"
    server.start()
    wait_until(lambda: conductor.state() == "current")
