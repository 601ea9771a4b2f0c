"""NVIDIA Dynamo's workers behind frontends that route directly (``--router-mode direct``).

The request goes to the frontend of the decode worker and names both workers, as ``nvext``. Their
side asks the prefill worker, gets the room (or its transfer parameters) from it, and decodes. So
the prefill engine gets no request from here, and its place is free with the first byte.

Engines are registered under the instance id of their worker: the number in the answer of the
frontend's ``GET /health``. A worker that Dynamo does not know (any more) is a 400 of which only the
message tells what is wrong. Tried with frontend and mock workers of Dynamo 1.6.1.
"""

from typing import Final

import msgspec

from conductor.protocols.base import Fields, PairProtocol, PairRequest
from kvstore.index.reading import UnreadableError, read

_INSTANCE: Final = r"0|[1-9][0-9]{0,19}"
_UNKNOWN_WORKER: Final = "Invalid request"


class _Refusal(msgspec.Struct):
    message: str = ""


_OPTIONS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_REFUSAL: Final = msgspec.json.Decoder(_Refusal)


def _decode(request: PairRequest, _: msgspec.Raw | None) -> Fields:
    workers = {"prefill_worker_id": request.prefill, "decode_worker_id": request.decode}
    return _with_workers(request.fields, workers)


def _alone(fields: Fields, engine: str) -> Fields:
    return _with_workers(fields, {"backend_instance_id": engine})


def _with_workers(fields: Fields, workers: dict[str, str]) -> Fields:
    """The request with these workers; whatever else its client has in ``nvext`` stays."""
    try:
        options = read(_OPTIONS.decode, bytes(fields.get("nvext", b"{}")))
    except UnreadableError:
        options = {}
    for name in ("prefill_worker_id", "decode_worker_id", "backend_instance_id"):
        options.pop(name, None)
    for name, engine in workers.items():
        options[name] = msgspec.Raw(engine.encode())
    return {**fields, "nvext": msgspec.Raw(msgspec.json.encode(options))}


def _misses(raw: bytes) -> bool:
    try:
        return read(_REFUSAL.decode, raw).message == _UNKNOWN_WORKER
    except UnreadableError:
        return False


DYNAMO: Final = PairProtocol(
    at_once=True, prefill=None, decode=_decode, alone=_alone, misses=_misses, engine_ids=_INSTANCE
)
