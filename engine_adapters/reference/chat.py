"""Chat completions in OpenAI's format: a fixed template makes a prompt of messages.

::

    <|tools|>
    [{"type": "function", ...}]        the tools as they were sent; only if there are some
    <|system|>
    You are brief.                     for each message its role and its content
    <|user|>
    Hello!
    <|assistant|>                      unless add_generation_prompt is false

Each line ends with a newline. Content parts of one message follow each other without anything in
between.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from engine_adapters.reference.protocol import (
    AnswerFields,
    BadRequestError,
    CompletionBody,
    tell_end,
    tells_ids,
)
from engine_adapters.reference.request import Output, Request
from engine_adapters.reference.tokenizer import shown

_MAX_TOKENS: Final = 16
_ROLE: Final = "assistant"


class Part(msgspec.Struct):
    """A piece of a message's content: text."""

    text: str
    type: str = "text"


class Message(msgspec.Struct):
    """One message; fields that are not here are ignored."""

    role: str
    content: str | list[str | Part] | None = None

    @property
    def text(self) -> str:
        """Its content."""
        if isinstance(self.content, list):
            return "".join(one if isinstance(one, str) else one.text for one in self.content)
        return self.content or ""


class Rendered(msgspec.Struct, kw_only=True):
    """What decides the prompt of a chat; ``/tokenize`` takes it too."""

    messages: list[Message]
    tools: msgspec.Raw = msgspec.Raw(b"null")
    add_generation_prompt: bool = True

    def prompt(self) -> str:
        """The text that the model continues.

        Raises:
            BadRequestError: there is no message, or it has content that is no text.
        """
        if not self.messages:
            raise BadRequestError("messages: must not be empty")
        parts = [part for one in self.messages for part in one.content or ()]
        if any(isinstance(part, Part) and part.type != "text" for part in parts):
            raise BadRequestError("messages: only text is understood here")
        tools = bytes(self.tools).decode()
        text = "" if tools == "null" else f"<|tools|>\n{tools}\n"
        text += "".join(f"<|{one.role}|>\n{one.text}\n" for one in self.messages)
        return text + (f"<|{_ROLE}|>\n" if self.add_generation_prompt else "")


class TokenizeBody(msgspec.Struct):
    """``POST /tokenize``: a prompt, or the fields of :class:`Rendered`."""

    prompt: str | None = None


class ChatBody(Rendered, kw_only=True):
    """``POST /v1/chat/completions``; fields that OpenAI knows and we do not are ignored."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stream: bool = False
    stop: str | list[str] | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    return_token_ids: bool = False
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    request_id: str | None = None
    session_id: str | None = None

    def as_completion(self) -> CompletionBody:
        """The same request with a prompt.

        Raises:
            BadRequestError: the messages are invalid.
        """
        max_tokens = self.max_completion_tokens
        if max_tokens is None:
            max_tokens = _MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return CompletionBody(
            prompt=self.prompt(),
            model=self.model,
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stream=self.stream,
            stop=self.stop,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            return_token_ids=self.return_token_ids,
            kv_transfer_params=self.kv_transfer_params,
            request_id=self.request_id,
            session_id=self.session_id,
        )


class TokenLogprob(msgspec.Struct):
    """The log-probability of a token; None: another engine has sampled it, which has not told."""

    token: str
    logprob: float | None
    top_logprobs: list["TokenLogprob"] | msgspec.UnsetType = msgspec.UNSET


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities in OpenAI's format for chats; one entry for each token."""

    content: list[TokenLogprob]


class Said(msgspec.Struct):
    """What the assistant says, or a piece of it."""

    content: str
    role: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """The answer, as ``message``, or a piece of a stream, as ``delta``."""

    index: int
    finish_reason: str | None
    message: Said | msgspec.UnsetType = msgspec.UNSET
    delta: Said | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    logprobs: ChatLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(AnswerFields, kw_only=True):
    """The answer, or one chunk of a stream."""

    choices: list[ChatChoice]


class ChatAnswers:
    """Makes the answers to one chat."""

    def __init__(self, request: Request, model: str, *, with_ids: bool) -> None:
        self._request = request
        self._model = model
        self._with_ids = with_ids
        self._began = False

    def whole(self, output: Output) -> ChatCompletion:
        """One answer with all output."""
        choice = self._choice(output)
        choice.message = Said(output.text, _ROLE)
        return self._answer("chat.completion", output, choice)

    def chunk(self, output: Output) -> ChatCompletion:
        """A chunk of a stream; the first one names the role."""
        choice = self._choice(output)
        choice.delta = Said(output.text, msgspec.UNSET if self._began else _ROLE)
        self._began = True
        return self._answer("chat.completion.chunk", output, choice)

    def _choice(self, output: Output) -> ChatChoice:
        choice = ChatChoice(0, output.finish_reason)
        if self._with_ids or tells_ids(self._request, output):
            choice.token_ids = output.tokens
        if self._request.logprobs is not None:
            pairs = zip(output.tokens, output.logprobs, strict=True)
            count = self._request.logprobs
            choice.logprobs = ChatLogprobs([_logprob(token, one, count) for token, one in pairs])
        return choice

    def _answer(self, kind: str, output: Output, choice: ChatChoice) -> ChatCompletion:
        answer = ChatCompletion(
            id=self._request.id, object=kind, model=self._model, choices=[choice]
        )
        tell_end(answer, self._request, output)
        return answer


def _logprob(token: int, logprobs: dict[int, float], count: int) -> TokenLogprob:
    """One token with so many alternatives, likely ones first."""
    others: Sequence[int] = sorted(logprobs, key=lambda at: -logprobs[at])[:count]
    return TokenLogprob(
        shown(token),
        logprobs.get(token),
        [TokenLogprob(shown(at), logprobs[at]) for at in others],
    )
