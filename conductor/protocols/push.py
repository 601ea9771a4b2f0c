"""The reference engine's protocol if both engines offer it: prefill pushes KV as it computes.

Both engines get the request at once, with one room; the decode engine asks the prefill engine's
registry where to find it (:mod:`kvstore.handoff`). The prefill engine answers when its push has
ended. If the push fails, the decode engine goes on by itself. Each engine tells in the
``kv_transfer_params`` of its answer how the handoff went on its side.
"""

import math
from typing import Annotated, Final, Literal

import msgspec

from conductor.protocols.base import Fields, PairProtocol, PairRequest, one_token
from conductor.routing.decisions import HandoffReport
from kvstore.handoff.states import TERMINAL, State
from kvstore.index.reading import UnreadableError, read

_STATES: Final = frozenset(state.name.lower() for state in State if state not in TERMINAL)
_CODE: Final = r"^[a-z0-9_]{0,64}$(?!\n)"


class _Handoff(msgspec.Struct):
    state: Literal["success", "failed"]
    code: Annotated[str, msgspec.Meta(pattern=_CODE)] | None = None
    seconds: dict[str, float] = {}
    bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0


class _Params(msgspec.Struct):
    handoff: _Handoff | None = None


_PARAMS: Final = msgspec.json.Decoder(_Params)


def _prefill(request: PairRequest) -> Fields:
    parameters = {"do_remote_decode": True, "handoff": "push", "room": request.room}
    return {**one_token(request.fields), "kv_transfer_params": _raw(parameters)}


def _decode(request: PairRequest, _: msgspec.Raw | None) -> Fields:
    parameters = {
        "do_remote_prefill": True,
        "handoff": "push",
        "room": request.room,
        "registry": request.registry,
    }
    return {**request.fields, "kv_transfer_params": _raw(parameters)}


def _report(raw: msgspec.Raw) -> HandoffReport | None:
    """What an engine tells of its side; only states that there are count."""
    try:
        report = read(_PARAMS.decode, bytes(raw)).handoff
    except UnreadableError:
        return None
    if report is None:
        return None
    seconds = {
        state.lower(): value
        for state, value in report.seconds.items()
        if state.lower() in _STATES and math.isfinite(value) and value >= 0
    }
    return HandoffReport("push", report.state, report.code or "", seconds, report.bytes)


def _raw(parameters: dict[str, object]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(parameters))


PUSH: Final = PairProtocol(
    at_once=True, prefill=_prefill, decode=_decode, way="push", over="reference", report=_report
)
