"""Goal: what a live Conductor has decided, its dispatcher decides again from the journal alone."""

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conductor.front import journaling
from conductor.front.journaling import JournalFile
from conductor.routing.journal import (
    ArriveInput,
    ClosedInput,
    EnginesInput,
    FailedInput,
    ForgottenInput,
    LearnInput,
    OthersInput,
    Stepped,
    UntoldInput,
)
from conductor.routing.policy import POLICIES
from conductor.service import main
from conductor.simulator.journal import read_journal, replay
from kvstore.protocol.errors import ConfigError
from tests.conductor.fakes import Client, FakeEngine, serving
from tests.conductor.front.test_front import raw
from tests.loops import eventually, in_loop

SECRET = "the words of a prompt"
MACHINE = {"shape": "llama3-8b", "hardware": "h100"}


async def load(client: Client, *engines: FakeEngine) -> None:
    """Requests of all kinds, one engine that fails and comes back, and one that is removed."""
    first, *rest = engines
    for engine in engines:
        engine.gate.clear()
    waiting = [
        asyncio.create_task(client.complete(f"{SECRET} {n}", user=f"t{n % 2}", stream=n % 2 == 0))
        for n in range(6)
    ]
    await eventually(lambda: any(one.running for one in engines))
    gone = asyncio.create_task(client.complete("one that leaves"))
    await eventually(lambda: client.conductor.proxy.active == 7)
    gone.cancel()
    for engine in engines:
        engine.gate.set()
    await asyncio.gather(*waiting)
    for engine in engines:
        engine.broken = "reset"
    assert (await client.complete("they fail"))[0] >= 500
    for engine in rest:
        engine.broken = ""
    first.healthy = False
    one = client.conductor.registry.get(first.id)
    assert one is not None
    await eventually(lambda: one.health.state == "dead")
    await asyncio.gather(*(client.complete(f"{n}") for n in range(4)))
    first.broken, first.healthy = "", True
    await client.register(first)
    assert await client.delete(f"/v1/engines/{rest[-1].id}") == 204
    await asyncio.gather(*(client.chat(f"{SECRET} {n}", max_tokens=5) for n in range(4)))
    await client.register(rest[-1])
    assert (await client.complete(SECRET))[0] == 200


def fleet(kind: str) -> list[FakeEngine]:
    if kind == "mixed":
        return [FakeEngine(name, "mixed", max_running=2, **MACHINE) for name in "abc"]
    found = []
    for name, role in (("p1", "prefill"), ("p2", "prefill"), ("d1", "decode"), ("d2", "decode")):
        push = {"registry": "http://127.0.0.1:9"} if role == "prefill" else {}
        offer: dict[str, Any] = {"handoff": {"push": push}} if kind == "push" else {}
        found.append(FakeEngine(name, role, max_running=2, **MACHINE, **offer))
    return found


@pytest.mark.parametrize("kind", ["mixed", "pairs", "push"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_journal_of_a_live_run_decides_the_same_again(
    policy: str, kind: str, tmp_path: Path
) -> None:
    path, engines = tmp_path / "journal.jsonl", fleet(kind)

    @in_loop
    async def run() -> None:
        engines[0].metrics = "vllm:num_requests_running 3\nvllm:num_requests_waiting 1\n"
        async with serving(
            *engines, policy={"name": policy, "lends": kind == "mixed"},
            decisions={"journal_file": str(path)}, admission={"mode": "prediction"},
            queue={"tries": 2, "waiting_max": 4},
        ) as client:  # fmt: skip
            await load(client, *engines)
            _, metrics = await client.get("/metrics")
            assert "kvstore_conductor_journal_written 1.0" in metrics

    run()
    head, lines = read_journal(path)
    assert head.policy == policy
    decided = [one for one in lines if isinstance(one, Stepped) and one.effects]
    assert len(decided) >= 10
    kinds = {type(one) for one in lines}
    assert {EnginesInput, FailedInput, ForgottenInput, ClosedInput} <= kinds
    assert (LearnInput in kinds) == (POLICIES[policy].needs_prefixes)
    assert (UntoldInput in kinds) == (kind == "mixed")
    assert replay(head, lines) == []
    assert main(["simulate", "--replay", str(path)]) == 0
    assert SECRET not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_engines_say_of_their_failures_is_told_to_clients_and_not_written(
    tmp_path: Path,
) -> None:
    """It may repeat the prompt."""
    path = tmp_path / "journal.jsonl"

    @in_loop
    async def run() -> None:
        [engine] = engines = [FakeEngine("a", "mixed")]
        async with serving(*engines, decisions={"journal_file": str(path)}) as client:
            engine.status = 500
            status, answer, _ = await client.complete()
            assert status == 503
            assert "as told" in answer["error"]["message"]

    run()
    head, lines = read_journal(path)
    assert any(isinstance(one, FailedInput) for one in lines)
    assert "as told" not in path.read_text()
    assert replay(head, lines) == []


def test_another_policy_would_have_decided_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"

    @in_loop
    async def run() -> None:
        engines = fleet("mixed")
        decisions = {"journal_file": str(path)}
        async with serving(*engines, policy={"name": "least-loaded"}, decisions=decisions) as one:
            await load(one, *engines)

    run()
    head, lines = read_journal(path)
    other = msgspec.structs.replace(head, policy="random")
    [difference] = replay(other, lines)
    assert difference.before != difference.now
    without = [one for one in lines if not isinstance(one, EnginesInput)]
    assert replay(head, without), "it depends on the engines"


def test_requests_of_others_are_inputs_too(tmp_path: Path) -> None:
    path, engines = tmp_path / "journal.jsonl", fleet("mixed")

    @in_loop
    async def run() -> None:
        for engine, running in zip(engines, (9, 5, 0), strict=True):
            engine.metrics = f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\n"
        decisions = {"journal_file": str(path)}
        async with serving(*engines, policy={"name": "least-loaded"}, decisions=decisions) as one:
            others = one.conductor.queue.dispatcher.loads.others
            await eventually(lambda: all(others.reported(engine.id) for engine in engines))
            for _ in range(4):
                assert (await one.complete())[1]["choices"][0]["text"] == "whole from c"

    run()
    head, lines = read_journal(path)
    assert replay(head, lines) == []
    assert replay(head, [one for one in lines if not isinstance(one, OthersInput)])


def test_costs_of_an_earlier_run_are_in_it(tmp_path: Path) -> None:
    path, costs = tmp_path / "journal.jsonl", tmp_path / "costs"
    heads = []
    for _ in range(2):

        @in_loop
        async def run() -> None:
            engines = fleet("mixed")
            decisions, policy = {"journal_file": str(path)}, {"name": "earliest-first-token"}
            async with serving(
                *engines, policy=policy, decisions=decisions, costs={"file": str(costs)}
            ) as client:
                for n in range(4):
                    assert (await client.complete(f"{n}" * 9, stream=True))[0] == 200

        run()
        head, lines = read_journal(path)
        assert replay(head, lines) == []
        heads.append(head)
    assert heads[0].costs != heads[1].costs
    assert read_journal(tmp_path / "journal.jsonl.1")[0] == heads[0], "the earlier one is kept"


# The file


def stepped(at: float) -> Stepped:
    return Stepped(at, [["assign", str(at)]])


def test_a_journal_ends_with_a_whole_line_when_it_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wait_until: Any
) -> None:
    path = tmp_path / "journal.jsonl"
    journal = JournalFile(path, 100)
    for at in range(20):
        journal.write(stepped(at))
    wait_until(lambda: journal.ended, what="it is full")
    journal.write(stepped(99))
    journal.close()
    lines = path.read_bytes().splitlines()
    assert 1 <= len(lines) <= 3
    assert path.stat().st_size <= 100
    assert [json.loads(line)["at"] for line in lines] == list(range(len(lines)))
    assert "100 bytes are full" in journal.ended
    assert len([one for one in caplog.records if "it ends here" in one.getMessage()]) == 1


def test_a_disk_that_does_not_keep_up_ends_it_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journaling, "_WAITING_MAX", 2)
    gate: list[Any] = []
    write = journaling._write_all

    def slow(*arguments: Any) -> int:
        while not gate:
            pass
        return write(*arguments)

    monkeypatch.setattr(journaling, "_write_all", slow)
    journal = JournalFile(tmp_path / "journal.jsonl", 1 << 20)
    for at in range(8):
        journal.write(stepped(at))
    assert journal.ended == "the disk is too slow"
    gate.append(True)
    journal.close()


def test_a_line_that_cannot_be_written_is_not_half_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    path, real, calls = tmp_path / "journal.jsonl", journaling.os.write, [0]

    def failing(fd: int, raw: bytes) -> int:
        calls[0] += 1
        if calls[0] == 3:
            raise OSError(28, "No space left on device")
        return real(fd, raw if calls[0] == 1 else raw[:5])

    journal = JournalFile(path, 1 << 20)
    monkeypatch.setattr(journaling.os, "write", failing)
    journal.write(stepped(1))
    journal.write(stepped(2))
    wait_until(lambda: journal.ended, what="it has failed")
    assert journal.ended == "No space left on device"
    journal.close()
    monkeypatch.undo()
    assert [json.loads(line)["at"] for line in path.read_bytes().splitlines()] == [1]


def test_a_place_where_it_cannot_be_ends_the_start(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent" / "journal"):
        with pytest.raises(ConfigError, match=r"decisions\.journal_file="):
            JournalFile(path, 100)


def test_a_name_of_any_bytes_is_in_the_journal(tmp_path: Path) -> None:
    path, engines = tmp_path / "journal.jsonl", fleet("mixed")

    @in_loop
    async def run() -> None:
        decisions = {"journal_file": str(path)}
        async with serving(*engines, decisions=decisions) as client:
            for name in (b"\xff\x80", b"\xff", "\xe9t\xe9".encode()):
                head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                body = b'{"model": "m", "prompt": "x"}'
                head += b"X-Session-Id: %s\r\nContent-Length: %d\r\n\r\n" % (name, len(body))
                assert (await raw(client, head, body)).startswith(b"HTTP/1.1 200 ")
            _, metrics = await client.get("/metrics")
            assert "kvstore_conductor_journal_written 1.0" in metrics

    run()
    head, lines = read_journal(path)
    assert replay(head, lines) == []
    sessions = [one.session for one in lines if isinstance(one, ArriveInput)]
    assert sessions == ["\\udcff\\udc80", "\\udcff", "\xe9t\xe9"]


def test_a_line_that_cannot_be_encoded_ends_it(tmp_path: Path, wait_until: Any) -> None:
    path = tmp_path / "journal.jsonl"
    journal = JournalFile(path, 1 << 20)
    journal.write(stepped(1))
    journal.write(Stepped(2, [["\udcff"]]))
    wait_until(lambda: journal.ended, what="it has failed")
    journal.close()
    assert not journal._thread.is_alive()
    assert [json.loads(line)["at"] for line in path.read_bytes().splitlines()] == [1]
