"""Engines of one and of two ranks on a trace: tokens and KV are those of one engine alone."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bench import replay
from tests.cluster_processes.push_scenes import Nursery, PushEngine
from tests.cluster_processes.trace_program import REQUESTS, TRACE, trace_of
from tests.conftest import Spawn

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
SPLITS = [(1, 1), (2, 1), (1, 2), (2, 2)]
"""Ranks of prefill and of decode."""
MADE_UP = 60
AT_ONCE = 3
PUSH_PORT = 7510
"""The second rank has the next one."""
_names = count()


@dataclass
class RankEngines:
    """An engine alone, and prefill and decode engines of one and of two ranks."""

    alone: PushEngine
    prefill: dict[int, PushEngine]
    decode: dict[int, PushEngine]

    @property
    def all(self) -> list[PushEngine]:
        return [self.alone, *self.prefill.values(), *self.decode.values()]


@pytest.fixture
def engines(spawn: Spawn, tmp_path: Path) -> Iterator[RankEngines]:
    nursery = Nursery(spawn, tmp_path)

    def engine(name: str, mode: str, ranks: int) -> PushEngine:
        words = ["--ranks", str(ranks), "--handoff-port", str(PUSH_PORT), "--kv-blocks", "1024"]
        made = PushEngine(nursery, name, mode, *words)
        made.start()
        return made

    running = RankEngines(
        engine("alone", "mono", 1),
        {ranks: engine(f"p{ranks}", "prefill", ranks) for ranks in (1, 2)},
        {ranks: engine(f"d{ranks}", "decode", ranks) for ranks in (1, 2)},
    )
    yield running
    for one in running.all:
        assert "Traceback" not in one.output, one.output


def answer(engine: PushEngine, call: replay.Call, **fields: Any) -> tuple[dict[str, Any], Any]:
    """What an engine answers, and the hashes of its K and V of the prompt."""
    parameters, name = {**call.parameters, **fields}, f"r{next(_names)}"
    prompt: Any = call.prompt
    told = engine.complete(prompt, parameters.pop("max_tokens"), request_id=name, **parameters)
    return told, engine.get(f"/v1/requests/{name}/kv-hashes")["layers"]


def pushed(
    engines: RankEngines, split: tuple[int, int], threads: ThreadPoolExecutor, room: int,
    call: replay.Call,
) -> list[tuple[dict[str, Any], Any]]:  # fmt: skip
    """Prefill's answer and decode's, as the Conductor would ask."""
    prefill, decode = engines.prefill[split[0]], engines.decode[split[1]]
    here = {"handoff": "push", "room": room, "do_remote_decode": True}
    there = {
        "handoff": "push", "room": room, "do_remote_prefill": True, "registry": prefill.registry,
    }  # fmt: skip
    first = threads.submit(partial(answer, prefill, call, max_tokens=1, kv_transfer_params=here))
    second = answer(decode, call, kv_transfer_params=there)
    return [first.result(), second]


def check(engines: RankEngines, calls: list[replay.Call]) -> dict[str, int]:
    """Ask all; how many were pushed, with how many bytes, in each split."""
    found: dict[str, int] = {}
    with ThreadPoolExecutor(AT_ONCE) as askers, ThreadPoolExecutor(AT_ONCE) as threads:
        alone = list(askers.map(partial(answer, engines.alone), calls))
        for at, split in enumerate(SPLITS):
            rooms = range((at + 1) << 32, ((at + 1) << 32) + len(calls))
            ask = partial(pushed, engines, split, threads)
            for call, one, (here, there) in zip(
                calls, alone, askers.map(ask, rooms, calls), strict=True
            ):
                names = f"{split}: {json.dumps(call.parameters)}"
                assert there[0]["choices"][0]["token_ids"] == one[0]["choices"][0]["token_ids"], (
                    names
                )
                assert here[1] == there[1] == one[1] != [], names
                told = [each[0]["kv_transfer_params"]["handoff"] for each in (here, there)]
                assert {each["state"] for each in told} == {"success"}, told
                name = "{}to{}".format(*split)
                found[name] = found.get(name, 0) + told[1]["bytes"]
    return found


def test_ranks_change_no_token_and_no_kv_of_a_made_up_trace(
    engines: RankEngines, tmp_path: Path
) -> None:
    calls = replay.load(trace_of(tmp_path), MADE_UP, 32, max_output=6)
    found = check(engines, calls)
    assert len(calls) == MADE_UP
    assert len(found) == len(SPLITS)
    assert min(found.values()) > 0


@pytest.mark.skipif(not TRACE.exists(), reason=f"there is no trace at {TRACE}")
def test_ranks_change_no_token_and_no_kv_of_the_real_trace(engines: RankEngines) -> None:
    calls = replay.load(TRACE, REQUESTS, 16, max_output=6)
    assert len(calls) == REQUESTS
    assert min(check(engines, calls).values()) > 0
