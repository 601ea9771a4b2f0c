"""``decisions.trace_file``: requests without their content, in order, in a bounded space."""

import asyncio
import json
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.trace import blocks
from conductor.front import tracing
from conductor.front.tracing import TOKENS_MAX, AnsweredRequest, TraceFile
from kvstore.protocol.errors import ConfigError
from tests.conductor.fakes import OPERATE, FakeEngine, serving
from tests.loops import eventually, in_loop

PAGE = 64


@contextmanager
def tracing_to(path: Path, bytes_max: int = 1 << 20, files_max: int = 3) -> Iterator[TraceFile]:
    trace = TraceFile(path, bytes_max, files_max)
    try:
        yield trace
    finally:
        trace.close()
        assert not trace._thread.is_alive()


def traced(arrived_s: float, tokens: int, keys: Sequence[int] = (), page: int = PAGE):
    return AnsweredRequest(arrived_s, tokens, 7, np.array(keys, dtype=np.uint64), page)


def write(path: Path, *requests: AnsweredRequest, **bounds: int) -> list[dict[str, Any]]:
    with tracing_to(path, **bounds) as trace:
        for number, one in enumerate(requests):
            trace.began(number)
            trace.ended(number, one)
    return lines(path)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_equal_beginnings_have_equal_numbers_and_nothing_else_has(tmp_path: Path) -> None:
    first = list(range(100, 116))  # 1,024 tokens
    other = [*first[:8], *range(200, 208)]
    found = write(
        tmp_path / "t",
        traced(5.0, 1024, first), traced(5.25, 1024, other), traced(6.0, 1024, first),
        traced(7.0, 1024), traced(8.0, 1024),
    )  # fmt: skip
    assert [one["timestamp"] for one in found] == [0, 250, 1000, 2000, 3000]
    assert all((one["input_length"], one["output_length"]) == (1024, 7) for one in found)
    a, b, c, unknown, too = (one["hash_ids"] for one in found)
    assert all(len(ids) == 2 for ids in (a, b, c, unknown, too))
    assert a == c
    assert a[0] == b[0]
    assert len({a[1], b[1], a[0], *unknown, *too}) == 7
    assert max(map(max, (a, b, c, unknown, too))) < 1 << 53
    assert [one.timestamp for one in blocks(tmp_path / "t")] == [0, 250, 1000, 2000, 3000]


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (511, 1), (512, 1), (513, 2), (6758, 14)])
def test_a_prompt_has_a_number_for_each_block_also_the_last(tmp_path, tokens, count) -> None:
    keys = list(range(1, tokens // PAGE + 1))
    [one, again] = write(tmp_path / "t", traced(0, tokens, keys), traced(1, tokens, keys))
    assert len(one["hash_ids"]) == count
    # Without a whole page in it, nothing is known of a block.
    known = -(-len(keys) * PAGE // 512)
    assert one["hash_ids"][:known] == again["hash_ids"][:known]
    assert not set(one["hash_ids"][known:]) & set(again["hash_ids"][known:])


@pytest.mark.parametrize("page", [16, 48, 512, 1000, 2048])
def test_pages_of_any_size_say_no_more_than_they_know(tmp_path: Path, page: int) -> None:
    tokens, count = 4096, 4096 // page
    for same in {0, 1, count // 2, count - 1}:
        keys = [*range(same), *(10_000 + at for at in range(count - same))]
        one, two = write(
            tmp_path / "t", traced(0, tokens, range(count), page), traced(1, tokens, keys, page)
        )
        shared = [a == b for a, b in zip(one["hash_ids"], two["hash_ids"], strict=True)]
        assert shared == sorted(shared, reverse=True)
        assert sum(shared) == same * page // 512


def test_requests_are_in_order_of_arrival_and_one_that_takes_too_long_comes_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_ORDERED_MAX", 3)
    with tracing_to(tmp_path / "t") as trace:
        for number in range(5):
            trace.began(number)
        for number in (3, 1, 2):
            trace.ended(number, traced(number, number))
        trace.ended(4, None)
        trace.ended(0, traced(0, 9))
    found = lines(tmp_path / "t")
    assert [one["input_length"] for one in found] == [1, 2, 3, 9]
    assert [one["timestamp"] for one in found] == [0, 1000, 2000, 0]
    assert trace.counts == {"written": 4, "dropped": 0, "failed": 0, "unknown": 1}


def test_files_are_bounded_in_size_and_number_and_each_has_a_salt(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("of an earlier run\n")
    write(path, *(traced(n, 512, range(8)) for n in range(4)), bytes_max=1, files_max=3)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["t", "t.1", "t.2"]
    every = [lines(tmp_path / name) for name in ("t", "t.1", "t.2")]
    assert [len(found) for found in every] == [1, 1, 1]
    assert len({found[0]["hash_ids"][0] for found in every}) == 3
    assert {found[0]["timestamp"] for found in every} == {0}
    write(path, traced(0, 1), files_max=1)
    assert len(lines(path)) == 1


def test_only_its_user_reads_it_and_it_replaces_nothing_that_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write(path, traced(0, 1))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for name, make in (("folder", Path.mkdir), ("link", lambda p: p.symlink_to(path))):
        make(tmp_path / name)
        with pytest.raises(ConfigError, match="trace_file"):
            TraceFile(tmp_path / name, 1, 1)
    with pytest.raises(ConfigError, match="No such file"):
        TraceFile(tmp_path / "missing" / "t", 1, 1)
    assert len(lines(path)) == 1


def test_a_disk_that_hangs_costs_lines_and_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, hangs, real = threading.Event(), threading.Event(), os.write

    def slow(fd: int, data: Any) -> int:
        hangs.set()
        gate.wait(10)
        return real(fd, data)

    monkeypatch.setattr(tracing, "_WAITING_MAX", 2)
    monkeypatch.setattr(tracing.os, "write", slow)
    with tracing_to(tmp_path / "t") as trace:
        trace.ended(0, traced(0, 1))
        assert hangs.wait(10)
        for number in range(1, 6):
            trace.ended(number, traced(number, 1))
        assert trace.counts["dropped"] == 3
        gate.set()
    assert trace.counts["written"] == len(lines(tmp_path / "t")) == 3


def test_a_full_disk_leaves_no_half_line_and_writing_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, real = [False], os.write

    def write_some(fd: int, data: Any) -> int:
        if full[0]:
            raise OSError(28, "No space left on device")
        full[0] = len(data) > 100 and trace.counts["failed"] == 0
        return real(fd, data[:-1] if full[0] else data)

    monkeypatch.setattr(tracing.os, "write", write_some)
    with tracing_to(tmp_path / "t") as trace:
        trace.ended(0, traced(0, 1))
        trace.ended(1, traced(1, 5000))
        while trace.counts["failed"] == 0:
            assert trace._thread.is_alive()
        full[0] = False
        trace.ended(2, traced(2, 3))
    assert [one["input_length"] for one in lines(tmp_path / "t")] == [1, 3]
    assert trace.counts == {"written": 2, "dropped": 0, "failed": 1, "unknown": 0}


def test_older_files_stay_while_no_new_one_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "t", os.open

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    write(path, traced(0, 1))
    with tracing_to(path, bytes_max=1) as trace:
        trace.ended(0, traced(0, 2))
        while trace.counts["written"] == 0:
            assert trace._thread.is_alive()
        monkeypatch.setattr(tracing.os, "open", full)
        for number in range(1, 5):
            trace.ended(number, traced(number, 3))
        while trace.counts["failed"] < 4:
            assert trace._thread.is_alive()
        monkeypatch.setattr(tracing.os, "open", real)
        trace.ended(5, traced(5, 4))
    found = [lines(Path(f"{path}{end}")) for end in ("", ".1", ".2")]
    assert [[one["input_length"] for one in file] for file in found] == [[4], [2], [1]]


@in_loop
async def test_what_was_answered_is_in_the_trace_without_what_was_asked(tmp_path: Path) -> None:
    engine, path = FakeEngine("e", "mixed", page_tokens=64), tmp_path / "t"
    async with serving(
        engine, policy={"name": "longest-prefix"}, decisions={"trace_file": str(path)}
    ) as client:
        prompt = list(range(1000))
        engine.gate.clear()
        asked = [asyncio.create_task(client.complete([*prompt, n])) for n in range(2)]
        await eventually(lambda: engine.running == 2)
        engine.gate.set()
        assert [(await one)[0] for one in asked] == [200, 200]
        assert (await client.complete([*prompt[:600], 7, *prompt], stream=True))[0] == 200
        engine.status = 400
        assert (await client.complete())[0] == 400
        await eventually(lambda: client.conductor.trace.counts["written"] == 3)  # type: ignore[union-attr]
        metrics = (await client.get("/metrics", Authorization=f"Bearer {OPERATE}"))[1]
        assert 'trace_requests_total{outcome="written"} 3.0' in metrics
        assert 'trace_requests_total{outcome="unknown"} 1.0' in metrics
    found = lines(path)
    assert [one["input_length"] for one in found] == [1001, 1001, 1601]
    assert {one["output_length"] for one in found} == {3}
    first, second, third = (one["hash_ids"] for one in found)
    assert first == second
    assert [a == b for a, b in zip(first, third, strict=False)] == [True, False]
    assert [set(one) for one in found] == [
        {"timestamp", "input_length", "output_length", "hash_ids"}
    ] * 3


@in_loop
async def test_an_engine_that_counts_without_end_is_not_believed(tmp_path: Path) -> None:
    engine = FakeEngine("e", "mixed")
    told = {"usage": {"prompt_tokens": 9, "completion_tokens": TOKENS_MAX + 1}}
    engine._end = lambda _: told  # type: ignore[method-assign]
    async with serving(engine, decisions={"trace_file": str(tmp_path / "t")}) as client:
        assert (await client.complete())[0] == 200
        told["usage"] = {"prompt_tokens": 10**200, "completion_tokens": 1}
        assert (await client.complete())[0] == 200
        trace = client.conductor.trace
        assert trace is not None
        assert trace.counts["unknown"] == 2
        told["usage"] = {"prompt_tokens": 10, "completion_tokens": 1}
        assert (await client.complete())[0] == 200
    assert len(lines(tmp_path / "t")) == 1
