"""vLLM's protocol: ``kv_transfer_params`` between two servers with a KV connector.

Source: the proxy in vLLM's tests of its NIXL connector. The prefill server gets the request with
``do_remote_decode`` and one token, the decode server what that has answered. A field that forbids
an answer of one token, so that vLLM would refuse the request, is left out. kvstore's connector
reads hints; those of others ignore them, but never get any, because their engines have no node.
"""

from typing import Final

import msgspec

from conductor.protocols.base import Fields, PairProtocol, PairRequest, hinted, one_token, relayed

_FORBID_ONE_TOKEN: Final = ("min_tokens",)
_COUNT_TOKENS: Final = ("max_completion_tokens",)
"""Other names of ``max_tokens``, which override it."""


def _prefill(request: PairRequest) -> Fields:
    asked = one_token(request.fields)
    for field in _FORBID_ONE_TOKEN:
        asked.pop(field, None)
    for field in _COUNT_TOKENS:
        if field in asked:
            asked[field] = msgspec.Raw(b"1")
    return hinted(asked, request.hint, do_remote_decode=True)


VLLM: Final = PairProtocol(
    at_once=False, prefill=_prefill, decode=relayed, way="connector", takes_hints=True
)
