"""What a prefill and a decode engine tell each other: ``kv_transfer_params`` of a request.

A front sends the request to the prefill engine with ``do_remote_decode``, takes the parameters of
its answer, and sends them with the same request to the decode engine. One format for every adapter:
each says what it knows, and reads what it can use. An engine whose sampling does not travel says
nothing of tokens, one of an earlier version nothing of pages.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec


class Transfer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parameters; what is not said is left out on the wire.

    Attributes:
        do_remote_decode: another engine goes on: the answer is to carry what it needs.
        do_remote_prefill: another engine has computed the prompt; the rest is what it says.
        kvstore_pages: leading pages of the prompt that it has given to the store; -1 = not said.
        kvstore_page_tokens: tokens in one of them.
        prompt_tokens: tokens of the prompt, -1 = not said; both engines must agree.
        handoff_id: random name of this hand-off.
        first_token: what was sampled for ``position``; -1 = not said.
        position: absolute position of ``first_token``; the next draw is for the one after.
        tail_key: hex key of the prompt's unfilled last page; None when the store has none.
        tail_tokens: tokens in it, 0..page_tokens-1.
        seed: of the sampling; None when greedy.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    kvstore_pages: int = -1
    kvstore_page_tokens: int = -1
    prompt_tokens: int = -1
    handoff_id: str = ""
    first_token: int = -1
    position: int = -1
    tail_key: str | None = None
    tail_tokens: int = 0
    seed: int | None = None

    def promised_pages(self, page_tokens: int) -> int:
        """Leading pages of ``page_tokens`` that the prefill engine says it has given to the store.

        They may not be ready yet, nor ever come: they are worth a wait with a deadline, no more.
        """
        same_size = self.kvstore_page_tokens == page_tokens
        return max(0, self.kvstore_pages) if self.do_remote_prefill and same_size else 0

    def as_parameters(self) -> dict[str, Any]:
        """As engines hand it on, that carry plain values."""
        told = msgspec.to_builtins(self)
        assert isinstance(told, dict)
        return told


NOTHING: Final = Transfer()


def read_transfer(parameters: Mapping[str, Any] | None) -> Transfer:
    """What a request's parameters say: nothing, where a field is not what it should be."""
    if not parameters:
        return NOTHING
    try:
        return msgspec.convert(parameters, Transfer)
    except msgspec.ValidationError:
        return NOTHING
