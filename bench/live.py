"""How well do the Conductor and the simulator predict what engines do?

Two prefill and two decode reference engines at one node, behind a Conductor whose policy counts in
seconds. Requests of a trace come at the rate that keeps the prefill engines busy for ``--load`` of
the time. Of each request, what was predicted when it was assigned is compared with what was then
measured: its time to the first token, and the tokens that it found. What was really held at that
moment is told by the events of node and engines, which nobody predicts from here. The simulator
then gets what was fitted in this run, and the same requests.

At last, to new processes, the first ``--saturated`` requests come at once: ``live/prefill-idle`` is
the share of the time in which requests wait for an engine that the idlest prefill engine has
nothing to compute.

A block of 512 tokens of the trace is one page of ``--block-tokens`` tokens here, so that small
engines compute it in seconds; equal blocks have equal tokens.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import numpy as np

from bench.cluster import Cluster, ClusterError, Options, request
from bench.completion import Completion, complete
from bench.live_held import HeldPages, prefix
from bench.live_idle import Prompted, prefill_idle
from bench.measure import Progress, Report, Result, percentile
from conductor.costs.book import CostBook, EngineCosts, machine_of
from conductor.routing.engines import EngineInfo, Role
from conductor.simulator.fleet import SimulatedEngine
from conductor.simulator.scenario import Scenario
from conductor.simulator.simulation import Simulation
from conductor.simulator.trace import BLOCK_TOKENS, TracedRequest, read_trace
from conductor.simulator.workloads import made_up
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.page import page_keys

_LEARNED: Final = 100
"""Requests after which predictions count."""
_WARM: Final = 6
_OUTPUT_MAX: Final = 16
_TTFT_GOAL, _HIT_GOAL, _SIMULATED_GOAL, _IDLE_GOAL = 0.30, 0.95, 0.25, 0.02
_KEY_BYTES: Final = 32


class Sent(NamedTuple):
    """A request of the trace, scaled."""

    traced: TracedRequest
    prompt: list[int]
    output: int


class Seen(NamedTuple):
    """What became of it: its decision, and what the client saw."""

    sent: Sent
    decision: Mapping[str, Any]
    answer: Completion

    @property
    def attempt(self) -> Mapping[str, Any]:
        """Its engines."""
        found: Mapping[str, Any] = self.decision["attempts"][-1]
        return found

    @property
    def assigned_at(self) -> float:
        """When it got them, in seconds since the epoch."""
        arrived = datetime.fromisoformat(self.decision["at"]).timestamp()
        return arrived + float(self.attempt["assigned_s"])

    @property
    def took_s(self) -> float:
        """Seconds from then to the first token."""
        return float(self.decision["ttft_s"]) - float(self.attempt["assigned_s"])

    @property
    def hit_tokens(self) -> int:
        """Tokens of the prompt that were not computed."""
        measured = self.attempt["prefilled"] or self.attempt["served"]
        return int(measured["cached_tokens"] or 0) + int(measured["restored_tokens"] or 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the run."""
    parser.add_argument("--trace", type=Path, help="trace file; default: a synthetic load")
    parser.add_argument("--requests", type=int, default=300, help="number of requests")
    parser.add_argument("--block-tokens", type=int, default=64,
                        help="scale each 512-token block of the trace to this many"
                        " tokens")  # fmt: skip
    parser.add_argument("--load", type=float, default=0.4,
                        help="utilization of the prefill engines, 0 to 1")  # fmt: skip
    parser.add_argument("--model", default="demo", help="reference model: tiny or demo")
    parser.add_argument("--saturated", type=int, default=100,
                        help="number of requests at once, to measure idle engines;"
                        " 0: do not")  # fmt: skip
    parser.add_argument("--rows", type=Path, help="write one JSON line per request here")
    parser.add_argument("--policy", default="earliest-first-token",
                        help="routing policy; it must use costs")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Run, simulate and print; the exit status is 1 if something does not work."""
    if options.trace is not None and not options.trace.exists():
        sys.stderr.write(f"skipped: there is no trace at {options.trace}\n")
        return 0
    try:
        sents = _sents(options)
        with tempfile.TemporaryDirectory(prefix="kv-live-") as folder:
            costs = Path(folder) / "costs.json"
            seen, speed = _live(options, sents, costs)
            book = CostBook()
            book.load(costs.read_bytes())
        idle = _idle(options, sents[: options.saturated])
    except (ClusterError, InvalidArgument, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if options.rows is not None:
        options.rows.write_bytes(b"".join(_row(one, tokens) for one, tokens in seen))
    if any(one.attempt["predicted_ttft_s"] is None for one, _ in seen):
        sys.stderr.write(f"policy {options.policy} predicts nothing: it does not use costs\n")
        return 1
    held = sum(tokens for _, tokens in seen)
    found = sum(min(one.hit_tokens, tokens) for one, tokens in seen)
    late = [one for one, _ in seen[_LEARNED:]] or [one for one, _ in seen]
    errors = [abs(float(one.attempt["predicted_ttft_s"]) / one.took_s - 1) for one in late]
    measured = statistics.fmean(float(one.decision["ttft_s"]) for one, _ in seen)
    simulated = _simulated(options, [one for one, _ in seen], book, speed)
    with Report(json=options.json) as report:
        for percent in (50, 90):
            off = percentile(errors, percent)
            report.add(_goal(f"live/ttft-error/p{percent}", off, _TTFT_GOAL))
        part = found / held if held else 1.0
        report.add(Result("live/hits", part, "of held", "goal", _HIT_GOAL, part / _HIT_GOAL))
        report.add(Result("live/ttft/mean", measured, "s", "simulated", simulated,
                          simulated / measured))  # fmt: skip
        report.add(_goal("live/simulated-error", abs(simulated / measured - 1), _SIMULATED_GOAL))
        if idle is not None:
            report.add(Result("live/prefill-idle", idle, "of the time", "goal", _IDLE_GOAL,
                              _IDLE_GOAL / max(idle, 1e-9)))  # fmt: skip
    return 0


def _row(seen: Seen, held: int) -> bytes:
    attempt = seen.attempt
    [terms] = [one for one in attempt["candidates"] if one["engine"] == attempt["prefill"]]
    row = {
        "tokens": len(seen.sent.prompt), "held": held, "hit": seen.hit_tokens,
        "took_s": seen.took_s, "ttft_s": seen.decision["ttft_s"], "candidate": terms,
        **{name: attempt[name] for name in (
            "prefill", "decode", "predicted_ttft_s", "predicted_hit_tokens", "assigned_s",
            "prefill_s", "decode_queue_s", "handoff_s", "tbt_s", "prefilled", "served",
        )},
    }  # fmt: skip
    return json.dumps(row).encode() + b"\n"


def _goal(case: str, error: float, goal: float) -> Result:
    return Result(case, error, "of measured", "goal", goal, goal / max(error, 1e-9))


# The requests


def _sents(options: argparse.Namespace) -> list[Sent]:
    if options.trace is not None:
        traced = read_trace(options.trace, options.requests)
    else:
        traced = made_up("sessions", options.requests)
    return [sent_as(one, options.block_tokens) for one in traced]


def sent_as(one: TracedRequest, block_tokens: int) -> Sent:
    """A request with tokens that stand for its blocks; those of its end are its own."""
    rest = one.tokens - len(one.blocks) * BLOCK_TOKENS
    parts = [_tokens(block + 1, block_tokens) for block in one.blocks]
    own = max(1, rest * block_tokens // BLOCK_TOKENS)
    parts.append(_tokens(-one.number, own))
    prompt = [token for part in parts for token in part]
    return Sent(one, prompt, max(2, min(_OUTPUT_MAX, one.output)))


def _tokens(name: int, count: int) -> list[int]:
    seed = [abs(name), int(name < 0)]
    found: list[int] = np.random.default_rng(seed).integers(32, 127, count).tolist()
    return found


# The run


def _live(
    options: argparse.Namespace, sents: Sequence[Sent], costs: Path
) -> tuple[list[tuple[Seen, int]], float]:
    """Each request, with the tokens that its engine and node held; and the speed of the trace."""
    settings = _settings(options, sents, f"costs.file={costs}", "decisions.kept=100000")
    with Cluster(settings) as cluster:
        return asyncio.run(_sends(cluster, options, sents))


def _idle(options: argparse.Namespace, sents: Sequence[Sent]) -> float | None:
    """See :func:`prefill_idle`; None without requests."""
    if not sents:
        return None
    with Cluster(_settings(options, sents)) as cluster:
        return prefill_idle(cluster, [Prompted(one.prompt, one.output) for one in sents])


def _settings(options: argparse.Namespace, sents: Sequence[Sent], *conductor: str) -> Options:
    longest = max(len(one.prompt) for one in sents) + _OUTPUT_MAX
    return Options(
        model=options.model, capacity_bytes=4 << 30, prefills=2, decodes=2,
        kv_blocks=4 * (-(-longest // 16) + 8), policy=options.policy, prefix_cache=True,
        kv_hashes=False, conductor=("queue.wait_s=600", *conductor),
    )  # fmt: skip


async def _sends(
    cluster: Cluster, options: argparse.Namespace, sents: Sequence[Sent]
) -> tuple[list[tuple[Seen, int]], float]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, _following(cluster) as held:
        speed = await _speed(session, cluster.conductor_url, options, sents)
        start = time.monotonic()
        answers: list[Completion] = [Completion()] * len(sents)
        failures: list[str] = []
        with Progress("live", len(sents)) as progress:

            async def send(index: int, one: Sent) -> None:
                due = start + one.traced.at_s / speed
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                try:
                    answers[index] = await complete(
                        session, cluster.conductor_url, one.prompt, max_tokens=one.output,
                        temperature=0.0,
                    )  # fmt: skip
                except ClusterError as error:
                    failures.append(str(error))
                progress.step(f"{len(one.prompt)} tokens")

            async with asyncio.TaskGroup() as tasks:
                for index, one in enumerate(sents):
                    tasks.create_task(send(index, one))
        if failures:
            raise ClusterError(f"{len(failures)} requests failed; the first: {failures[0]}")
        url = cluster.conductor_url
        decisions = [request("GET", f"{url}/v1/decisions/{one.request_id}") for one in answers]
        seen = [Seen(*one) for one in zip(sents, decisions, answers, strict=True)]
        return [(one, _held(one, held)) for one in seen], speed


async def _speed(
    session: aiohttp.ClientSession, url: str, options: argparse.Namespace, sents: Sequence[Sent]
) -> float:
    """How much faster than in the trace requests are to come."""
    middle = sorted(len(one.prompt) for one in sents)[len(sents) // 2]
    took = []
    for number in range(_WARM):
        prompt = _tokens(-(10**9) - number, middle)
        answer = await complete(session, url, prompt, max_tokens=_OUTPUT_MAX, temperature=0.0)
        took.append(answer.ttft_s)
    mean_s = statistics.fmean(took[1:]) * statistics.fmean(len(s.prompt) for s in sents) / middle
    rate = options.load * 2 / mean_s
    span_s = max(one.traced.at_s for one in sents) or 1.0
    speed = rate * span_s / len(sents)
    sys.stderr.write(
        f"a prompt of {middle} tokens takes {statistics.fmean(took[1:]):.3f} s;"
        f" {rate:.2f} requests/s, {speed:.3g} times the trace's\n"
    )
    return float(speed)


@asynccontextmanager
async def _following(cluster: Cluster) -> AsyncIterator[dict[str, HeldPages]]:
    """The pages of the node (under its name) and of the engines, as they tell."""
    engines = request("GET", f"{cluster.conductor_url}/v1/engines")["engines"]
    endpoints = {one["id"]: one["events"] for one in engines if one["events"]}
    [node] = request("GET", f"{cluster.conductor_url}/v1/nodes")["nodes"]
    endpoints[node["id"]] = node["events"]
    held = {name: HeldPages() for name in endpoints}
    ready = {name: asyncio.Event() for name in endpoints}
    tasks = [
        asyncio.create_task(held[name].follow(endpoint, ready[name]))
        for name, endpoint in endpoints.items()
    ]
    try:
        async with asyncio.timeout(30.0):
            for one in ready.values():
                await one.wait()
        yield held
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _held(seen: Seen, held: Mapping[str, HeldPages]) -> int:
    """Tokens of a prompt of which its prefill engine or the node held each when it was assigned."""
    prompt, page_tokens = seen.sent.prompt, 64
    packed = page_keys(np.array(prompt, dtype=np.uint32), page_tokens).packed
    keys = [packed[at : at + _KEY_BYTES] for at in range(0, len(packed), _KEY_BYTES)]
    usable = keys[: (len(prompt) - 1) // page_tokens]  # the last token is always computed
    engine, at = str(seen.attempt["prefill"]), seen.assigned_at
    caches = [one for name, one in held.items() if name == engine or name[0] not in "PD"]
    return prefix(caches, usable, at) * page_tokens


# The simulation


class _ScaledCosts:
    """What was fitted of an engine, for tokens of the trace."""

    def __init__(self, costs: EngineCosts, scale: float) -> None:
        self._costs = costs
        self._scale = scale

    def prefill_seconds(self, new_tokens: float, prefix_tokens: float) -> float:
        line = self._costs.prefill_line
        return sum(line.terms(new_tokens * self._scale, prefix_tokens * self._scale))

    def decode_step_seconds(self, batch: float, context_tokens: float) -> float:
        return self._costs.step_seconds(max(1.0, batch), context_tokens * self._scale)


def _simulated(
    options: argparse.Namespace, seen: Sequence[Seen], book: CostBook, speed: float
) -> float:
    """Mean seconds to the first token, as the simulator says."""
    scale = options.block_tokens / BLOCK_TOKENS
    machine = machine_of(f"reference-{options.model}", "cpu")
    engines = []
    for name in ("P1", "P2", "D1", "D2"):
        costs = book.of(name, machine)
        role = Role.PREFILL if name[0] == "P" else Role.DECODE
        info = EngineInfo(
            id=name, role=role, url=f"http://{name}", model="m", page_tokens=BLOCK_TOKENS,
            domain="model:m", block_tokens=BLOCK_TOKENS, node=f"n-{name}", max_running=8,
            shape=machine.shape, hardware="cpu",
        )  # fmt: skip
        engines.append(
            SimulatedEngine(
                info=info, times=_ScaledCosts(costs, scale), factor=1.0,
                kv_bytes=costs.prior.kv_bytes(1) * scale, room_tokens=1 << 24,
                network_bytes_per_s=_rate(one.attempt["served"] for one in seen),
                memory_bytes_per_s=_rate(one.attempt["prefilled"] for one in seen),
            )
        )  # fmt: skip
    trace = [one.sent.traced for one in seen]
    output = [TracedRequest(**{**_fields(one), "output": sent.sent.output})
              for one, sent in zip(trace, seen, strict=True)]  # fmt: skip
    simulation = Simulation(output, engines, Scenario(policy=options.policy, speed=speed))
    while simulation.step():
        pass
    return statistics.fmean(one.ttft_s for one in simulation.records if one.ttft_s is not None)


def _fields(one: TracedRequest) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


def _rate(measured: Any) -> float:
    """Bytes a second that engines restore."""
    total_bytes = total_s = 0.0
    for one in measured:
        if one and one["restored_bytes"] and one["restore_s"]:
            total_bytes += one["restored_bytes"]
            total_s += one["restore_s"]
    return total_bytes / total_s if total_s else 1e9
