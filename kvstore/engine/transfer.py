"""The parameters between a prefill and a decode engine: ``kv_transfer_params`` of a request.

A router sends the request to the prefill engine with ``do_remote_decode``, and sends the parameters
of its answer with the same request to the decode engine. All adapters use one format: each writes
the fields it knows and reads those it can use. An engine whose sampling cannot be continued leaves
out the tokens; an earlier version leaves out the pages.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvstore.engine.requests import Request


class HandoffReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the KV of a handoff was moved from prefill to decode; each side reports its own view.

    Attributes:
        way: ``push``: straight from pool to pool.
        state: ``success`` or ``failed``.
        code: why it failed (:class:`kvstore.handoff.states.FailureCode`, or ``capacity``: this side
            had no place for it); None = it did not.
        seconds: duration of each state, by its name in lower case.
        bytes: KV and aux data that were sent, or that arrived and were verified.
        fake: no KV was moved, so the answer does not follow from the prompt.
    """

    way: str
    state: str
    code: str | None = None
    seconds: dict[str, float] = {}
    bytes: int = 0
    fake: bool = False


class Transfer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parameters; fields with default values are left out.

    Attributes:
        do_remote_decode: another engine will continue; the answer must have the other fields.
        do_remote_prefill: another engine has computed the prompt and wrote the other fields. One
            whose KV several stores keep may leave it to another of them.
        kvstore_pages: leading pages of the prompt that it has stored; -1 = unknown.
        kvstore_page_tokens: tokens per page.
        kvstore_node: name of the node that has them; empty = unknown.
        prompt_tokens: tokens of the prompt, -1 = unknown; must be equal on both engines.
        handoff_id: random id of this handoff.
        first_token: token sampled for ``position``; -1 = unknown.
        position: absolute position of ``first_token``; the next sample is for the one after.
        tail_key: hex key of the prompt's unfilled last page; None if it is not stored.
        tail_tokens: tokens in it, 0..page_tokens-1.
        seed: seed of the sampling; None if greedy.
        handoff: report of a push: how it went at the engine that answers.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    kvstore_pages: int = -1
    kvstore_page_tokens: int = -1
    kvstore_node: str = ""
    prompt_tokens: int = -1
    handoff_id: str = ""
    first_token: int = -1
    position: int = -1
    tail_key: str | None = None
    tail_tokens: int = 0
    seed: int | None = None
    handoff: HandoffReport | None = None

    @property
    def continues(self) -> bool:
        """Whether another engine has computed the prompt."""
        return self.do_remote_prefill or (self.kvstore_pages >= 0 and not self.do_remote_decode)

    def promised_pages(self, page_tokens: int) -> int:
        """Number of leading pages of ``page_tokens`` that the prefill engine says it has stored.

        They may not be ready yet, or never become ready: wait for them only with a deadline.
        """
        same_size = self.kvstore_page_tokens == page_tokens
        return max(0, self.kvstore_pages) if self.continues and same_size else 0

    def as_parameters(self) -> dict[str, Any]:
        """Convert to plain values for an answer."""
        parameters = msgspec.to_builtins(self)
        assert isinstance(parameters, dict)
        return parameters


NOTHING: Final = Transfer()


def read_transfer(parameters: Mapping[str, Any] | None) -> Transfer:
    """Parse a request's parameters; the default values if a field is invalid."""
    if not parameters:
        return NOTHING
    try:
        return msgspec.convert(parameters, Transfer)
    except (msgspec.ValidationError, ValueError, RecursionError):  # ValueError: lone surrogates
        return NOTHING


def answer_of(
    request: Request, pages: int, page_tokens: int, node_name: str
) -> dict[str, Any] | None:
    """The parameters of the answer for the engine that continues; None for an ordinary request.

    Args:
        request: it has ended.
        pages: its leading pages that are in the store, or that were submitted to it.
        page_tokens: tokens per page.
        node_name: name of the node; empty while unknown.
    """
    if not read_transfer(request.kv_transfer_params).do_remote_decode:
        return None
    prompt = request.num_prompt_tokens
    return Transfer(
        do_remote_prefill=True, kvstore_pages=min(pages, prompt // page_tokens),
        kvstore_page_tokens=page_tokens, kvstore_node=node_name, prompt_tokens=prompt,
    ).as_parameters()  # fmt: skip
