"""Tokenizers in local files, so that prompts need no round trip to an engine.

The library is Hugging Face's ``tokenizers``; it reads ``tokenizer.json`` and nothing else, and uses
no network. A chat is rendered with the folder's template if it is plain: text of roles, without
tools and without a template of its own. All else is left to the engine.

A tokenizer that is not the engine's would predict hits that are none. So the first prompt of each
kind, and each thousandth, is also tokenised by an engine. If the two differ, the engine is asked
from then on.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from kvstore.index.reading import UnreadableError, read
from kvstore.process.smallfile import read_small
from kvstore.protocol.errors import ConfigError, reason

_THREADS: Final = 2
_JOBS_MAX: Final = 64
"""Prompts that wait for a thread or have one; the engine is asked for further ones."""
_CHARS_MAX: Final = 4 << 20
"""Longer prompts are left to the engine."""
_COMPARED_EVERY: Final = 1_000
_FILE_BYTES_MAX: Final = 256 << 20
_EXTRA: Final = "pip install '.[tokenizers]' in the clone"
_PROMPT: Final = frozenset({"prompt", "add_special_tokens"})
_CHAT: Final = frozenset(
    {"messages", "add_generation_prompt", "add_special_tokens", "chat_template_kwargs"}
)

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class CannotTokenizeError(Exception):
    """The engine is to be asked; says why."""


class _Prompt(msgspec.Struct):
    prompt: str
    add_special_tokens: bool = True


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


class _Chat(msgspec.Struct):
    messages: list[_Message]
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class _SpecialToken(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _Settings(msgspec.Struct):
    """What is used of ``tokenizer_config.json``."""

    chat_template: str | list[_NamedTemplate] | None = None

    @property
    def template(self) -> str | None:
        """The template for chats without tools."""
        if isinstance(self.chat_template, list):
            return next((one.template for one in self.chat_template if one.name == "default"), None)
        return self.chat_template


def kind_of(rendered: Mapping[str, msgspec.Raw]) -> str | None:
    """``prompt`` or ``chat``, if nothing is asked for that only engines know; else None."""
    if "prompt" in rendered:
        return "prompt" if rendered.keys() <= _PROMPT else None
    return "chat" if rendered.keys() <= _CHAT else None


class LocalTokenizer:
    """The tokenizer of one model. Its calls take their time: they belong in a thread.

    Args:
        path: a ``tokenizer.json``, or a folder with that, and perhaps ``chat_template.jinja`` or
            ``tokenizer_config.json``.

    Raises:
        ConfigError: the library is missing, or a file cannot be read; names the file.
    """

    def __init__(self, path: Path) -> None:
        if find_spec("tokenizers") is None:
            raise ConfigError(f"needs the package tokenizers: {_EXTRA}")
        import tokenizers

        file = path / "tokenizer.json" if path.is_dir() else path
        _text(file)  # its errors are clearer
        self._tokenizer = _translated(
            lambda: tokenizers.Tokenizer.from_file(str(file)), f"{file}: is no tokenizer"
        )
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special: dict[str, str] = {}
        self._render: Callable[..., str] | None = None
        if path.is_dir():
            self._read_template(path)

    def _read_template(self, folder: Path) -> None:
        """Read how chats become prompts, if the folder says it.

        Raises:
            ConfigError: it says it wrongly.
        """
        file, own = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        source = _text(own) if own.exists() else None
        if file.exists():
            raw = _text(file).encode()
            try:
                settings = read(lambda data: msgspec.json.decode(data, type=_Settings), raw)
                every = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            except UnreadableError as error:
                raise ConfigError(f"{file}: {error}") from error
            self._special = _special_tokens(every)
            source = source if source is not None else settings.template
        if source is None:
            return
        if find_spec("jinja2") is None:
            raise ConfigError(f"{folder}: its chat template needs the package jinja2: {_EXTRA}")
        template = _translated(lambda: _compiled(source), f"{folder}: its chat template")
        self._render = template.render

    def encode(self, rendered: Mapping[str, msgspec.Raw]) -> list[int]:
        """The tokens of a prompt or a chat, as an engine would say.

        Raises:
            CannotTokenizeError: an engine may be able to.
        """
        kind = kind_of(rendered)
        raw = msgspec.json.encode(rendered)
        try:
            if kind == "prompt":
                asked = read(_PROMPTS.decode, raw)
                return self._encoded(asked.prompt, special=asked.add_special_tokens)
            if kind == "chat" and self._render is not None:
                chat = read(_CHATS.decode, raw)
                return self._encoded(self._chat(chat), special=chat.add_special_tokens)
        except UnreadableError as error:
            raise CannotTokenizeError(str(error)) from error
        raise CannotTokenizeError("no template, or more than text")

    def _chat(self, chat: _Chat) -> str:
        render = self._render
        assert render is not None
        messages = [msgspec.structs.asdict(one) for one in chat.messages]
        variables = {"tools": None, "documents": None, **self._special, **chat.chat_template_kwargs}
        variables |= {"messages": messages, "add_generation_prompt": chat.add_generation_prompt}
        try:
            return _translated(lambda: render(variables), "the chat template")
        except ConfigError as error:
            raise CannotTokenizeError(str(error)) from error

    def _encoded(self, text: str, *, special: bool) -> list[int]:
        if len(text) > _CHARS_MAX:
            raise CannotTokenizeError(f"more than {_CHARS_MAX} characters")
        encode = self._tokenizer.encode_batch_fast  # `encode` would hold the interpreter's lock
        try:
            [found] = _translated(lambda: encode([text], add_special_tokens=special), "encoding")
        except ConfigError as error:
            raise CannotTokenizeError(str(error)) from error
        tokens: list[int] = found.ids
        return tokens


_PROMPTS: Final = msgspec.json.Decoder(_Prompt)
_CHATS: Final = msgspec.json.Decoder(_Chat)


class LocalTokenizers:
    """The tokenizers of some models, with the threads in which they work.

    Args:
        tokenizers: by model.
    """

    def __init__(self, tokenizers: Mapping[str, LocalTokenizer]) -> None:
        self._tokenizers = tokenizers
        self._threads = ThreadPoolExecutor(_THREADS, "kvstore-tokenizer")
        self._jobs = 0
        self._uses: dict[tuple[str, str], int] = {}
        self._wrong: set[tuple[str, str]] = set()

    def close(self) -> None:
        """End the threads, after the prompts that they have."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def tokenize(self, model: str, rendered: Mapping[str, msgspec.Raw]) -> list[int] | None:
        """The tokens of a prompt or a chat; None = an engine is to be asked."""
        kind, tokenizer = kind_of(rendered), self._tokenizers.get(model)
        if tokenizer is None or kind is None or (model, kind) in self._wrong:
            return None
        if self._jobs >= _JOBS_MAX:
            return None
        job = self._threads.submit(tokenizer.encode, rendered)
        self._jobs += 1
        waited = asyncio.wrap_future(job)
        waited.add_done_callback(lambda _: self._ended())
        try:
            return await waited
        except CannotTokenizeError:
            return None

    def _ended(self) -> None:
        self._jobs -= 1

    def is_to_compare(self, model: str, rendered: Mapping[str, msgspec.Raw]) -> bool:
        """Whether an engine is to tokenise the same prompt; to be asked once for each."""
        kind = kind_of(rendered) or ""
        uses = self._uses[model, kind] = self._uses.get((model, kind), 0) + 1
        return uses % _COMPARED_EVERY == 1

    def compare(
        self, model: str, rendered: Mapping[str, msgspec.Raw], mine: Sequence[int],
        theirs: Sequence[int],
    ) -> None:  # fmt: skip
        """An engine has tokenised the same prompt; if it says otherwise, it is asked always."""
        kind = kind_of(rendered) or ""
        if list(mine) == list(theirs) or (model, kind) in self._wrong:
            return
        self._wrong.add((model, kind))
        pairs = enumerate(zip(mine, theirs, strict=False))
        at = next((at for at, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
        _log.error(
            "model %s: a %s has %d tokens by its tokenizer, %d by an engine, other ones from %d on:"
            " engines are asked from now on. Set the tokenizer of the engines",
            model, kind, len(mine), len(theirs), at,
        )  # fmt: skip

    def gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Which tokenizers are in use, for the metrics: (model, kind) → 1, 0 = engines are."""
        return {"local_tokenizer": {key: float(key not in self._wrong) for key in self._uses}}


def load_tokenizers(paths: Mapping[str, str]) -> LocalTokenizers:
    """Read the tokenizers of models.

    Args:
        paths: of models that have one.

    Raises:
        ConfigError: one cannot be used; names its model.
    """
    found = {}
    for model, path in paths.items():
        try:
            found[model] = LocalTokenizer(Path(path))
        except ConfigError as error:
            raise ConfigError(f"models: the tokenizer of {model!r}: {error}") from error
    return LocalTokenizers(found)


def _text(file: Path) -> str:
    try:
        return read_small(file, _FILE_BYTES_MAX).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {reason(error)}") from error


def _special_tokens(settings: Mapping[str, msgspec.Raw]) -> dict[str, str]:
    """``bos_token`` and the others, which templates name."""
    found = {}
    for name, raw in settings.items():
        if name.endswith("_token"):
            try:
                value = read(_SPECIAL.decode, bytes(raw))
            except UnreadableError:
                continue  # null, or a flag
            found[name] = value if isinstance(value, str) else value.content
    return found


_SPECIAL: Final = msgspec.json.Decoder(str | _SpecialToken)


def _compiled(source: str) -> Any:
    """A template in a sandbox, with what ``transformers`` gives to templates."""
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raises(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = raises
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _translated(call: Callable[[], _Result], what: str) -> _Result:
    """Call a library that may raise anything: templates are programs, and Rust's errors untyped.

    Raises:
        ConfigError: it has raised.
    """
    try:
        return call()
    except Exception as error:
        raise ConfigError(f"{what}: {str(error)[:300]}") from error
