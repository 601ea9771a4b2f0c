"""Goal: real nodes bring the pages of a request that waits for a busy engine."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from bench.cluster import LISTENING, script
from tests.cluster_processes.conftest import ClusterScene, is_chain, read
from tests.conductor.fakes import OPERATE, FakeEngine, bearer
from tests.conftest import Spawn
from tests.faults import content
from tests.loops import eventually, in_loop

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]
PAGES = 6
PROMPT = [*range(100_000, 100_000 + PAGES * content.PAGE_TOKENS), 7]
"""Of chain 1 of the content, and one token more, which is always computed."""
SETTINGS = (
    "http.port=0", f"http.operate_token={OPERATE}", "policy.name=longest-prefix",
    "bring.prefetches=true", "health.node_s=0.2",
)  # fmt: skip


class Asked:
    """A Conductor with two nodes, and an engine with one place at each."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self.url = url

    async def get(self, path: str) -> Any:
        async with self._session.get(self.url + path) as answer:
            return await answer.json()

    async def register(self, kind: str, **body: object) -> None:
        headers = bearer(OPERATE)
        async with self._session.post(
            f"{self.url}/v1/{kind}", json=body, headers=headers
        ) as answer:
            assert answer.status == 201, await answer.text()

    async def complete(self, prompt: list[int]) -> str:
        """Ask; returns the id of the request."""
        body = {"model": "m", "prompt": prompt}
        async with self._session.post(f"{self.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return answer.headers["X-Request-Id"]

    async def knows(self, engine: str, peer_tokens: int) -> None:
        """Wait until the peers of an engine's node are known to have so much of the prompt."""
        body = {"model": "m", "tokens": PROMPT}
        async with asyncio.timeout(30.0):
            while True:
                async with self._session.post(f"{self.url}/v1/index/match", json=body) as answer:
                    rows = (await answer.json())["matches"]
                if any(
                    one["engine"] == engine and one["peer"] and one["tokens"] >= peer_tokens
                    for one in rows
                ):
                    return
                await asyncio.wait([asyncio.create_task(asyncio.Event().wait())], timeout=0.05)


@in_loop
async def test_pages_of_another_node_come_while_a_request_waits(
    scene: ClusterScene, spawn: Spawn
) -> None:
    a, b = scene.start("a", "b", events__endpoint="ipc", events__replay_endpoint="ipc")
    scene.space(b).put(content.keys(1, PAGES), content.pages(1, PAGES))
    flags = [part for one in SETTINGS for part in ("--set", one)]
    conductor = spawn([script("kvstore-conductor"), *flags], ready=LISTENING)
    engine = FakeEngine(
        "e", "mixed", max_running=1, node="a", page_tokens=content.PAGE_TOKENS,
        space=content.IDENTITY.digest.hex(),
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        asked = Asked(session, conductor.ready.group(1))
        for node in (a, b):
            await asked.register("nodes", url=node.process.ready.group(2))
        await engine.start()
        stack.push_async_callback(engine.stop)
        await asked.register("engines", id="e", role="mixed", url=engine.url)
        await asked.knows("e", PAGES * content.PAGE_TOKENS)

        engine.gate.clear()
        first = asyncio.create_task(asked.complete([1, 2, 3]))
        await eventually(lambda: engine.running == 1)
        second = asyncio.create_task(asked.complete(PROMPT))
        there = scene.space(a)
        keys = content.keys(1, PAGES)
        await eventually(lambda: there.lookup(keys).pages == PAGES, "they are at a")
        assert engine.running == 1, "nobody has asked for them yet"
        assert is_chain(1, read(there, keys))
        engine.gate.set()
        await first
        decision = await asked.get(f"/v1/decisions/{await second}")
        [brought] = decision["brought"]
        assert (brought["node"], brought["source"]) == ("a", "b")
        assert brought["tokens"] == PAGES * content.PAGE_TOKENS
