"""Which engines serve a model, which of them can do so now, and why none can. Pure."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.routing.columns import View
from conductor.routing.engines import Health, Role
from kvstore.index.layout import Flags

_KEPT_MAX: Final = 1_024
"""Models and LoRA adapters whose engines are kept; a client may ask for any name."""


class ServingEngines(NamedTuple):
    """The engines of one model, whatever their health.

    Attributes:
        rows: in the view.
        at: the same as an array.
        ids: their names.
        roles: their roles.
        firsts: rows of those that can compute prompts.
        decodes: whether each only decodes.
        of_protocol: whether each speaks this protocol, by protocol.
        of_offer: whether each offers it over its own; only protocols that somebody offers.
    """

    rows: list[int]
    at: npt.NDArray[np.intp]
    ids: tuple[str, ...]
    roles: tuple[Role, ...]
    firsts: list[int]
    decodes: Flags
    of_protocol: dict[str, Flags]
    of_offer: dict[str, Flags]


class EnginePairs(NamedTuple):
    """Rows of engines that can serve in pairs.

    Attributes:
        prefill: those that prefill.
        decode: those that decode.
        offering: one of the former for each protocol that they offer over their own.
    """

    prefill: list[int]
    decode: list[int]
    offering: dict[str, int]


class EngineGroup(NamedTuple):
    """The engines for requests of one model that have failed at the same engines, as rows.

    Attributes:
        serving: all that serve the model.
        alone: those that can serve alone.
        pairs: for each protocol by which both are asked at once, and for all others.
        why_none: why no engine can serve; empty if some can.
    """

    serving: ServingEngines
    alone: list[int]
    pairs: dict[str, EnginePairs]
    why_none: str


def serving(view: View, model: str) -> ServingEngines:
    """The engines of a model; or of a LoRA adapter, if no model has its name."""
    kept: dict[str, ServingEngines] = view.kept
    found = kept.get(model)
    if found is None:
        rows = [row for row, served in enumerate(view.models) if served == model]
        rows = rows or [row for row, names in enumerate(view.adapters) if model in names]
        found = ServingEngines(
            rows,
            np.array(rows, dtype=np.intp),
            tuple(view.ids[row] for row in rows),
            tuple(view.roles[row] for row in rows),
            [row for row in rows if view.roles[row] is not Role.DECODE],
            np.array([view.roles[row] is Role.DECODE for row in rows], dtype=np.bool_),
            _flags([view.protocols[row] for row in rows]),
            _flags([view.offers[row] for row in rows]),
        )
        if len(kept) >= _KEPT_MAX:
            kept.clear()
        kept[model] = found
    return found


def _flags(names: Sequence[str]) -> dict[str, Flags]:
    every = dict.fromkeys(names)
    return {one: np.array([one == name for name in names], dtype=np.bool_) for one in every}


def grouped(
    view: View, model: str, excluded: frozenset[str], kind: Callable[[str], str]
) -> EngineGroup:
    """Who can serve; suspect engines are used only if the healthy ones cannot.

    Args:
        view: all engines.
        model: of the request.
        excluded: ids of the engines that have failed it.
        kind: engines whose protocols are of one kind can be paired.
    """
    every = serving(view, model)
    fit = [row for row in every.rows if view.ids[row] not in excluded]
    for bad in ({Health.SUSPECT, Health.DEAD}, {Health.DEAD}):
        well = [row for row in fit if view.health[row] not in bad]
        alone = [row for row in well if view.roles[row] is Role.MIXED]
        kinds = {row: kind(view.protocols[row]) for row in well}
        pairs = {
            one: _pairs(view, [row for row in well if kinds[row] == one])
            for one in dict.fromkeys(kinds.values())
        }
        pairs = {one: those for one, those in pairs.items() if those.decode}
        if alone or any(one.prefill for one in pairs.values()):
            return EngineGroup(every, alone, pairs, "")
    return EngineGroup(every, [], pairs, why_nobody(view, fit, len(excluded)))


def _pairs(view: View, rows: Sequence[int]) -> EnginePairs:
    by_role: dict[Role, list[int]] = {role: [] for role in Role}
    for row in rows:
        by_role[view.roles[row]].append(row)
    decode = by_role[Role.DECODE] or by_role[Role.MIXED]
    prefill = by_role[Role.PREFILL]
    return EnginePairs(prefill, decode, {view.offers[one]: one for one in prefill})


def why_nobody(view: View, fit: Sequence[int], excluded: int) -> str:
    """Why no engine can serve.

    Args:
        view: all engines.
        fit: rows of those of the model that have not failed the request.
        excluded: how many have.
    """
    left = [row for row in fit if view.health[row] is not Health.DEAD]
    roles = {view.roles[row] for row in left}
    if roles == {Role.PREFILL}:
        return "only prefill engines are left"
    if roles == {Role.DECODE}:
        return "only decode engines are left"
    if roles:
        names = ", ".join(sorted({view.protocols[row] for row in left}))
        return f"no prefill and decode engine are left that speak the same protocol: {names}"
    failed = f"; {excluded} failed this request" if excluded else ""
    return f"no engine is left for this model{failed}"
