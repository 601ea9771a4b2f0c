"""The engines and nodes of a simulation, from ``8xh800`` to their bounds."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from conductor.costs.hardware import ACCELERATORS
from conductor.costs.prior import USUAL, CostPrior
from conductor.costs.shapes import SHAPES
from conductor.routing.engines import EngineInfo, Role
from conductor.simulator.caching import CacheLimits
from conductor.simulator.links import Link
from conductor.simulator.scenario import Scenario
from conductor.simulator.steps import StepTimes
from conductor.simulator.trace import BLOCK_TOKENS
from kvstore.protocol.errors import InvalidArgument

_SPEC: Final = re.compile(r"(\d{1,5})x([a-z0-9.-]+?)(?::(\d{1,4}))?(?:@(\d{1,2}(?:\.\d{1,3})?))?")
ENGINES_MAX: Final = 1024
_PREFIX: Final = {Role.PREFILL: "p", Role.DECODE: "d", Role.MIXED: "m"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngine:
    """One engine on a machine of its own, which is a node of the store, too.

    Attributes:
        info: as it would register.
        times: what the model of its costs says.
        factor: how much slower it is in truth.
        kv_bytes: bytes of one token's KV.
        room_tokens: tokens of KV that fit beside the weights.
        network_bytes_per_s: of its machine, each way.
        memory_bytes_per_s: from its machine's memory to its accelerators.
    """

    info: EngineInfo
    times: StepTimes
    factor: float
    kv_bytes: float
    room_tokens: int
    network_bytes_per_s: float
    memory_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Places of engines: how many requests the Conductor gives one at a time."""

    prefill: int = 8
    decode: int = 256
    mixed: int = 256

    def of(self, role: Role) -> int:
        """The places of an engine of a role."""
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode}.get(role, self.mixed)


def engines_of(specs: dict[Role, str], model: str, running: Running) -> list[SimulatedEngine]:
    """All engines of a fleet.

    Args:
        specs: for each role what ``8xh800`` says, several joined by commas: engines, the
            accelerators of one, after ``:`` how many it has if not as many as a usual machine, and
            after ``@`` how much slower it is in truth than it is thought to be. Empty or ``0`` =
            none.
        model: a name of :data:`conductor.costs.shapes.SHAPES`.
        running: their places.

    Raises:
        InvalidArgument: one of these is unknown, or the model does not fit.
    """
    if model not in SHAPES:
        raise InvalidArgument("model", f"{model!r} is not one of {', '.join(SHAPES)}")
    found: list[SimulatedEngine] = []
    for role, spec in specs.items():
        number = 0
        for text in spec.split(",") if spec not in ("", "0") else []:
            for _ in range(_count(role, text)):
                found.append(_engine(role, number, text, model, running))
                number += 1
    if not 1 <= len(found) <= ENGINES_MAX:
        raise InvalidArgument("engines", f"{len(found)} engines; 1 to {ENGINES_MAX} are possible")
    return found


def _parsed(role: Role, text: str) -> Sequence[str | None]:
    match = _SPEC.fullmatch(text.strip().lower())
    if match is None or match[2] not in ACCELERATORS:
        known = ", ".join(ACCELERATORS)
        raise InvalidArgument(
            str(role), f"{text!r} is not like 8xh800, 8xh800:4 or 8xh800@1.3 with one of {known}"
        )
    return match.groups()


def _count(role: Role, text: str) -> int:
    return int(_parsed(role, text)[0] or 0)


def _engine(role: Role, number: int, text: str, model: str, running: Running) -> SimulatedEngine:
    _, name, accelerators, factor = _parsed(role, text)
    prior = CostPrior(SHAPES[model], ACCELERATORS[name or ""], int(accelerators or 0), USUAL)
    if prior.kv_tokens_max < BLOCK_TOKENS or (factor and not float(factor)):
        raise InvalidArgument(str(role), f"{text!r} has no room for the KV of {model}")
    engine_id = f"{_PREFIX[role]}{number}"
    info = EngineInfo(
        id=engine_id, role=role, url=f"http://{engine_id}", model=model,
        page_tokens=BLOCK_TOKENS, domain=f"model:{model}", block_tokens=BLOCK_TOKENS,
        node=f"n-{engine_id}", max_running=running.of(role),
        shape=model, hardware=f"{accelerators}x{name}" if accelerators else str(name),
    )  # fmt: skip
    return SimulatedEngine(
        info=info,
        times=prior,
        factor=float(factor or 1.0),
        kv_bytes=prior.kv_bytes(1),
        room_tokens=prior.kv_tokens_max,
        network_bytes_per_s=prior.network.bytes_per_s,
        memory_bytes_per_s=prior.host.bytes_per_s,
    )


def cache_limits(one: SimulatedEngine, scenario: Scenario) -> CacheLimits:
    """The bounds of the caches of an engine and its node."""
    block_bytes = one.kv_bytes * BLOCK_TOKENS
    return CacheLimits(
        local=one.room_tokens // BLOCK_TOKENS,
        host=int(scenario.host_bytes / block_bytes),
        disk=int(scenario.disk_bytes / block_bytes),
    )


def bandwidths(engines: Iterable[SimulatedEngine], scenario: Scenario) -> dict[Link, float]:
    """The links of all engines and their nodes, with bytes a second."""
    found: dict[Link, float] = {}
    for one in engines:
        name = one.info.id
        found["out", name] = found["in", name] = one.network_bytes_per_s
        found["host", name] = one.memory_bytes_per_s
        found["disk", name] = scenario.disk_bytes_per_s
    return found
