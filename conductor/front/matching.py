"""The body of ``POST /v1/index/match``: one prompt or a batch, by tokens or by prefix keys."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from conductor.front.openai import BadRequestError, ModelName, TokenId
from kvstore.protocol.page import PrefixKeys

TOKENS_MAX: Final = 1 << 20
"""Maximum token ids of one request, all prompts together."""
KEYS_MAX: Final = 1 << 16
"""Maximum prefix keys of one request, all prompts together: 4 MiB of JSON."""
PROMPTS_MAX: Final = 64

_Tokens = Annotated[list[TokenId], Meta(max_length=TOKENS_MAX)]
_Key = Annotated[
    str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)", description="64 hex digits", max_length=64)
]
_Keys = Annotated[list[_Key], Meta(max_length=KEYS_MAX)]
_Salt = Annotated[str, Meta(max_length=4096)]


class MatchPrompt(msgspec.Struct, forbid_unknown_fields=True):
    """One prompt of a batch: exactly one of its token ids and its prefix keys, in hex."""

    tokens: _Tokens | None = None
    keys: _Keys | None = None


class MatchBody(msgspec.Struct):
    """What to look up.

    Attributes:
        model: the model; or a LoRA adapter.
        tokens: token ids of one prompt.
        keys: prefix keys of one prompt, in hex.
        prompts: several prompts instead.
        lora: a LoRA adapter of the model; empty = as ``model`` says. Keys say it themselves.
        cache_salt: of prompts by tokens; empty for none. Keys say it themselves.
    """

    model: ModelName
    tokens: _Tokens | None = None
    keys: _Keys | None = None
    prompts: Annotated[list[MatchPrompt], Meta(min_length=1, max_length=PROMPTS_MAX)] | None = None
    lora: Annotated[str, Meta(max_length=512)] = ""
    cache_salt: _Salt = ""

    def asked(self) -> list[list[int] | PrefixKeys]:
        """The prompts, in order.

        Raises:
            BadRequestError: fields contradict each other, or the prompts together are too long;
                names the field.
        """
        if self.prompts is None:
            asked = [_asked("tokens", self.tokens, self.keys)]
        elif self.tokens is not None or self.keys is not None:
            raise BadRequestError("prompts", "cannot be given with `tokens` or `keys`")
        else:
            asked = [_asked("prompts", one.tokens, one.keys) for one in self.prompts]
        keyed = [one for one in asked if isinstance(one, PrefixKeys)]
        if sum(map(len, keyed)) > KEYS_MAX:
            raise BadRequestError("prompts", f"have more than {KEYS_MAX} keys together")
        if sum(len(one) for one in asked if isinstance(one, list)) > TOKENS_MAX:
            raise BadRequestError("prompts", f"have more than {TOKENS_MAX} tokens together")
        for field, value in (("lora", self.lora), ("cache_salt", self.cache_salt)):
            if keyed and value:
                raise BadRequestError(field, "cannot be given with keys, of which it is a part")
        return asked


def _asked(field: str, tokens: list[int] | None, keys: list[str] | None) -> list[int] | PrefixKeys:
    """One prompt; ``field`` is named if it has not exactly one of both."""
    if (tokens is None) == (keys is None):
        raise BadRequestError(field, "needs either `tokens` or `keys`")
    if keys is not None:
        return PrefixKeys(bytes.fromhex("".join(keys)))
    assert tokens is not None
    return tokens
