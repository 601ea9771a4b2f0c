"""Goal: prompts are tokenised here as the engine would, or by the engine, and hold nobody up."""

import asyncio
import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from conductor.front import local_tokenizers
from conductor.front.local_tokenizers import (
    CannotTokenizeError,
    LocalTokenizer,
    LocalTokenizers,
    load_tokenizers,
)
from conductor.service import main
from kvstore.protocol.errors import ConfigError
from tests.conductor.fakes import Client, FakeEngine, serving
from tests.loops import eventually, in_loop

BOS = 256
TEMPLATE = "{% for one in messages %}{{ one['content'] + '\\n' }}{% endfor %}"
"""What the fake engine makes of messages."""
LONGEST = {"name": "longest-prefix"}


def byte_level(*, special: bool = False) -> Tokenizer:
    """A token a byte, as the fake engine has it; with ``special``, prompts begin with another."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in shown}
    names |= {
        byte: chr(256 + at) for at, byte in enumerate(b for b in range(256) if b not in names)
    }
    vocabulary = {name: byte for byte, name in names.items()} | {"<s>": BOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if special:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", BOS)])
    return tokenizer


def folder(path: Path, *, special: bool = False, **settings: object) -> Path:
    path.mkdir(exist_ok=True)
    byte_level(special=special).save(str(path / "tokenizer.json"))
    if settings:
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def rendered(**fields: object) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in fields.items()}


def of_model(path: Path, name: str = "m") -> dict[str, Any]:
    return {"models": [{"name": name, "tokenizer": str(path)}], "policy": LONGEST}


async def prompt_tokens(client: Client, asked: tuple[int, Any, Any]) -> object:
    status, _, headers = asked
    assert status == 200
    return (await client.decision(headers["X-Request-Id"]))["prompt_tokens"]


# Through the Conductor


@in_loop
async def test_only_the_first_prompt_of_a_kind_is_also_tokenised_by_an_engine(
    tmp_path: Path,
) -> None:
    engine = FakeEngine("e", "mixed")
    path = folder(tmp_path / "m", chat_template=TEMPLATE)
    async with serving(engine, **of_model(path)) as client:
        for number in range(3):
            assert await prompt_tokens(client, await client.complete(f"prompt {number}")) == 8
            assert await prompt_tokens(client, await client.chat(f"chat {number} ü")) == 10
            assert engine.tokenized == 2
        _, metrics = await client.get("/metrics")
        assert 'local_tokenizer{kind="chat",model="m"} 1.0' in metrics


@in_loop
async def test_an_adapter_has_the_tokenizer_of_its_model_and_others_have_none(
    tmp_path: Path,
) -> None:
    tuned, other = FakeEngine("e", "mixed"), FakeEngine("o", "mixed", model="other")
    tuned.describes = False
    async with serving(tuned, other, **of_model(folder(tmp_path / "m"))) as client:
        for model in ("m", "adapter", "other"):
            for number in range(3):
                asked = await client.complete(f"{model} {number}", model=model)
                assert await prompt_tokens(client, asked) == len(model) + 2
        assert (tuned.tokenized, other.tokenized) == (1, 3)


@in_loop
async def test_a_tokenizer_that_is_not_the_engine_s_is_not_used_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine("e", "mixed")
    path = folder(tmp_path / "m", special=True, chat_template=TEMPLATE)
    async with serving(engine, **of_model(path)) as client:
        for number in range(3):
            assert await prompt_tokens(client, await client.complete(f"prompt {number}")) == 8
            assert await prompt_tokens(client, await client.chat(f"chat {number}")) == 7
        assert engine.tokenized == 3 + 1, "prompts always, and the first chat"
        _, metrics = await client.get("/metrics")
        assert 'local_tokenizer{kind="prompt",model="m"} 0.0' in metrics
        assert 'local_tokenizer{kind="chat",model="m"} 1.0' in metrics
    [said] = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert "has 9 tokens by its tokenizer, 8 by an engine, other ones from 0 on" in said


@in_loop
async def test_without_an_engine_that_tokenises_the_tokenizer_is_believed(tmp_path: Path) -> None:
    engine = FakeEngine("e", "mixed")
    engine.tokenize_status = 404
    async with serving(engine, **of_model(folder(tmp_path / "m"))) as client:
        for number in range(3):
            assert await prompt_tokens(client, await client.complete(f"prompt {number}")) == 8
        assert engine.tokenized == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"chat_template": "{{ messages }}"},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"messages": [{"role": "user", "content": "hi", "name": "ann"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        {"messages": [{"role": "assistant", "content": None}]},
        {"messages": [{"role": "bad", "content": "hi"}]},
    ],
)
@in_loop
async def test_a_chat_that_is_not_plain_is_left_to_the_engine(
    fields: dict[str, object], tmp_path: Path
) -> None:
    engine = FakeEngine("e", "mixed")
    source = TEMPLATE + "{% if messages[0].role == 'bad' %}{{ raise_exception('no') }}{% endif %}"
    async with serving(engine, **of_model(folder(tmp_path / "m", chat_template=source))) as client:
        await client.chat("the first one is compared")
        for _ in range(2):
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
            assert (await client.post("/v1/chat/completions", body))[0] == 200
        assert engine.tokenized == 2, "the same one is known the second time"


@in_loop
async def test_a_late_tokenizer_costs_its_deadline_and_a_busy_one_asks_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gate = FakeEngine("e", "mixed"), threading.Event()
    encode = LocalTokenizer.encode

    def gated(self: LocalTokenizer, asked: dict[str, msgspec.Raw]) -> list[int]:
        gate.wait(30)
        return encode(self, asked)

    monkeypatch.setattr(LocalTokenizer, "encode", gated)
    monkeypatch.setattr(local_tokenizers, "_JOBS_MAX", 2)
    sections = {**of_model(folder(tmp_path / "m")), "deadline": {"tokenize_s": 3.0}}
    async with serving(engine, **sections) as client:
        try:
            late = [asyncio.create_task(client.complete(f"late {one}")) for one in range(2)]
            local = client.conductor._tokenizers
            await eventually(lambda: local._jobs == 2, "both have a thread")
            assert await prompt_tokens(client, await client.complete("engine")) == 6
            assert [await prompt_tokens(client, await one) for one in late] == [None, None]
            assert engine.tokenized == 1
        finally:
            gate.set()
        assert await prompt_tokens(client, await client.complete("again")) == 5


@in_loop
async def test_a_long_prompt_leaves_the_loop_to_others_while_it_is_tokenised(
    tmp_path: Path,
) -> None:
    local = load_tokenizers({"m": str(folder(tmp_path / "m"))})
    try:
        prompt = "a long prompt, again and again; " * 20_000
        for _ in range(3):  # a busy machine may let the loop's thread stand meanwhile
            job = asyncio.create_task(local.tokenize("m", rendered(prompt=prompt)))
            turns = 0
            while not job.done():
                await asyncio.sleep(0)
                turns += 1
            assert len(await job or ()) == len(prompt)
            if turns > 200:
                break
        assert turns > 200, "a few dozen, if a call holds the interpreter's lock"
    finally:
        local.close()


# By itself


def test_special_tokens_are_added_to_prompts_unless_asked_not_to_and_not_to_chats(
    tmp_path: Path,
) -> None:
    mine = LocalTokenizer(folder(tmp_path / "m", special=True, chat_template=TEMPLATE))
    assert mine.encode(rendered(prompt="ab")) == [BOS, 97, 98]
    assert mine.encode(rendered(prompt="ab", add_special_tokens=False)) == [97, 98]
    messages = [{"role": "user", "content": "ab"}]
    assert mine.encode(rendered(messages=messages)) == [97, 98, 10]
    assert mine.encode(rendered(messages=messages, add_special_tokens=True))[0] == BOS


RICH = (
    "{{ bos_token }}{% if tools %}no{% endif %}"
    "{%- for one in messages %}\n  [{{ one.role }}]{{ one.content | tojson }}"
    "{% if loop.first %}{% continue %}{% endif %}!{% endfor %}\n"
    "{% if add_generation_prompt %}>{{ mood | default('calm') }}{% endif %}"
)
MESSAGES = [{"role": "system", "content": "<é>"}, {"role": "user", "content": "b"}]


@pytest.mark.parametrize("where", ["settings", "named", "file"])
def test_a_template_gets_what_templates_are_given_elsewhere(where: str, tmp_path: Path) -> None:
    source: object = RICH
    if where == "named":
        source = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": RICH}]
    if where == "file":
        source = "no"
    path = folder(
        tmp_path / "m", bos_token={"content": "<b>", "lstrip": False}, eos_token="</b>",
        pad_token=None, add_bos_token=True, chat_template=source,
    )  # fmt: skip
    if where == "file":
        (path / "chat_template.jinja").write_text(RICH)
    mine = LocalTokenizer(path)

    def said(**fields: object) -> str:
        return bytes(mine.encode(rendered(messages=MESSAGES, **fields))).decode()

    text = '<b>  [system]"<é>"  [user]"b"!'  # as `transformers` renders it
    assert said() == f"{text}>calm"
    assert said(add_generation_prompt=False) == text
    assert said(chat_template_kwargs={"mood": "glad", "messages": 5}) == f"{text}>glad"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__()[0].__name__ }}",
        "{{ messages[7].content.x.y }}",
        "{{ messages.append(1) }}",
        "{% for a in range(10**6) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_or_does_what_it_may_not_is_none(source: str, tmp_path: Path) -> None:
    mine = LocalTokenizer(folder(tmp_path / "m", chat_template=source))
    with pytest.raises(CannotTokenizeError):
        mine.encode(rendered(messages=MESSAGES))


def test_prompts_without_meaning_or_end_are_left_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = LocalTokenizer(folder(tmp_path / "m") / "tokenizer.json")
    monkeypatch.setattr(local_tokenizers, "_CHARS_MAX", 100)
    for fields in ({"prompt": "x" * 101}, {"prompt": 5}, {"messages": MESSAGES}, {"suffix": "x"}):
        with pytest.raises(CannotTokenizeError):
            mine.encode(rendered(**fields))
    assert mine.encode(rendered(prompt="x" * 100)) == [120] * 100
    with pytest.raises(CannotTokenizeError):
        mine.encode({"prompt": msgspec.Raw(b'"\\ud800"')})


def test_a_path_that_is_no_tokenizer_ends_the_start_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no json")
    (tmp_path / "json").write_text("{}")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    bad = folder(tmp_path / "bad", chat_template="{% for %}")
    strange = folder(tmp_path / "strange", chat_template=5)
    cases = {
        tmp_path / "absent": "No such file", tmp_path / "empty": "tokenizer.json: No such file",
        tmp_path / "text": "is no tokenizer", tmp_path / "json": "is no tokenizer",
        tmp_path / "bytes": "codec", bad: "its chat template", strange: "chat_template",
    }  # fmt: skip
    for path, why in cases.items():
        with pytest.raises(ConfigError, match="the tokenizer of 'm'") as caught:
            load_tokenizers({"m": str(path)})
        assert why in str(caught.value)
        assert path.name in str(caught.value)
    config = tmp_path / "conductor.toml"
    config.write_text(f'[[models]]\nname = "m"\ntokenizer = "{tmp_path / "absent"}"\n')
    assert main(["--config", str(config), "--port", "0"]) == 2
    assert "absent" in capsys.readouterr().err
    config.write_text('[[models]]\nname = "m"\ntokenizer = "x"\n' * 2)
    assert main(["--config", str(config)]) == 2
    assert "models: m is there twice" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_a_missing_package_is_named_with_what_to_install(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder(tmp_path / "m", chat_template=TEMPLATE)
    monkeypatch.setattr(
        local_tokenizers, "find_spec", lambda name: None if name == package else sys.modules
    )
    with pytest.raises(ConfigError, match=rf"{package}.*'\.\[tokenizers\]"):
        load_tokenizers({"m": str(path)})


def test_without_any_nothing_is_started() -> None:
    local = LocalTokenizers({})
    assert asyncio.run(local.tokenize("m", rendered(prompt="x"))) is None
    local.close()
    assert local.gauges() == {"local_tokenizer": {}}


def test_a_prompt_that_gets_no_thread_takes_no_place(tmp_path: Path) -> None:
    local = LocalTokenizers({"m": LocalTokenizer(folder(tmp_path / "m"))})
    local.close()
    with pytest.raises(RuntimeError):
        asyncio.run(local.tokenize("m", rendered(prompt="x")))
    assert local._jobs == 0
