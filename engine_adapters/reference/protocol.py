"""The JSON of the HTTP server; checks requests field by field."""

import secrets
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar

import msgspec

from engine_adapters.reference.engine import Engine
from engine_adapters.reference.request import Output, Push, Request, Timings
from engine_adapters.reference.sampler import LOGPROBS_MAX, SEED_MAX, Sampling
from engine_adapters.reference.tokenizer import VOCAB_SIZE, TextStream, encode, shown
from kvstore.engine.transfer import NOTHING, Transfer
from kvstore.handoff.rooms import ROOM_MAX

_STOPS_MAX: Final = 8
_STOP_CHARS_MAX: Final = 256
_ID_CHARS_MAX: Final = 200
"""An id comes back in a header, and is in the log."""


class BadRequestError(Exception):
    """An invalid request; the message begins with the name of the field."""


class PushParameters(msgspec.Struct, forbid_unknown_fields=True):
    """``kv_transfer_params`` of a request whose K/V are pushed; both engines get it at once."""

    handoff: Literal["push"]
    room: int
    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    registry: str = ""


class _WithHandoff(msgspec.Struct):
    handoff: Any = None


class CompletionBody(msgspec.Struct):
    """``POST /v1/completions``; fields that OpenAI knows and we do not are ignored."""

    prompt: str | list[int]
    model: str | None = None
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stream: bool = False
    stop: str | list[str] | None = None
    logprobs: int | None = None
    return_token_ids: bool = False
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    request_id: str | None = None
    session_id: str | None = None


class ChoiceLogprobs(msgspec.Struct):
    """Log-probabilities in OpenAI's format, without ``text_offset``; one entry for each token.

    None: a token was sampled by another engine, which has not told.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class Choice(msgspec.Struct, omit_defaults=True):
    """One piece of output."""

    text: str
    index: int
    finish_reason: str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    logprobs: ChoiceLogprobs | msgspec.UnsetType = msgspec.UNSET


class CachedTokens(msgspec.Struct):
    """Prompt tokens that were not computed."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Token counts in OpenAI's format."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class AnswerFields(msgspec.Struct, kw_only=True):
    """What every answer, or chunk of a stream, tells; the later fields are only in the last one."""

    id: str
    object: str
    model: str
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    kv_transfer_params: Transfer | msgspec.UnsetType = msgspec.UNSET


class Completion(AnswerFields, kw_only=True):
    """The answer, or one chunk of a stream."""

    choices: list[Choice]


Body = TypeVar("Body", bound=msgspec.Struct)


def parse(raw: bytes, kind: type[Body], within: str = "") -> Body:
    """Parse a JSON body, or one of its fields.

    Args:
        raw: the JSON.
        kind: what it must be.
        within: name of the field.

    Raises:
        BadRequestError: it is not JSON, too deep, or a field has the wrong type.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        field = ".".join(part for part in (within, path.rstrip("`")) if part)
        raise BadRequestError(f"{field or 'body'}: {what}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"{within or 'body'}: {error}") from error


def to_request(
    body: CompletionBody, request_id: str, engine: Engine, emit: Callable[[Output], None]
) -> Request:
    """Check a completion request and convert it for the engine.

    Raises:
        BadRequestError: it is invalid; names the field.
    """
    tokens = encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
    transfer, push = _parameters(body.kv_transfer_params, engine)
    max_tokens = 1 if transfer.do_remote_decode else body.max_tokens
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    is_id = 0 < len(request_id) <= _ID_CHARS_MAX and request_id.isascii()
    checks = (
        (is_id and request_id.isprintable(), "request_id", "1 to 200 printable ASCII characters"),
        (bool(tokens), "prompt", "must not be empty"),
        (all(0 <= t < VOCAB_SIZE for t in tokens), "prompt", f"tokens are 0..{VOCAB_SIZE - 1}"),
        (max_tokens >= 1, "max_tokens", "must be at least 1"),
        (0.0 <= body.temperature <= 100.0, "temperature", "must be in 0..100"),
        (0.0 < body.top_p <= 1.0, "top_p", "must be in (0, 1]"),
        (body.seed is None or 0 <= body.seed <= SEED_MAX, "seed", f"must be in 0..{SEED_MAX}"),
        (
            body.logprobs is None or 0 <= body.logprobs <= LOGPROBS_MAX,
            "logprobs",
            f"must be in 0..{LOGPROBS_MAX}",
        ),
        (len(stops) <= _STOPS_MAX, "stop", f"at most {_STOPS_MAX} strings"),
        (all(0 < len(s) <= _STOP_CHARS_MAX for s in stops), "stop", "an empty or too long string"),
        (body.model in (None, engine.model_name), "model", f"this is {engine.model_name}"),
        (
            engine.fits(len(tokens) + max_tokens),
            "max_tokens",
            f"prompt ({len(tokens)}) and output together exceed what this engine can hold",
        ),
    )
    for right, field, message in checks:
        if not right:
            raise BadRequestError(f"{field}: {message}")
    from_store = transfer.do_remote_prefill and push is None
    handoff = _handoff(transfer, len(tokens)) if from_store else None
    seed = body.seed if handoff is None or handoff.seed is None else handoff.seed
    return Request(
        id=request_id,
        tokens=list(tokens),
        prompt_tokens=len(tokens),
        max_tokens=max_tokens,
        emit=emit,
        sampling=Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            seed=secrets.randbelow(SEED_MAX) if seed is None else seed,
        ),
        text=TextStream(stops),
        logprobs=body.logprobs,
        to_handoff=transfer.do_remote_decode,
        from_handoff=handoff,
        push=push,
        session_id=body.session_id or "",
    )


def _parameters(raw: msgspec.Raw, engine: Engine) -> tuple[Transfer, Push | None]:
    """Parse and check the transfer parameters.

    Raises:
        BadRequestError: they are invalid; names the field.
    """
    name = "kv_transfer_params"
    if bytes(raw).strip() == b"null":
        return NOTHING, None
    if not isinstance(parse(raw, _WithHandoff, name).handoff, str):
        return parse(raw, Transfer, name), None
    push = parse(raw, PushParameters, name)
    mode, here = engine.options.mode, "do_remote_decode"
    if engine.options.mode == "decode":
        here = "do_remote_prefill"
    checks = (
        ("push" in engine.handoff, "handoff", "this engine has no --handoff push"),
        (getattr(push, here), here, f"must be true at a {mode} engine"),
        (
            push.do_remote_decode != push.do_remote_prefill,
            "do_remote_decode",
            "excludes do_remote_prefill",
        ),
        (0 <= push.room <= ROOM_MAX, "room", "is not within 63 bits"),
        (bool(push.registry) == (mode == "decode"), "registry", "decode needs it, nobody else"),
    )
    for right, field, message in checks:
        if not right:
            raise BadRequestError(f"{name}.{field}: {message}")
    transfer = Transfer(
        do_remote_decode=push.do_remote_decode, do_remote_prefill=push.do_remote_prefill
    )
    return transfer, Push(push.room, push.registry)


def _handoff(transfer: Transfer, prompt_tokens: int) -> Transfer:
    """Check the transfer parameters of a prefill engine.

    Raises:
        BadRequestError: they are invalid; names the field.
    """
    try:
        key = bytes.fromhex(transfer.tail_key or "")
    except ValueError as error:
        raise BadRequestError(f"kv_transfer_params.tail_key: {error}") from error
    checks = (
        (0 <= transfer.first_token < VOCAB_SIZE, "first_token", "is not a token"),
        (transfer.prompt_tokens == prompt_tokens, "prompt_tokens", f"is {prompt_tokens} here"),
        (transfer.position == prompt_tokens, "position", f"must be {prompt_tokens}"),
        (len(key) in (0, 32), "tail_key", "must be 32 bytes in hex"),
        (0 <= transfer.tail_tokens < prompt_tokens + 1, "tail_tokens", "exceeds the prompt"),
        (transfer.seed is None or 0 <= transfer.seed <= SEED_MAX, "seed", "is out of range"),
    )
    for right, field, message in checks:
        if not right:
            raise BadRequestError(f"kv_transfer_params.{field}: {message}")
    return transfer


def logprobs_in(output: Output, count: int) -> ChoiceLogprobs:
    """The log-probabilities of an output, with so many alternatives to each token."""
    pairs = list(zip(output.tokens, output.logprobs, strict=True))
    return ChoiceLogprobs(
        [shown(token) for token, _ in pairs],
        [one.get(token) for token, one in pairs],
        [{shown(at): one[at] for at in one} if count and one else None for _, one in pairs],
    )


class CompletionAnswers:
    """Makes the answers to one completion."""

    def __init__(self, request: Request, model: str, *, with_ids: bool) -> None:
        self._request = request
        self._model = model
        self._with_ids = with_ids

    def whole(self, output: Output) -> Completion:
        """One answer with all output."""
        return self.chunk(output)

    def chunk(self, output: Output) -> Completion:
        """A chunk of a stream."""
        choice = Choice(text=output.text, index=0, finish_reason=output.finish_reason)
        if self._with_ids or tells_ids(self._request, output):
            choice.token_ids = output.tokens
        if self._request.logprobs is not None:
            choice.logprobs = logprobs_in(output, self._request.logprobs)
        completion = Completion(
            id=self._request.id, object="text_completion", model=self._model, choices=[choice]
        )
        tell_end(completion, self._request, output)
        return completion


def tells_ids(request: Request, output: Output) -> bool:
    """Whether an output is the first token for another engine, which gets its id unasked."""
    return output.handoff is not None and request.to_handoff


def tell_end(answer: AnswerFields, request: Request, output: Output) -> None:
    """Add what the last output of a request tells to its answer."""
    if output.finish_reason is not None:
        answer.usage = usage(request)
        answer.timings = request.timings
        if output.handoff is not None:
            answer.kv_transfer_params = output.handoff


def usage(request: Request) -> Usage:
    """Token counts of an ended request."""
    timings = request.timings
    cached = timings.cached_tokens + timings.restored_tokens + timings.pushed_tokens
    return Usage(
        prompt_tokens=request.prompt_tokens,
        completion_tokens=request.output_tokens,
        total_tokens=len(request.tokens),
        prompt_tokens_details=CachedTokens(min(cached, request.prompt_tokens)),
    )
