"""vLLM's protocol: ``kv_transfer_params`` between two servers with a KV connector.

The prefill server gets the request with ``do_remote_decode`` and one token, the decode server what
that has answered. Some fields would not work with one token, or only cost time there:

=============================== ==============================================================
``min_tokens``                  more of them than of ``max_tokens`` are refused
``stop``, ``stop_token_ids``,   an answer that ends by one of these, not by its length, is not
the end of the text             handed over by the connectors of NIXL, Mooncake and MoRIIO
``best_of``                     old servers compute several answers
``use_beam_search``             beams get no transfer parameters, at neither server
``prompt_logprobs``, ``echo``   the prefix cache is not read for the former, nor for the latter
                                with log-probabilities, and the answer is as long as the prompt
``return_token_ids``,           likewise
``return_prompt_text``
``truncate_prompt_tokens`` < 0  what is left of the prompt depends on the length of the answer
=============================== ==============================================================

Source: vLLM 0.32, ``entrypoints/openai/*/protocol.py``, ``sampling_params.py``,
``renderers/params.py``, ``v1/core/sched/utils.py:check_stop`` and the connectors. Fields that can
be part of the prompt, such as ``tools``, ``tool_choice`` and ``response_format``, stay as they are.
kvstore's connector reads hints; those of others ignore them, but never get any, because their
engines have no node.
"""

from typing import Final

import msgspec

from conductor.protocols.base import Fields, PairProtocol, PairRequest, hinted, one_token, relayed

_NOT_WITH_ONE_TOKEN: Final = (
    "min_tokens", "stop", "stop_token_ids", "best_of", "use_beam_search", "length_penalty",
    "prompt_logprobs", "echo", "return_token_ids", "return_prompt_text",
)  # fmt: skip


def _prefill(request: PairRequest) -> Fields:
    asked = one_token(request.fields)
    for field in _NOT_WITH_ONE_TOKEN:
        asked.pop(field, None)
    asked["ignore_eos"] = msgspec.Raw(b"true")
    if _can_hand_over(request.fields):
        return hinted(asked, request.hint, do_remote_decode=True)
    return asked


def _can_hand_over(fields: Fields) -> bool:
    """Whether the decode server would take the prompt that the prefill server computes.

    If not, KV must not wait for it there: the decode server computes the prompt, or finds it in a
    store.
    """
    beams, cut = fields.get("use_beam_search", b""), fields.get("truncate_prompt_tokens", b"")
    return bytes(beams) != b"true" and not bytes(cut).startswith(b"-")


VLLM: Final = PairProtocol(
    at_once=False, prefill=_prefill, decode=relayed, way="connector", takes_hints=True
)
