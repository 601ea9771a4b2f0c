"""Goal: the node keeps the pages of a conversation after each request of it, if that is wanted."""

import msgspec
import pytest

from engine_adapters.reference.__main__ import parse_args
from engine_adapters.reference.protocol import CompletionBody, to_request
from kvstore.engine.options import Retain
from tests.engine_adapters.reference.conftest import Ask, MakeEngine
from tests.engine_adapters.reference.fake_store import FakeNode, FakeStore

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 5
RETAIN = Retain(seconds=600.0, bytes=1 << 20)


def test_pages_are_kept_when_their_puts_have_ended(
    make_engine: MakeEngine, ask: Ask, wait_until
) -> None:
    node = FakeNode()
    engine = make_engine(FakeStore(node), retain=RETAIN)
    node.gate.clear()
    ask(engine, TEXT[:200], id="first", session_id="chat").wait()
    assert node.kept == []

    node.gate.set()
    wait_until(lambda: node.kept)
    assert node.kept == [("chat", 3, 3, 600.0, 1 << 20)]


def test_the_next_request_keeps_what_was_found_and_what_is_new(
    make_engine: MakeEngine, ask: Ask, wait_until
) -> None:
    node = FakeNode()
    engine = make_engine(FakeStore(node), retain=RETAIN)
    for number, length in enumerate((130, 130, 330)):
        ask(engine, TEXT[:length], id=f"r{number}", session_id="chat").wait()
        wait_until(lambda number=number: len(node.kept) == number + 1)

    assert [pages for _, _, pages, _, _ in node.kept] == [2, 2, 5]
    assert all(there == pages for _, there, pages, _, _ in node.kept)


def test_both_engines_of_a_pair_keep_what_they_have(
    make_engine: MakeEngine, ask: Ask, wait_until
) -> None:
    node = FakeNode()
    prefill = make_engine(FakeStore(node), mode="prefill", retain=RETAIN)
    first = ask(prefill, TEXT[:128], to_handoff=True, session_id="chat").wait()
    wait_until(lambda: len(node.kept) == 1)
    decode = make_engine(FakeStore(node), mode="decode", retain=RETAIN)
    ask(decode, TEXT[:128], 70, from_handoff=first.handoff, session_id="chat").wait()

    wait_until(lambda: len(node.kept) == 2)
    assert [pages for _, _, pages, _, _ in node.kept] == [2, 3]


@pytest.mark.parametrize(("retain", "name"), [(Retain(), "chat"), (RETAIN, "")])
def test_nothing_is_kept_without_a_time_or_a_conversation(
    make_engine: MakeEngine, ask: Ask, wait_until, retain: Retain, name: str
) -> None:
    node = FakeNode()
    engine = make_engine(FakeStore(node), retain=retain)
    ask(engine, TEXT[:200], session_id=name).wait()
    wait_until(lambda: not engine.parts.store.busy)  # type: ignore[union-attr]
    assert node.kept == []


def test_a_completion_names_its_conversation(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for text, name in ((b', "session_id": "chat"', "chat"), (b"", "")):
        body = msgspec.json.decode(b'{"prompt": "Hi"%s}' % text, type=CompletionBody)
        assert to_request(body, "id", engine, lambda _: None).session_id == name


def test_the_command_line_says_how_long_and_how_much() -> None:
    args = parse_args(["--retain-seconds", "600", "--retain-bytes", "1GiB"])
    assert (args.retain_seconds, args.retain_bytes) == (600, 1 << 30)
    assert (parse_args([]).retain_seconds, parse_args([]).retain_bytes) == (0, 0)
