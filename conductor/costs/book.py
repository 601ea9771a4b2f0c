"""The known speed of each engine: initial estimates, and fitted values. Pure.

:meth:`CostBook.dump` and :meth:`CostBook.load` turn it into bytes and back, for a file.
"""

import functools
import hashlib
import re
from collections import OrderedDict
from typing import Final, NamedTuple

import msgspec

from conductor.costs.fit import FitState, RobustFit
from conductor.costs.hardware import ACCELERATORS
from conductor.costs.prior import USUAL, CostPrior, Efficiency, PrefillLine
from conductor.costs.shapes import SHAPES

_VERSION: Final = 1
_ENGINES_MAX: Final = 2048
"""Engines that are remembered; those not asked for longest are forgotten first."""
_MACHINE: Final = re.compile(r"(?:([1-9][0-9]{0,3})x)?([a-z0-9.-]{1,32})")


class Machine(NamedTuple):
    """A model on accelerators.

    Attributes:
        shape: one of :data:`~conductor.costs.shapes.SHAPES`.
        accelerator: one of :data:`~conductor.costs.hardware.ACCELERATORS`.
        accelerators: how many; 0 = as many as a usual machine has.
    """

    shape: str = "llama3-8b"
    accelerator: str = "h100"
    accelerators: int = 1


@functools.lru_cache(maxsize=256)
def machine_of(shape: str, hardware: str) -> Machine:
    """A machine by names as ``llama3-70b`` and ``8xh800``; an empty one stands for a usual one.

    Raises:
        ValueError: a name is unknown; the message has those that are known.
    """
    usual = Machine()
    if shape and shape not in SHAPES:
        raise ValueError(f"shape: {shape[:64]!r} is not one of {', '.join(SHAPES)}")
    if not hardware:
        return usual._replace(shape=shape or usual.shape)
    found = _MACHINE.fullmatch(hardware)
    if found is None or found[2] not in ACCELERATORS:
        known = ", ".join(ACCELERATORS)
        raise ValueError(f"hardware: {hardware[:64]!r} is not one of {known}, or 8x and one")
    return Machine(shape or usual.shape, found[2], int(found[1] or 0))


class EngineCosts:
    """Seconds of one engine, as its measurements say, and its prior where there are none.

    Attributes:
        machine: of which it is.
        prior: its prior.
        prefill_fit: factors of the terms of its prompts.
        step_fit: factors of the terms of its decode steps.
    """

    def __init__(self, machine: Machine, efficiency: Efficiency = USUAL) -> None:
        accelerator = ACCELERATORS[machine.accelerator]
        self.machine = machine
        self.prior = CostPrior(SHAPES[machine.shape], accelerator, machine.accelerators, efficiency)
        self.prefill_fit = RobustFit()
        self.step_fit = RobustFit()

    @property
    def prefill_line(self) -> PrefillLine:
        """What prompts take."""
        constant, weights, attention = self.prefill_fit.factors.tolist()
        prior = self.prior.prefill
        return PrefillLine(
            constant * prior.constant_s,
            weights * prior.floor_s,
            weights * prior.token_s,
            attention * prior.pair_s,
        )

    def step_seconds(self, batch: float, context_tokens: float) -> float:
        """Seconds of a decode step of ``batch`` requests.

        Of an engine with data-parallel ranks, these are the numbers of its slowest rank: all step
        together.
        """
        return self.step_fit.seconds(self.prior.step_terms(batch, context_tokens))

    def computed(self, new_tokens: float, prefix_tokens: float, seconds: float) -> None:
        """The end of a prompt was computed; the queue before it is not part of ``seconds``."""
        self.prefill_fit.observe(self.prior.prefill.terms(new_tokens, prefix_tokens), seconds)

    def stepped(self, batch: float, context_tokens: float, seconds: float) -> None:
        """A decode step took so long."""
        self.step_fit.observe(self.prior.step_terms(batch, context_tokens), seconds)


class _SavedEngine(msgspec.Struct, frozen=True):
    machine: Machine
    prefill: FitState
    step: FitState


class _Saved(msgspec.Struct, frozen=True):
    """What the file has; ``digest`` is of ``engines`` as it stands there."""

    version: int
    digest: str
    engines: msgspec.Raw


class UnusableCostsError(ValueError):
    """What was kept of the engines' costs cannot be used."""


class CostBook:
    """The costs of all engines.

    Args:
        efficiency: that of all priors.
    """

    def __init__(self, efficiency: Efficiency = USUAL) -> None:
        self._efficiency = efficiency
        self._engines: OrderedDict[str, EngineCosts] = OrderedDict()

    def of(self, engine_id: str, machine: Machine) -> EngineCosts:
        """The costs of an engine; another machine than before begins with its prior."""
        known = self._engines.get(engine_id)
        if known is None or known.machine != machine:
            known = self._engines[engine_id] = EngineCosts(machine, self._efficiency)
        self._engines.move_to_end(engine_id)
        if len(self._engines) > _ENGINES_MAX:
            self._engines.popitem(last=False)
        return known

    def dump(self) -> bytes:
        """All that was fitted, as JSON."""
        engines = msgspec.json.encode(
            {
                name: _SavedEngine(one.machine, one.prefill_fit.state(), one.step_fit.state())
                for name, one in self._engines.items()
                if one.prefill_fit.count or one.step_fit.count
            }
        )
        return msgspec.json.encode(_Saved(_VERSION, _digest(engines), msgspec.Raw(engines)))

    def load(self, saved: bytes) -> None:
        """Begin with what :meth:`dump` gave; nothing is taken of what cannot be used.

        Raises:
            UnusableCostsError: it is of another version, or was changed, or cannot be.
        """
        try:
            whole = msgspec.json.decode(saved, type=_Saved)
            if whole.version != _VERSION:
                raise UnusableCostsError(f"version {whole.version} is not {_VERSION}")
            if _digest(bytes(whole.engines)) != whole.digest:
                raise UnusableCostsError("the digest is not that of the engines")
            engines = msgspec.json.decode(whole.engines, type=dict[str, _SavedEngine])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UnusableCostsError(str(error)) from error
        restored: OrderedDict[str, EngineCosts] = OrderedDict()
        for name, one in list(engines.items())[-_ENGINES_MAX:]:
            known = one.machine.shape in SHAPES and one.machine.accelerator in ACCELERATORS
            if not known or one.machine.accelerators < 0:
                raise UnusableCostsError(f"{name[:64]!r} has an unknown machine")
            costs = EngineCosts(one.machine, self._efficiency)
            fitted = costs.prefill_fit.restore(one.prefill) and costs.step_fit.restore(one.step)
            if not fitted:
                raise UnusableCostsError(f"{name[:64]!r} has a fit that cannot be")
            restored[name] = costs
        self._engines = restored


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
