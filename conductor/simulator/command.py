"""``kvstore-conductor simulate``: what each routing policy would do with a trace.

``python -m bench simulate`` has the same options.
"""

import argparse
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from conductor.config import QueueConfig
from conductor.costs.shapes import SHAPES
from conductor.routing.admission import AdmissionMode, AdmissionRules, ServiceClass
from conductor.routing.engines import Role
from conductor.routing.policy import POLICIES
from conductor.simulator.fleet import Running, SimulatedEngine, engines_of
from conductor.simulator.goodput import highest_speed
from conductor.simulator.journal import read_journal, replay, write_journal
from conductor.simulator.report import (
    Objectives,
    Summary,
    advice_of,
    rejections,
    run_while_attained,
    shown_advice,
    summary_of,
)
from conductor.simulator.samples import Capacity, plot, series_of, swing_of
from conductor.simulator.scenario import Failure, Scenario
from conductor.simulator.simulation import Simulation
from conductor.simulator.trace import TracedRequest, read_trace
from conductor.simulator.workloads import WORKLOADS, made_up
from kvstore.config.machine import version_of
from kvstore.protocol.errors import InvalidArgument, reason

_FAILURE: Final = re.compile(r"([A-Za-z0-9._-]+)@(\d+(?:\.\d+)?)(?::(\d+(?:\.\d+)?))?")
SHOWN: Final = ("p50", "p90", "p99", "tbt_p99", "hit", "effective", "rejected", "lost", "wasted",
         "goodput")  # fmt: skip
_SAMPLE_S: Final = 10.0
_RANGES: Final = (
    ("handoff_part", 0.001, 1), ("waiting_max", 0, 1e9), ("wait_s", 0, float("inf")),
    ("chunk_tokens", 16, 1e6), ("host_bytes", 0, 1e15), ("disk_bytes", 0, 1e15),
    ("bring_bytes", 0, 1e15),
    ("prefill_running", 1, 1e5), ("decode_running", 1, 1e5), ("mixed_running", 1, 1e5),
    ("skew", 0, 0.99), ("noise", 0, 0.99),
)  # fmt: skip
"""Options that are numbers, with the least and most of each."""


class Outcome(NamedTuple):
    """One result.

    Attributes:
        case: ``simulate/POLICY/SPEED`` or ``goodput/POLICY``.
        value: mean seconds to the first token, or requests a second and engine.
        summary: summary of the simulation.
        note: what else is worth a line.
    """

    case: str
    value: float
    summary: Summary
    note: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--trace", type=Path, help="trace file in Mooncake's format")
    load.add_argument("--load", choices=sorted(WORKLOADS),
                      help="synthetic load, instead of --trace")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="random seed of the synthetic load")
    parser.add_argument("--requests", type=int,
                        help="number of requests; default: the whole trace, or 2000")  # fmt: skip
    parser.add_argument("--policy", default=",".join(POLICIES),
                        help="routing policies, comma-separated; default: all")  # fmt: skip
    parser.add_argument("--admission", default="none",
                        help="none, load, prediction, comma-separated; default: none")  # fmt: skip
    parser.add_argument("--fair", action="store_true", help="share engines fairly between tenants")
    parser.add_argument("--lend", action="store_true",
                        help="switch mixed engines to prefill or decode only")  # fmt: skip
    parser.add_argument("--advise", action="store_true",
                        help="say which engines the fleet lacks")  # fmt: skip
    parser.add_argument("--prefill", default="0",
                        help="prefill engines: COUNTxACCELERATOR[:ACCELERATORS][@SLOWDOWN], comma-"
                        "separated, such as 8xh800 or 4xh800:4,2xa800@1.3")  # fmt: skip
    parser.add_argument("--decode", default="0", help="decode engines; see --prefill")
    parser.add_argument("--mixed", default="0", help="mixed engines; see --prefill")
    parser.add_argument("--model", default="llama3-70b", choices=sorted(SHAPES),
                        help="model of all engines; default: %(default)s")  # fmt: skip
    parser.add_argument("--slo-ttft", type=float, default=30.0,
                        help="target of seconds to first token; default: %(default)s")  # fmt: skip
    parser.add_argument("--slo-tbt", type=float, default=0.1,
                        help="target of seconds between tokens; default: %(default)s")  # fmt: skip
    parser.add_argument("--speed", default="1",
                        help="speed-up of arrivals, comma-separated, such as 1,2,3")  # fmt: skip
    parser.add_argument("--goodput", action="store_true",
                        help="search for the highest speed at which 90 %% of requests meet both"
                        " objectives")  # fmt: skip
    for role, places in (("prefill", 8), ("decode", 256), ("mixed", 256)):
        parser.add_argument(f"--{role}-running", type=int, default=places,
                            help=f"max_running, {role} engine; default: %(default)s")  # fmt: skip
    queue = QueueConfig()
    parser.add_argument("--waiting-max", type=int, default=queue.waiting_max,
                        help="maximum requests that wait; default: %(default)s")  # fmt: skip
    parser.add_argument("--wait-s", type=float, default=queue.wait_s,
                        help="maximum seconds of wait, or inf; default: %(default)s")  # fmt: skip
    parser.add_argument("--chunk-tokens", type=int, default=8192,
                        help="maximum tokens per engine step; default: %(default)s")  # fmt: skip
    parser.add_argument("--host-bytes", type=float, default=1e12,
                        help="host memory of each node for KV; default: %(default)g")  # fmt: skip
    parser.add_argument("--disk-bytes", type=float, default=0.0,
                        help="disk space of each node for KV; default: 0")  # fmt: skip
    parser.add_argument("--bring-bytes", type=float, default=0.0,
                        help="maximum bytes that nodes load from disk or copy from each other at a"
                        " time for waiting requests; default: 0 = none")  # fmt: skip
    parser.add_argument("--alone", action="store_true",
                        help="do not let nodes fetch from each other")  # fmt: skip
    parser.add_argument("--handoff-part", type=float, default=1.0,
                        help="part of the KV that is sent after the whole prompt is computed, 0.001"
                        " to 1; default: 1")  # fmt: skip
    parser.add_argument("--skew", type=float, default=0.0,
                        help="constant error of an engine's estimates, relative, up to 0.99;"
                        " default: 0")  # fmt: skip
    parser.add_argument("--noise", type=float, default=0.0,
                        help="maximum error of the estimate of a prompt, relative, up to 0.99;"
                        " default: 0")  # fmt: skip
    parser.add_argument("--fail", default="", metavar="ENGINE@S[:S]",
                        help="engines that die, when, and when they come back, comma-separated:"
                        " p0@100 or p0@100:160")  # fmt: skip
    parser.add_argument("--series", type=Path, metavar="FOLDER",
                        help="write the load over time here, as JSON and SVG")  # fmt: skip
    parser.add_argument("--journal", type=Path, metavar="FOLDER",
                        help="write inputs and decisions here")  # fmt: skip


class Cases:
    """What the options ask for, read and checked.

    Attributes:
        policies: names.
        speeds: of arrivals.
        total: results to come.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        """Read the trace.

        Raises:
            InvalidArgument: an option is wrong; names it.
            OSError: the trace cannot be read.
        """
        self._options = options
        self.policies: list[str] = options.policy.split(",")
        for name in self.policies:
            if name not in POLICIES:
                raise InvalidArgument("policy", f"{name!r} is not one of {', '.join(POLICIES)}")
        self.admissions = _admissions(options.admission)
        self.speeds = _numbers("speed", options.speed)
        self._objectives = Objectives(options.slo_ttft, options.slo_tbt)
        self._trace = _trace(options)
        running = Running(
            prefill=options.prefill_running, decode=options.decode_running,
            mixed=options.mixed_running,
        )  # fmt: skip
        specs = {role: str(getattr(options, str(role))) for role in Role}
        self._engines: list[SimulatedEngine] = engines_of(specs, options.model, running)
        self._failures = _failures(options.fail)
        for name, least, most in _RANGES:
            if not least <= getattr(options, name) <= most:
                raise InvalidArgument(name, f"must be {least:g} to {most:g}")
        runs = 1 if options.goodput else len(self.speeds)
        self.total = len(self.policies) * len(self.admissions) * runs

    def run(self) -> Iterator[Outcome]:
        """Simulate one after another."""
        for policy, mode in itertools.product(self.policies, self.admissions):
            if self._options.goodput:
                yield self._goodput(policy, mode)
            else:
                for speed in self.speeds:
                    yield self._simulated(policy, mode, speed)

    def _simulation(self, policy: str, mode: AdmissionMode, speed: float) -> Simulation:
        options = self._options
        service = ServiceClass(ttft_s=options.slo_ttft, tbt_s=options.slo_tbt)
        scenario = Scenario(
            policy=policy,
            speed=speed,
            waiting_max=options.waiting_max,
            wait_s=options.wait_s,
            chunk_tokens=options.chunk_tokens,
            host_bytes=options.host_bytes,
            disk_bytes=options.disk_bytes,
            peers=not options.alone,
            bring_bytes=options.bring_bytes,
            handoff_part=options.handoff_part,
            failures=self._failures,
            sample_s=_SAMPLE_S if options.series else 0.0,
            journal=options.journal is not None,
            rules=AdmissionRules(mode, (service,), fair=options.fair),
            skew=options.skew,
            noise=options.noise,
            lends=options.lend,
        )
        return Simulation(self._trace, self._engines, scenario)

    def _simulated(self, policy: str, mode: AdmissionMode, speed: float) -> Outcome:
        simulation = self._simulation(policy, mode, speed)
        simulation.run()
        summary = summary_of(simulation, self._objectives)
        case = _case(policy, mode)
        swings = self._write(simulation, f"{case}-{speed:g}".replace("/", "-"))
        why = rejections(simulation.records)
        longest, foretold = summary.long_effective, summary.predicted_hit
        note = f"{summary.seconds:.0f} simulated seconds, {simulation.events} events"
        note += f"; of the longest tenth {longest:.1%} effective; hits foretold {foretold:.1%}"
        note += swings + _brought(simulation)
        if self._options.advise:
            advice = advice_of(simulation, self._objectives)
            note += "; " + shown_advice(advice)
        if why:
            note += "; not served: " + ", ".join(f"{name} {n}" for name, n in why.items())
        return Outcome(f"simulate/{case}/{speed:g}", summary.ttft, summary, note)

    def _goodput(self, policy: str, mode: AdmissionMode) -> Outcome:
        found: dict[float, Summary] = {}

        def effective(speed: float) -> float:
            simulation = self._simulation(policy, mode, speed)
            run_while_attained(simulation, self._objectives)
            found[speed] = summary_of(simulation, self._objectives)
            return found[speed].effective

        best = highest_speed(effective, self.speeds[0])
        summary = found.get(best.speed) or next(iter(found.values()))
        arriving = max(one.at_s for one in self._trace) or 1.0
        rate = len(self._trace) / arriving * best.speed / len(self._engines)
        note = f"speed {best.speed:.3g}, {best.effective:.1%} effective, {len(found)} simulations"
        return Outcome(f"goodput/{_case(policy, mode)}", rate, summary, note)

    def _write(self, simulation: Simulation, name: str) -> str:
        """Write what is wanted; returns how much the load of engines that decode swings."""
        options, swings = self._options, ""
        if options.series:
            options.series.mkdir(parents=True, exist_ok=True)
            capacities = {
                one.info.id: Capacity(one.info.role, one.info.max_running, one.room_tokens)
                for one in self._engines
            }
            series = series_of(simulation.samples, capacities)
            (options.series / f"{name}.json").write_bytes(msgspec.json.encode(series))
            arriving = max(one.arrived for one in simulation.records)
            mean, swing = swing_of(series.until(arriving).decode)
            swings = f"; decode load {mean:.2f}, swings by {swing:.2f}"
            columns = {"prefill": series.prefill, "decode": series.decode, "KV": series.kv}
            (options.series / f"{name}.svg").write_text(plot(name, series.at_s, columns))
        if options.journal:
            options.journal.mkdir(parents=True, exist_ok=True)
            path = options.journal / f"{name}.jsonl"
            write_journal(path, simulation.head, simulation.journal)
        return swings


def _brought(simulation: Simulation) -> str:
    """What nodes brought for those who waited."""
    if not simulation.scenario.bring_bytes:
        return ""
    one = simulation.prefetching.brought
    return (
        f"; {one.looks} looks at those who wait, {one.begun} wishes begun, {one.come} came "
        f"({one.come_bytes / 1e9:.1f} GB), {one.given_up} given up"
    )


def _case(policy: str, mode: AdmissionMode) -> str:
    return policy if mode is AdmissionMode.NONE else f"{policy}/{mode}"


def _admissions(text: str) -> list[AdmissionMode]:
    known = list(AdmissionMode)
    found = [mode for one in text.split(",") for mode in known if mode == one]
    if len(found) != text.count(",") + 1:
        raise InvalidArgument("admission", f"{text!r} is not a list of {', '.join(known)}")
    return found


def _numbers(name: str, text: str) -> list[float]:
    try:
        numbers = [float(one) for one in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < one < float("inf") for one in numbers):
        raise InvalidArgument(name, f"{text!r} is not a list of numbers above 0, such as 1,2.5")
    return numbers


def _trace(options: argparse.Namespace) -> list[TracedRequest]:
    if options.requests is not None and options.requests < 1:
        raise InvalidArgument("requests", "at least 1")
    if options.trace is not None:
        found = read_trace(options.trace, options.requests)
        if not found:
            raise InvalidArgument("trace", f"{options.trace} is empty")
        return found
    if options.load is None:
        raise InvalidArgument("trace", "--trace FILE or --load NAME is needed")
    return made_up(options.load, options.requests or 2000, options.seed)


def _failures(text: str) -> list[Failure]:
    found: list[Failure] = []
    for one in text.split(",") if text else []:
        match = _FAILURE.fullmatch(one)
        if match is None:
            raise InvalidArgument("fail", f"{one!r} is not like p0@100 or p0@100:160")
        back_s = float(match[3]) if match[3] else float("inf")
        found.append(Failure(engine=match[1], at_s=float(match[2]), back_s=back_s))
    return found


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status: 2 if an option is wrong, 1 if a file is."""
    parser = argparse.ArgumentParser(
        prog="kvstore-conductor simulate",
        description="Simulate what each routing policy would do with a trace.",
    )
    add_arguments(parser)
    parser.add_argument("--version", action="version", version=f"%(prog)s {version_of()}")
    parser.add_argument("--json", action="store_true", help="print one JSON line per case")
    parser.add_argument("--replay", type=Path, metavar="FILE",
                        help="replay a journal instead, and compare the decisions")  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        if options.replay is not None:
            return _replay(options.replay)
        for outcome in Cases(options).run():
            sys.stdout.write(_line(outcome, json=options.json))
            sys.stdout.flush()
            sys.stderr.write(f"{outcome.case}: {outcome.note}\n")
    except InvalidArgument as error:
        sys.stderr.write(f"kvstore-conductor simulate: {error}\n")
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"kvstore-conductor simulate: {where}{reason(error)}\n")
        return 1
    return 0


def _line(outcome: Outcome, *, json: bool) -> str:
    figures = {name: float(f"{getattr(outcome.summary, name):.4g}") for name in SHOWN}
    value = float(f"{outcome.value:.4g}")
    if json:
        line = {"case": outcome.case, "value": value, **figures}
        return msgspec.json.encode(line).decode() + "\n"
    return f"{outcome.case} {value} " + " ".join(f"{k}={v}" for k, v in figures.items()) + "\n"


def _replay(path: Path) -> int:
    head, lines = read_journal(path)
    for one in replay(head, lines):
        sys.stdout.write(f"at {one.at} s: {one.before} before, {one.now} now\n")
        return 1
    sys.stdout.write(f"{len(lines)} inputs and steps: every decision is the same\n")
    return 0
