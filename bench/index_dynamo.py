"""Dynamo's indexer on the events of a fleet; runs in an environment of its own.

It reads one JSON command a line and writes one JSON answer a line, as the feed does.
``SelectionService`` is what Dynamo's router has inside: it follows ZeroMQ publishers, hashes their
tokens and indexes them. ``RadixTree`` is the index alone, without sockets.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

os.environ.setdefault("DYN_LOG", "error")  # one line a decision otherwise

from dynamo.llm import (  # type: ignore[import-not-found] # see above
    RadixTree,
    SelectionService,
    compute_block_hash_for_seq,
)

from bench.index_fleet import PAGE_TOKENS, Fleet, Prompt, hashes, tokens  # see above

_MODEL: Final = "bench"
_VISIBLE_S: Final = 300.0
_PAUSE_S: Final = 0.003
_EVENT_BLOCKS: Final = 128


class Dynamo:
    """What the process does."""

    def __init__(self) -> None:
        self._service = SelectionService(indexer_threads=1)

    async def follow(self, endpoints: list[str]) -> int:
        """Register one worker an endpoint; how many."""
        for index, endpoint in enumerate(endpoints):
            await self._service.upsert_worker(
                {
                    "worker_id": index, "model_name": _MODEL,
                    "endpoint": f"http://127.0.0.1:{index + 1}", "kv_events_endpoint": endpoint,
                    "block_size": PAGE_TOKENS,
                }
            )  # fmt: skip
        return len(endpoints)

    async def visible(self, fleet: list[Any]) -> int:
        """When the last prompt of every engine was known; ns of the monotonic clock."""
        given = Fleet(*fleet)
        deadline = time.monotonic() + _VISIBLE_S
        engines = [one for one in given.workers() if one.kind == "tokens"]
        asked = [(one.place, given.last(one)) for one in engines]
        for index, prompt in reversed(asked):  # the last one is the last
            request = _by_hashes(prompt)
            while (await self._depths(request)).get(index, 0) < prompt.pages:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"worker {index} has not all its blocks")
                await asyncio.sleep(_PAUSE_S)
        return time.monotonic_ns()

    async def match(self, fleet: list[Any], seconds: float) -> dict[str, list[float]]:
        """Milliseconds of ``overlap_scores`` for the fleet's document, from hashes and tokens."""
        given = Fleet(*fleet)
        prompt = given.document()
        requests = {"hashes": _by_hashes(prompt), "tokens": _by_tokens(prompt)}
        found: dict[str, list[float]] = {}
        for name, request in requests.items():
            assert len(await self._depths(request)) == given.engines, "all have its beginning"
            until = time.monotonic() + seconds
            found[name] = []
            while time.monotonic() < until:
                began = time.perf_counter()
                await self._service.overlap_scores(request)
                found[name].append(1e3 * (time.perf_counter() - began))
                await asyncio.sleep(0)
        return found

    async def select(self, fleet: list[Any], seconds: float) -> dict[str, list[float]]:
        """Milliseconds of ``select_and_reserve`` for the fleet's document, as :meth:`match`."""
        given = Fleet(*fleet)
        prompt = given.document()
        requests = {"hashes": _by_hashes(prompt), "tokens": _by_tokens(prompt)}
        assert len(await self._depths(requests["hashes"])) == given.engines, "all have a part"
        found: dict[str, list[float]] = {}
        for name, request in requests.items():
            until = time.monotonic() + seconds
            found[name] = []
            while time.monotonic() < until:
                began = time.perf_counter()
                chosen = await self._service.select_and_reserve(request)
                found[name].append(1e3 * (time.perf_counter() - began))
                await self._service.free_reservation(chosen["selection_id"])
                await asyncio.sleep(0)
        return found

    async def _depths(self, request: dict[str, Any]) -> dict[int, int]:
        found = await self._service.overlap_scores(request)
        return {
            one["worker_id"]: one["device_blocks"]
            for one in found["workers"]
            if one["device_blocks"]
        }

    async def find_matches(self, fleet: list[Any], seconds: float) -> list[float]:
        """Milliseconds of ``RadixTree.find_matches`` for the document, with nothing else to do."""
        given = Fleet(*fleet)
        tree = RadixTree()
        for worker in given.workers():
            if worker.kind == "tokens":
                for prompt in given.prompts(worker):
                    _apply(tree, worker.place, prompt)
        asked = _local_hashes(given.document())
        assert len(tree.find_matches(asked).scores) == given.engines, "all have its beginning"
        found = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.perf_counter()
            tree.find_matches(asked).scores  # noqa: B018 # a property that works
            found.append(1e3 * (time.perf_counter() - began))
            await asyncio.sleep(0)
        return found


def _apply(tree: Any, worker: int, prompt: Prompt) -> None:
    own = hashes(prompt).tolist()
    local = _local_hashes(prompt)
    for start in range(0, prompt.pages, _EVENT_BLOCKS):
        pairs = zip(own, local, strict=True)
        blocks = [{"block_hash": one, "tokens_hash": of} for one, of in pairs]
        stored = {
            "parent_hash": own[start - 1] if start else None,
            "blocks": blocks[start : start + _EVENT_BLOCKS],
        }
        event = {"event_id": 0, "data": {"stored": stored}, "dp_rank": 0}
        tree.apply_event(worker, json.dumps(event).encode())


def _local_hashes(prompt: Prompt) -> list[int]:
    found: list[int] = compute_block_hash_for_seq(tokens(prompt).ravel().tolist(), PAGE_TOKENS)
    return found


def _by_hashes(prompt: Prompt) -> dict[str, Any]:
    signed = np.array(_local_hashes(prompt), np.uint64).view(np.int64)
    chained = hashes(prompt).view(np.int64)  # asked for; they decide nothing here
    return {
        "model_name": _MODEL, "block_hashes": signed.tolist(), "sequence_hashes": chained.tolist(),
        "isl_tokens": prompt.pages * PAGE_TOKENS,
    }  # fmt: skip


def _by_tokens(prompt: Prompt) -> dict[str, Any]:
    return {"model_name": _MODEL, "token_ids": tokens(prompt).ravel().tolist()}


async def _main() -> None:
    dynamo = Dynamo()
    commands: dict[str, Callable[..., Any]] = {
        "follow": dynamo.follow, "visible": dynamo.visible, "match": dynamo.match,
        "find_matches": dynamo.find_matches, "select": dynamo.select,
    }  # fmt: skip
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        answer = await commands[command.pop("do")](**command)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_main())
