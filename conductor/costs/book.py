"""The known speed of each engine: initial estimates, and fitted values. Pure.

:meth:`CostBook.dump` and :meth:`CostBook.load` turn it into bytes and back, for a file.
"""

import functools
import hashlib
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from conductor.costs.bias import LastingBias
from conductor.costs.fit import FitState, RobustFit
from conductor.costs.hardware import ACCELERATORS
from conductor.costs.prior import USUAL, CostPrior, Efficiency, FetchLine, PrefillLine
from conductor.costs.shapes import SHAPES

_VERSION: Final = 1
_ENGINES_MAX: Final = 2048
"""Engines that are remembered; those not asked for longest are forgotten first."""
_PROMPT_TERMS: Final = ("constant", "weights", "attention")
"""Of a prompt, and of a decode step."""
_FETCH_TERMS: Final = ("constant", "memory", "disk", "network")
_HANDOFF_TERMS: Final = ("constant", "network")
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


class HandoffLine(NamedTuple):
    """``constant + factor * transfer`` seconds of a handoff.

    Attributes:
        constant_s: of each, beside its bytes: until the decode engine has asked for them, and has
            generated its first token.
        factor: how many times longer its bytes take than the slower link's datasheet says.
    """

    constant_s: float
    factor: float


class EngineCosts:
    """Seconds of one engine, as its measurements say, and its prior where there are none.

    Attributes:
        machine: machine of the engine.
        prior: its prior.
        prefill_fit: factors of the terms of its prompts.
        step_fit: factors of the terms of its decode steps.
        fetch_fit: factors of the terms of fetches from its node and from others.
        handoff_fit: factors of the terms of the KV that other engines hand over to it.
        prefill_bias: factor by which prompts take longer than the fit says.
        step_bias: factor by which decode steps take longer than the fit says.
    """

    def __init__(self, machine: Machine, efficiency: Efficiency = USUAL) -> None:
        accelerator = ACCELERATORS[machine.accelerator]
        self.machine = machine
        self.prior = CostPrior(SHAPES[machine.shape], accelerator, machine.accelerators, efficiency)
        self.prefill_fit = RobustFit(len(_PROMPT_TERMS))
        self.step_fit = RobustFit(len(_PROMPT_TERMS))
        self.fetch_fit = RobustFit(len(_FETCH_TERMS))
        self.handoff_fit = RobustFit(len(_HANDOFF_TERMS))
        self.prefill_bias, self.step_bias = LastingBias(), LastingBias()

    @property
    def fits(self) -> dict[str, tuple[Sequence[str], RobustFit]]:
        """All of them: what each is of, the names of its terms, and itself."""
        return {
            "prefill": (_PROMPT_TERMS, self.prefill_fit),
            "step": (_PROMPT_TERMS, self.step_fit),
            "fetch": (_FETCH_TERMS, self.fetch_fit),
            "handoff": (_HANDOFF_TERMS, self.handoff_fit),
        }

    @property
    def prefill_line(self) -> PrefillLine:
        """What prompts take."""
        constant, weights, attention = (
            self.prefill_fit.factors * self.prefill_bias.factor
        ).tolist()
        prior = self.prior.prefill
        return PrefillLine(
            constant * prior.constant_s,
            weights * prior.floor_s,
            weights * prior.token_s,
            attention * prior.pair_s,
        )

    @property
    def fetch_line(self) -> FetchLine:
        """What fetches take."""
        factors = self.fetch_fit.factors.tolist()
        return FetchLine(*(f * one for f, one in zip(factors, self.prior.fetch, strict=True)))

    @property
    def handoff_line(self) -> HandoffLine:
        """What handoffs to it take."""
        constant, transfer = self.handoff_fit.factors.tolist()
        return HandoffLine(constant * self.prior.handoff_s, transfer)

    def step_seconds(self, batch: float, context_tokens: float) -> float:
        """Seconds of a decode step of ``batch`` requests.

        Of an engine with data-parallel ranks, these are the numbers of its slowest rank: all step
        together.
        """
        seconds = self.step_fit.seconds(self.prior.step_terms(batch, context_tokens))
        return self.step_bias.factor * seconds

    @property
    def step_factors(self) -> npt.NDArray[np.float64]:
        """Of the terms of a decode step, the bias included; float64 [3]."""
        factors: npt.NDArray[np.float64] = self.step_fit.factors * self.step_bias.factor
        return factors

    def computed(self, new_tokens: float, prefix_tokens: float, seconds: float) -> None:
        """The end of a prompt was computed; the queue before it is not part of ``seconds``."""
        self.prefill_bias.observe(sum(self.prefill_line.terms(new_tokens, prefix_tokens)), seconds)
        self.prefill_fit.observe(self.prior.prefill.terms(new_tokens, prefix_tokens), seconds)

    def stepped(self, batch: float, context_tokens: float, seconds: float) -> None:
        """A decode step took so long."""
        self.step_bias.observe(self.step_seconds(batch, context_tokens), seconds)
        self.step_fit.observe(self.prior.step_terms(batch, context_tokens), seconds)

    def fetched(
        self, memory_bytes: float, disk_bytes: float, network_bytes: float, seconds: float
    ) -> None:
        """KV was brought to it from its node and another one, those in flight before included."""
        terms = self.prior.fetch.terms(memory_bytes, disk_bytes, network_bytes)
        self.fetch_fit.observe(terms, seconds)

    def handed_over(self, transfer_s: float, seconds: float) -> None:
        """KV was handed over to it, and its first token generated.

        Args:
            transfer_s: that the slower of both links takes by its datasheet.
            seconds: that it took.
        """
        self.handoff_fit.observe((self.prior.handoff_s, transfer_s), seconds)


class _SavedEngine(msgspec.Struct, frozen=True, omit_defaults=True):
    """What follows ``step`` is absent in files of older versions."""

    machine: Machine
    prefill: FitState
    step: FitState
    fetch: FitState | None = None
    handoff: FitState | None = None
    bias: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def of(cls, one: EngineCosts) -> "_SavedEngine":
        """What is kept of an engine."""
        prefill, step, fetch, handoff = (fit.state() for _, fit in one.fits.values())
        bias = (one.prefill_bias.factor, one.step_bias.factor)
        return cls(one.machine, prefill, step, fetch, handoff, bias)


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
        efficiency: efficiency of all priors.
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
                name: _SavedEngine.of(one)
                for name, one in self._engines.items()
                if any(fit.count for _, fit in one.fits.values())
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
            kept = (one.prefill, one.step, one.fetch, one.handoff)
            fits = zip([fit for _, fit in costs.fits.values()], kept, strict=True)
            biases = zip((costs.prefill_bias, costs.step_bias), one.bias, strict=True)
            fitted = all(fit.restore(state) for fit, state in fits if state is not None)
            if not (fitted and all(bias.restore(factor) for bias, factor in biases)):
                raise UnusableCostsError(f"{name[:64]!r} has a fit that cannot be")
            restored[name] = costs
        self._engines = restored


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
