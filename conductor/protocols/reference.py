"""The reference engine's protocol: prefill stores the prompt's pages and describes the rest."""

from typing import Final

import msgspec

from conductor.protocols.base import Fields, PairProtocol, PairRequest, one_token, relayed


def _prefill(request: PairRequest) -> Fields:
    asked = one_token(request.fields)
    asked["kv_transfer_params"] = msgspec.Raw(b'{"do_remote_decode":true}')
    return asked


REFERENCE: Final = PairProtocol(at_once=False, prefill=_prefill, decode=relayed, way="store")
