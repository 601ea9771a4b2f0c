"""A small simulated fleet, and traces for it, so that a test of the simulator is a few lines."""

from collections.abc import Sequence
from dataclasses import replace

from conductor.routing.engines import Role
from conductor.simulator.fleet import Running, SimulatedEngine, engines_of
from conductor.simulator.scenario import Scenario
from conductor.simulator.simulation import Simulation
from conductor.simulator.trace import TracedRequest, TraceEntry, from_entries


class LinearSteps:
    """Step times: so many seconds for a token, a pair of tokens, a step, a token of context."""

    def __init__(
        self, token_s: float = 1e-4, pair_s: float = 1e-9, step_s: float = 1e-2,
        context_s: float = 1e-7,
    ) -> None:  # fmt: skip
        self._token_s = token_s
        self._pair_s = pair_s
        self._step_s = step_s
        self._context_s = context_s

    def prefill_seconds(self, new_tokens: float, prefix_tokens: float) -> float:
        pairs = new_tokens * (prefix_tokens + new_tokens / 2)
        return self._step_s + new_tokens * self._token_s + pairs * self._pair_s

    def decode_step_seconds(self, batch: float, context_tokens: float) -> float:
        return self._step_s + batch * self._token_s + context_tokens * self._context_s


def fleet(
    prefill: int = 0, decode: int = 0, mixed: int = 0, *, places: int = 4, room_tokens: int = 20_000
) -> list[SimulatedEngine]:
    """Engines with simple costs and little room."""
    specs = {
        role: f"{count}xcpu" if count else "0"
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.MIXED, mixed))
    }
    running = Running(prefill=places, decode=places, mixed=places)
    engines = engines_of(specs, "reference-tiny", running)
    return [
        replace(
            one, times=LinearSteps(), kv_bytes=1e5, room_tokens=room_tokens,
            network_bytes_per_s=1e9, memory_bytes_per_s=5e9,
        )
        for one in engines
    ]  # fmt: skip


def trace_of(*rows: tuple[float, int, int, Sequence[int]]) -> list[TracedRequest]:
    """Rows of arrival (seconds), prompt and answer (tokens), and blocks."""
    return from_entries(TraceEntry(at * 1e3, new, out, list(ids)) for at, new, out, ids in rows)


def simulated(
    trace: Sequence[TracedRequest], engines: Sequence[SimulatedEngine], **fields: object
) -> Simulation:
    """A simulation that has run, its invariants checked after every event."""
    simulation = Simulation(trace, engines, Scenario(**fields))  # type: ignore[arg-type]
    at = 0.0
    while simulation.step():
        assert simulation.now >= at
        at = simulation.now
        simulation.check()
    simulation.run()
    return simulation
