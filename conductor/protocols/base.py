"""A protocol: two functions from the client's request to those of the two engines. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from conductor.routing.decisions import HandoffReport

_ONE: Final = msgspec.Raw(b"1")
Fields = Mapping[str, msgspec.Raw]
"""Fields of a request's body; values are JSON text."""


class PairRequest(NamedTuple):
    """One attempt to serve a request with a pair.

    Attributes:
        fields: as the client sent them, without ``kv_transfer_params``; not to be changed.
        room: number of this attempt, 63 bits (:mod:`kvstore.handoff.rooms`); no other attempt of
            any request has the same.
        prefill_url: ``http://host:port`` of the engine that computes the prompt.
        decode_url: of the engine that generates the tokens. If the two are asked in turn, it is
            known when the prefill engine has answered: then it may be another than before.
        registry: ``http://host:port`` of the prefill engine's registry of handoffs; empty = it has
            none.
        prefill: id of the engine that computes the prompt.
        decode: of the engine that generates the tokens; likewise.
        hint: an envelope of hints for the engine that computes the prompt
            (:mod:`conductor.protocols.hints`), if its protocol takes them; None = there is none.
    """

    fields: Fields
    room: int
    prefill_url: str
    decode_url: str
    registry: str = ""
    prefill: str = ""
    decode: str = ""
    hint: msgspec.Raw | None = None


@dataclass(frozen=True, slots=True)
class PairProtocol:
    """How a pair is asked.

    Attributes:
        at_once: False: the decode engine is asked when the prefill engine has answered. True: both
            are asked at once; if either fails before the first byte, both requests end, and the
            next attempt has another room. Both engines must speak the protocol then.
        prefill: the request to the prefill engine, of which one JSON answer is expected; None = it
            gets none, because the decode engine asks it (only if ``at_once``).
        decode: the request to the decode engine, whose answer the client gets. The second argument
            are the ``kv_transfer_params`` of the prefill engine's answer; None if it named none, or
            if both are asked at once.
        way: how the KV goes, for the decision log and the metrics; empty = not said.
        over: the protocol of engines that may offer this one beside it, in ``handoff``; such pairs
            are asked by this one if both engines offer it. None = engines name it as their own.
        report: reads from the ``kv_transfer_params`` of either engine's answer how the handoff
            went there; the client does not get these then. None = they do not tell.
        alone: the request to an engine that serves it alone, and whose id is the second argument;
            None = as the client sent it.
        misses: whether the body of an engine's 4xx says that it does not know an engine that the
            request names, so that others may serve it; None = it never does.
        engine_ids: a regular expression for the ids of engines, if requests name them; empty = any.
        takes_hints: whether engines read hints of where pages are, in ``kv_transfer_params``.
    """

    at_once: bool
    prefill: Callable[[PairRequest], Fields] | None
    decode: Callable[[PairRequest, msgspec.Raw | None], Fields]
    way: str = ""
    over: str | None = None
    report: Callable[[msgspec.Raw], HandoffReport | None] | None = None
    alone: Callable[[Fields, str], Fields] | None = None
    misses: Callable[[bytes], bool] | None = None
    engine_ids: str = ""
    takes_hints: bool = False

    def __post_init__(self) -> None:
        """Refuse a protocol in which nobody asks the prefill engine."""
        assert self.at_once or self.prefill is not None
        assert self.at_once or self.over is None


def one_token(fields: Fields) -> dict[str, msgspec.Raw]:
    """A request that ends after the first token and is answered with JSON."""
    asked = dict(fields)
    asked.pop("stream_options", None)
    asked["max_tokens"] = _ONE
    if "messages" in fields or "max_completion_tokens" in fields:
        asked["max_completion_tokens"] = _ONE  # overrides the other name
    asked["stream"] = msgspec.Raw(b"false")
    return asked


def hinted(fields: Fields, hint: msgspec.Raw | None, **parameters: object) -> Fields:
    """A request with these transfer parameters, and with the hint if there is one."""
    if hint is not None:
        parameters["kv_hints"] = hint
    return {**fields, "kv_transfer_params": msgspec.Raw(msgspec.json.encode(parameters))}


def relayed(request: PairRequest, transfer: msgspec.Raw | None) -> Fields:
    """The client's request with what the prefill engine has answered, unchanged.

    Without, the decode engine computes the prompt.
    """
    if transfer is None:
        return request.fields
    return {**request.fields, "kv_transfer_params": transfer}
