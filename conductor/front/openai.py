"""OpenAI's JSON: how requests are parsed, errors, and the reports of engines."""

import math
import re
from collections.abc import Iterable
from typing import Annotated, Final, TypeVar

import msgspec
from aiohttp import web

from conductor.routing.decisions import Measured
from kvstore.index.reading import UnreadableError, read

ModelName = Annotated[str, msgspec.Meta(max_length=512)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]

NULL: Final = msgspec.Raw(b"null")  # never equal to bytes
TRUE: Final = msgspec.Raw(b"true")
_NAME_CHARS: Final = 256
_SAID_MAX: Final = 1 << 50
"""Larger counts and durations that an engine reports of a request are ignored."""
_TYPES: Final = {400: "invalid_request_error", 404: "not_found_error", 429: "rate_limit_error"}


class BadRequestError(Exception):
    """An invalid request; names the field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


Kind = TypeVar("Kind")
Number = TypeVar("Number", int, float)


def parse(raw: bytes, kind: type[Kind]) -> Kind:
    """Parse a JSON body.

    Raises:
        BadRequestError: it is not JSON, or a field is invalid; names it.
    """
    try:
        return read(lambda data: msgspec.json.decode(data, type=kind), raw)
    except UnreadableError as error:
        if not isinstance(error.__cause__, msgspec.ValidationError):
            raise BadRequestError("body", f"not JSON: {error}") from error
        what, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").lstrip(".").partition("[")[0]
        if not field:
            _, quoted, name = what.partition("field `")
            field = name.rstrip("`") if quoted else "body"
            head, colon, rest = what.partition(": ")
            if colon and head.isidentifier():  # message of one of our own checks
                field, what = head, rest
        raise BadRequestError(field, what) from error


def name_of(value: object) -> str:
    """A client's name of something; only its beginning counts. Empty if it is none.

    A header may have any bytes; those that are not UTF-8 are escaped.
    """
    if not isinstance(value, str):
        return ""
    return value[:_NAME_CHARS].encode(errors="backslashreplace").decode()


def error_body(status: int, code: str, message: str, field: str | None = None) -> bytes:
    """An error in OpenAI's format."""
    kind = _TYPES.get(status, "server_error")
    error = {"message": message, "type": kind, "param": field, "code": code}
    return msgspec.json.encode({"error": error})


def error_response(
    status: int,
    code: str,
    message: str,
    *,
    field: str | None = None,
    retry_after_s: float | None = None,
    request_id: str | None = None,
) -> web.Response:
    """A response with :func:`error_body`; 429 and 503 should have ``retry_after_s``."""
    headers: dict[str, str] = {}
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    if request_id is not None:
        headers["X-Request-Id"] = request_id
    body = error_body(status, code, message, field)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Timings(msgspec.Struct):
    queue_s: float | None = None
    restore_s: float | None = None
    compute_s: float | None = None
    restored_tokens: int | None = None
    restored_bytes: int | None = None
    cached_tokens: int | None = None


class _Refused(msgspec.Struct):
    param: str | None = None


class _Refusal(msgspec.Struct):
    error: _Refused


class EngineAnswer(msgspec.Struct):
    """The fields of an engine's answer, or of a stream's last chunk, that the Conductor uses."""

    usage: _Usage | None = None
    timings: _Timings | None = None
    choices: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    kv_transfer_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    @property
    def transfer(self) -> msgspec.Raw | None:
        """The transfer parameters to relay unchanged, or None."""
        raw = self.kv_transfer_params
        return None if isinstance(raw, msgspec.UnsetType) or raw == NULL else raw

    def measured(self) -> Measured | None:
        """The measurements for the decision log; None if there are none."""
        if self.usage is None and self.timings is None:
            return None
        usage = self.usage or _Usage()
        timings = self.timings or _Timings()
        details = usage.prompt_tokens_details or _PromptDetails()
        cached = timings.cached_tokens
        if cached is None and timings.restored_tokens is None:
            cached = details.cached_tokens
        return Measured(
            prompt_tokens=_possible(usage.prompt_tokens),
            completion_tokens=_possible(usage.completion_tokens),
            cached_tokens=_possible(cached),
            restored_tokens=_possible(timings.restored_tokens),
            restored_bytes=_possible(timings.restored_bytes),
            queue_s=_possible(timings.queue_s),
            restore_s=_possible(timings.restore_s),
            compute_s=_possible(timings.compute_s),
        )


def _possible(said: Number | None) -> Number | None:
    """A count or a duration as an engine says it; None if no request can have it."""
    return said if said is not None and 0 <= said <= _SAID_MAX else None


def read_answer(raw: bytes) -> EngineAnswer | None:
    """Parse an engine's JSON answer; None if it is invalid."""
    try:
        return read(_ANSWER.decode, raw)
    except UnreadableError:
        return None


_REFUSAL: Final = msgspec.json.Decoder(_Refusal)
_ANSWER: Final = msgspec.json.Decoder(EngineAnswer)
_TRANSFER: Final = b"kv_transfer_params"
_OPTIONS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NO_CHOICES: Final = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_EVENT_END: Final = re.compile(rb"(?<=\n\n)|(?<=\r\n\r\n)")
_END_BYTES: Final = 64 << 10
_END_LINES: Final = 8


def read_stream_end(events: Iterable[bytes]) -> EngineAnswer | None:
    """The last event that reports usage or timings, at the very end of a stream.

    If it has no transfer parameters, it gets those of the last event that has some.
    """
    end = b"".join(events)[-_END_BYTES:].splitlines()[-_END_LINES:]
    measured: EngineAnswer | None = None
    transfer: EngineAnswer | None = None
    for line in reversed(end):
        answer = read_answer(line[6:]) if line.startswith(b"data: {") else None
        if answer is None:
            continue
        if measured is None and (answer.usage or answer.timings):
            measured = answer
        if transfer is None and answer.transfer is not None:
            transfer = answer
    if measured is None or transfer is None:
        return measured or transfer
    measured.kv_transfer_params = transfer.kv_transfer_params
    return measured


def without_transfer(raw: bytes) -> bytes:
    """A JSON body without transfer parameters, which are no client's business."""
    if _TRANSFER not in raw:
        return raw
    try:
        fields = read(_OPTIONS.decode, raw)
    except UnreadableError:
        return raw
    if fields.pop(_TRANSFER.decode(), None) is None:
        return raw
    return msgspec.json.encode(fields)


def events_without_transfer(events: bytes) -> bytes:
    """Whole events of a stream, likewise."""
    if _TRANSFER not in events:
        return events
    return b"".join(_line_without_transfer(line) for line in events.splitlines(keepends=True))


def _line_without_transfer(line: bytes) -> bytes:
    data = line.rstrip(b"\r\n")
    if not data.startswith(b"data:"):
        return line
    return b"data: " + without_transfer(data[5:].strip()) + line[len(data) :]


def refuses_transfer(raw: bytes) -> bool:
    """Whether the error of an engine is about transfer parameters, which clients do not send."""
    try:
        error = read(_REFUSAL.decode, raw).error
    except UnreadableError:
        return False
    return (error.param or "").startswith(_TRANSFER.decode())


def without_usage(events: bytes) -> bytes:
    """Whole events without those that have no choices, only usage: engines add one when asked."""
    if _NO_CHOICES.search(events) is None:
        return events
    return b"".join(event for event in _EVENT_END.split(events) if not _is_usage(event))


def _is_usage(event: bytes) -> bool:
    data = event.strip().removeprefix(b"data:")
    if _NO_CHOICES.search(data) is None:
        return False
    answer = read_answer(data.strip())
    if answer is None or answer.usage is None or isinstance(answer.choices, msgspec.UnsetType):
        return False
    return b"".join(bytes(answer.choices).split()) == b"[]"
