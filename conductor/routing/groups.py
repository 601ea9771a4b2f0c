"""Which engines serve a model, and why none of them can. Pure."""

from collections.abc import Sequence

from conductor.routing.columns import View
from conductor.routing.engines import Health, Role


def serving(view: View, model: str) -> list[int]:
    """Rows of the engines of a model; or of a LoRA adapter, if no model has its name."""
    found = [row for row, served in enumerate(view.models) if served == model]
    return found or [row for row, names in enumerate(view.adapters) if model in names]


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
