"""Requests of clients: completions and chat completions, in OpenAI's format.

Only the fields that the Conductor uses are checked. All others, also those of messages, are the
engine's to judge: they are relayed as they were sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

import msgspec

from conductor.front.openai import (
    NULL,
    TRUE,
    BadRequestError,
    ModelName,
    TokenId,
    name_of,
    parse,
)
from kvstore.index.reading import UnreadableError, read

_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
"""Types of content parts that are text, at vLLM and at OpenAI."""
_COMPLETION_OPTIONS: Final = ("add_special_tokens",)
_CHAT_OPTIONS: Final = (
    "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "chat_template", "chat_template_kwargs",
)  # fmt: skip
"""Fields that decide what the prompt is, which ``/tokenize`` has too."""
_FALSE: Final = msgspec.Raw(b"false")
_NO_REASONING: Final = msgspec.Raw(b'"none"')


class Route(StrEnum):
    """What is asked for, as a path at the Conductor and at engines."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


_Count = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
"""Some clients mean infinity; JSON has numbers of any length, which nobody can add to or print."""


class _Shared(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both kinds of requests that the Conductor uses."""

    model: ModelName | None = None
    max_tokens: _Count | None = None
    stream: bool | None = None
    stream_options: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    n: Annotated[int, msgspec.Meta(ge=1, le=1)] | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    service_tier: object = None
    user: object = None
    prompt_cache_key: object = None
    kv_transfer_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _CompletionFields(_Shared, frozen=True, kw_only=True):
    prompt: str | Annotated[list[TokenId], msgspec.Meta(min_length=1)]


class _ChatFields(_Shared, frozen=True, kw_only=True):
    messages: Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1)]
    max_completion_tokens: _Count | None = None


class _Part(msgspec.Struct):
    type: str = ""
    text: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    @property
    def is_text(self) -> bool:
        """Whether it is text; without a type, whether it has some."""
        if self.type:
            return self.type in _TEXT_PARTS
        return not isinstance(self.text, msgspec.UnsetType)


class _Message(msgspec.Struct):
    content: str | list[str | _Part] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A checked request for a completion or a chat completion.

    Attributes:
        route: which of the two.
        fields: all fields as sent by the client; values are JSON text. A stream asks for usage in
            any case.
        tokens: token ids of the prompt, if the client sent these; not to be changed.
        rendered: what ``/tokenize`` of an engine is to be asked for the prompt's tokens, without
            ``model``; None if they are known, or cannot be asked for: of messages with media, which
            the engine would fetch once more.
        model: requested model, or None.
        stream: whether the answer is a stream.
        request_id: id in the body, or None.
        salt: the prompt's cache salt; empty for none.
        max_tokens: maximum tokens of the answer; None if the request has no limit.
        service: its class; the field ``service_tier``, as long as nobody else tells.
        tenant: the field ``user``; empty if the request has none.
        session: the field ``prompt_cache_key``; empty if the request has none.
        usage_added: whether the client of a stream did not ask for usage itself.
    """

    route: Route
    fields: Mapping[str, msgspec.Raw]
    tokens: list[int] | None
    rendered: Mapping[str, msgspec.Raw] | None
    model: str | None
    stream: bool
    request_id: str | None
    salt: str = ""
    max_tokens: int | None = None
    service: str = ""
    tenant: str = ""
    session: str = ""
    usage_added: bool = False

    def body(self) -> bytes:
        """The original request."""
        return msgspec.json.encode(self.fields)


def parse_completion(route: Route, raw: bytes) -> Completion:
    """Check the body of a request to ``route``.

    Raises:
        BadRequestError: names the field.
    """
    known: _ChatFields | _CompletionFields
    known = parse(raw, _ChatFields) if route is Route.CHAT else parse(raw, _CompletionFields)
    if known.kv_transfer_params is not msgspec.UNSET and known.kv_transfer_params != NULL:
        raise BadRequestError("kv_transfer_params", "is set by the Conductor, not by clients")
    fields = parse(raw, dict[str, msgspec.Raw])
    fields.pop("kv_transfer_params", None)
    tokens, rendered, max_tokens = None, None, known.max_tokens
    if isinstance(known, _ChatFields):
        max_tokens = known.max_completion_tokens or max_tokens
        rendered = _rendered_chat(fields)
    elif not known.prompt:
        raise BadRequestError("prompt", "must not be empty")
    elif isinstance(known.prompt, list):
        tokens = known.prompt
    else:
        rendered = _only(fields, ("prompt", *_COMPLETION_OPTIONS))
    options = _with_usage(known.stream_options) if known.stream else None
    if options is not None:
        fields["stream_options"] = options
    return Completion(
        route=route,
        fields=fields,
        tokens=tokens,
        rendered=rendered,
        model=known.model,
        stream=bool(known.stream),
        request_id=known.request_id,
        salt=known.cache_salt or "",
        max_tokens=max_tokens,
        service=name_of(known.service_tier),
        tenant=name_of(known.user),
        session=name_of(known.prompt_cache_key),
        usage_added=options is not None,
    )


def _only(fields: Mapping[str, msgspec.Raw], names: tuple[str, ...]) -> dict[str, msgspec.Raw]:
    return {name: fields[name] for name in names if name in fields and fields[name] != NULL}


def _rendered_chat(fields: Mapping[str, msgspec.Raw]) -> dict[str, msgspec.Raw] | None:
    """What decides the prompt of a chat; None if not all of its contents are text."""
    try:
        messages = read(_MESSAGES.decode, bytes(fields["messages"]))
    except UnreadableError:
        return None  # the engine judges it
    parts = (part for one in messages if isinstance(one.content, list) for part in one.content)
    if not all(isinstance(part, str) or part.is_text for part in parts):
        return None
    rendered = _only(fields, ("messages", *_CHAT_OPTIONS))
    more = _only(fields, ("documents", "reasoning_effort"))
    if more:
        kwargs = _template_kwargs(fields, more)
        if kwargs is None:
            return None
        rendered["chat_template_kwargs"] = kwargs
    return rendered


def _template_kwargs(
    fields: Mapping[str, msgspec.Raw], more: dict[str, msgspec.Raw]
) -> msgspec.Raw | None:
    """Arguments of the template as vLLM makes them of fields that ``/tokenize`` does not have."""
    sent = _only(fields, ("chat_template_kwargs",)).get("chat_template_kwargs", b"{}")
    try:
        kwargs = read(_OPTIONS.decode, bytes(sent))
    except UnreadableError:
        return None
    effort = more.get("reasoning_effort")
    if effort is not None and "enable_thinking" not in kwargs:
        more["enable_thinking"] = _FALSE if effort == _NO_REASONING else TRUE
    return msgspec.Raw(msgspec.json.encode({**kwargs, **more}))


def _with_usage(raw: msgspec.Raw | msgspec.UnsetType) -> msgspec.Raw | None:
    """Options of a stream that asks for usage; None if these do, or are invalid."""
    sent = b"{}" if isinstance(raw, msgspec.UnsetType) or raw == NULL else bytes(raw)
    try:
        options = read(_OPTIONS.decode, sent)
    except UnreadableError:
        return None  # the engine says so
    if options.get("include_usage") == TRUE:
        return None
    return msgspec.Raw(msgspec.json.encode({**options, "include_usage": True}))


_OPTIONS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MESSAGES: Final = msgspec.json.Decoder(list[_Message])
