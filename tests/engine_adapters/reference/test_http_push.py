"""Goal: engines that push as processes: what a router sends and reads, and what a death costs."""

import asyncio
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine_adapters.reference.request import Push
from tests.conftest import Process, Spawn, WaitUntil
from tests.engine_adapters.reference.conftest import Ask, MakeEngine
from tests.engine_adapters.reference.pushed import OPTIONS
from tests.engine_adapters.reference.test_http import scenario, service

LONG = ("A prompt that takes the tiny model a second or more to compute. " * 100)[:6000]
SHORT = "Tell me about pages, slots and leases. " * 6
WAIT_S = 60.0


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    os.write(descriptor, b"a secret for tests, of 32 bytes.")
    os.close(descriptor)
    return path


class Served:
    """An engine as a process."""

    def __init__(self, spawn: Spawn, mode: str, secret: Path, *more: str) -> None:
        words = ["--mode", mode, "--threads", "1", *more]
        words += ["--handoff", "push", "--handoff-secret-file", str(secret)]
        command = [sys.executable, "-m", "engine_adapters.reference", *words]
        self.process: Process = spawn(command, ready=r"listening on (http://\S+)")
        self.url = self.process.ready.group(1)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=WAIT_S) as answer:
            return json.load(answer)

    def metrics(self) -> str:
        with urllib.request.urlopen(self.url + "/metrics", timeout=WAIT_S) as answer:
            return answer.read().decode()  # type: ignore[no-any-return]

    def complete(self, **body: Any) -> tuple[int, Any]:
        fields = {"max_tokens": 8, "temperature": 0, "return_token_ids": True} | body
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(fields).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    @property
    def registry(self) -> str:
        return str(self.get("/v1/engine")["handoff"]["push"]["registry"])


class PushRouter:
    """Sends a request to both engines at once, as the Conductor does."""

    def __init__(self, prefill: Served, decode: Served) -> None:
        self.prefill, self.decode = prefill, decode
        self.registry = prefill.registry
        self.threads = ThreadPoolExecutor(4)

    def ask(self, prompt: str, room: int, **more: Any) -> tuple[Future[Any], Future[Any]]:
        told = {"handoff": "push", "room": room}
        here = told | {"do_remote_decode": True}
        there = told | {"do_remote_prefill": True, "registry": self.registry}
        body = {"prompt": prompt, "request_id": f"r{room}"} | more
        return (
            self.threads.submit(self.prefill.complete, **body, kv_transfer_params=here),
            self.threads.submit(self.decode.complete, **body, kv_transfer_params=there),
        )

    def close(self) -> None:
        self.threads.shutdown()


def told(answer: Future[Any]) -> dict[str, Any]:
    status, body = answer.result(WAIT_S)
    assert status == 200, body
    return body["kv_transfer_params"]["handoff"]  # type: ignore[no-any-return]


def ids(answer: Future[Any]) -> list[int]:
    return answer.result(WAIT_S)[1]["choices"][0]["token_ids"]  # type: ignore[no-any-return]


def test_a_router_pushes_and_reads_how_it_went(
    spawn: Spawn, secret: Path, make_engine: MakeEngine, ask: Ask
) -> None:
    prefill, decode = (
        Served(spawn, mode, secret, "--handoff-warm-up") for mode in ("prefill", "decode")
    )
    for engine, tokens in ((prefill, 1), (decode, 3)):  # it was warm before it said that it listens
        assert f"output_tokens_total {tokens}.0" in engine.metrics()
    assert decode.get("/v1/engine")["handoff"] == {"push": {}}
    expected = ask(make_engine(), SHORT, 8).wait().tokens
    router = PushRouter(prefill, decode)
    room = (1 << 63) - 1
    here, there = router.ask(SHORT, room, request_id="r7")

    assert ids(there) == expected
    assert ids(here) == ids(there)[:1]
    for answer in (here, there):
        report = told(answer)
        assert (report["way"], report["state"], "code" in report) == ("push", "success", False)
        assert report["bytes"] > 0
        assert set(report["seconds"]) == {"bootstrapping", "waiting_for_input", "transferring"}
    assert here.result()[1]["kv_transfer_params"]["position"] == len(SHORT)
    assert set(there.result()[1]["kv_transfer_params"]) == {"handoff"}
    hashes = [engine.get("/v1/requests/r7/kv-hashes") for engine in (prefill, decode)]
    assert hashes[0] == hashes[1]
    assert prefill.get("/v1/handoffs") == decode.get("/v1/handoffs") == {"handoffs": []}
    assert 'handoffs_total{cause="",state="success"} 1.0' in decode.metrics()
    router.close()


HERE = {"handoff": "push", "room": 1, "do_remote_decode": True}
THERE = {"handoff": "push", "room": 1, "do_remote_prefill": True, "registry": "http://127.0.0.1:9"}
WRONG = {
    "prefill": [
        (HERE | {"handoff": "pull"}, "handoff"),
        ({"handoff": "push", "do_remote_decode": True}, "room"),
        (HERE | {"room": -1}, "room"),
        (HERE | {"room": 1 << 63}, "room"),
        (HERE | {"room": "1"}, "room"),
        (HERE | {"room": 1.5}, "room"),
        (HERE | {"rooms": 1}, "rooms"),
        (HERE | {"registry": "http://127.0.0.1:9"}, "registry"),
        (HERE | {"do_remote_prefill": True}, "do_remote_decode"),
        (THERE, "do_remote_decode"),
    ],
    "decode": [
        (HERE, "do_remote_prefill"),
        (THERE | {"registry": ""}, "registry"),
        (THERE | {"registry": "ftp://x"}, "registry"),
        (THERE | {"registry": 5}, "registry"),
        (THERE | {"do_remote_prefill": 1}, "do_remote_prefill"),
    ],
    "mono": [(HERE, "handoff"), (THERE, "handoff")],
}


@pytest.mark.parametrize("mode", WRONG)
def test_wrong_parameters_of_a_push_are_refused_naming_the_field(mode: Any) -> None:
    async def run() -> None:
        async with service(mode=mode, handoff=OPTIONS) as s:
            for parameters, field in WRONG[mode]:
                body = {"prompt": "x", "kv_transfer_params": parameters}
                status, answer = await s.post("/v1/completions", body)
                assert status == 400, (parameters, answer)
                message = answer["error"]["message"]
                assert message.startswith("kv_transfer_params"), message
                assert field in message, message
            assert await s.get("/v1/handoffs") == (200, {"handoffs": []})

    scenario(run)


def test_an_engine_lists_where_its_handoffs_are_and_which_rank_is_missing(
    make_engine: MakeEngine, ask: Ask
) -> None:
    prefill = make_engine(mode="prefill", handoff=OPTIONS)
    registry = prefill.handoff["push"]["registry"]

    async def run() -> None:
        async with service(mode="decode", handoff=OPTIONS) as s:
            fields = {"kv_transfer_params": THERE | {"room": 5_000, "registry": registry}}
            waiting = asyncio.ensure_future(s.complete(prompt=SHORT, **fields))
            await s.until(lambda: [e.state for e in s.engine.handoffs()] == ["WAITING_FOR_INPUT"])
            (one,) = (await s.get("/v1/handoffs"))[1]["handoffs"]
            assert one["state"] == "waiting_for_input"
            assert set(one) == {"room", "state", "seconds", "bytes", "missing_ranks"}
            assert (one["room"], one["bytes"], one["missing_ranks"]) == (5_000, 0, [0])
            assert 0 <= one["seconds"] < 10
            here = ask(prefill, SHORT, to_handoff=True, push=Push(5_000))
            answer = await waiting
            assert answer["kv_transfer_params"]["handoff"]["state"] == "success"
            await asyncio.to_thread(here.wait)
            assert await s.get("/v1/handoffs") == (200, {"handoffs": []})

    scenario(run)


def test_a_room_that_was_used_is_refused_and_a_prefill_that_is_not_there_costs_no_token() -> None:
    async def run() -> None:
        async with service(mode="decode", handoff=OPTIONS) as s:
            fields = {"kv_transfer_params": THERE}
            answer = await s.complete(**fields)
            assert answer["kv_transfer_params"]["handoff"]["code"] == "unreachable"
            assert answer["choices"] == (await s.complete())["choices"]
            status, refused = await s.post("/v1/completions", {"prompt": "x", **fields})
            assert status == 400
            assert refused["error"]["message"].startswith("kv_transfer_params.room")

    scenario(run)


def in_the_middle(engine: Served) -> bool:
    """Whether it has a push that KV is moving for."""
    found = engine.get("/v1/handoffs")["handoffs"]
    return any(one["state"] == "transferring" and one["bytes"] for one in found)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_when_prefill_dies_or_stops_in_the_middle_decode_goes_on_by_itself(
    spawn: Spawn,
    secret: Path,
    make_engine: MakeEngine,
    ask: Ask,
    wait_until: WaitUntil,
    number: signal.Signals,
) -> None:
    prefill = Served(spawn, "prefill", secret, "--token-budget", "16")
    decode = Served(spawn, "decode", secret)
    expected = ask(make_engine(blocks=512), LONG, 8).wait().tokens
    router = PushRouter(prefill, decode)
    here, there = router.ask(LONG, 1)
    wait_until(lambda: in_the_middle(decode))
    prefill.process.send_signal(number)

    assert ids(there) == expected
    report = told(there)
    wanted = "peer_closed" if number is signal.SIGKILL else "peer_silent"
    assert (report["state"], report["code"]) == ("failed", wanted)
    assert decode.complete(prompt=SHORT)[0] == 200
    assert decode.get("/v1/handoffs") == {"handoffs": []}
    prefill.process.kill()
    assert here.exception(WAIT_S) is not None
    router.close()


def test_a_decode_that_is_left_or_dies_in_the_middle_ends_the_push_and_prefill_serves_others(
    spawn: Spawn, secret: Path, wait_until: WaitUntil
) -> None:
    prefill = Served(spawn, "prefill", secret, "--token-budget", "16")
    decode = Served(spawn, "decode", secret)
    router = PushRouter(prefill, decode)
    told_there = {
        "handoff": "push", "room": 1, "do_remote_prefill": True, "registry": router.registry,
    }  # fmt: skip

    async def leave() -> None:
        _, writer = await asyncio.open_connection(*decode.url.removeprefix("http://").split(":"))
        body = json.dumps({"prompt": LONG, "kv_transfer_params": told_there}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        await asyncio.to_thread(wait_until, lambda: in_the_middle(decode))
        writer.close()

    here = router.threads.submit(
        prefill.complete, prompt=LONG,
        kv_transfer_params={"handoff": "push", "room": 1, "do_remote_decode": True},
    )  # fmt: skip
    asyncio.run(leave())

    assert told(here)["code"] == "aborted"
    wait_until(lambda: decode.get("/v1/handoffs") == {"handoffs": []})
    assert "reference_engine_free_blocks 2048.0" in decode.metrics()

    here, there = router.ask(f"2 {LONG}", 2)  # of no page that prefill has
    wait_until(lambda: in_the_middle(decode))
    decode.process.kill()

    report = told(here)
    assert (report["state"], report["code"]) == ("failed", "peer_closed")
    assert here.result()[1]["choices"][0]["finish_reason"] == "handoff_failed"
    assert there.exception(WAIT_S) is not None
    assert prefill.complete(prompt=SHORT)[0] == 200
    wait_until(lambda: "reference_engine_running 0.0" in prefill.metrics())
    router.close()
