"""Goal: questions of followers are answered in turns that delay nobody, whoever reads them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic_ns
from typing import NamedTuple

import msgspec
import pytest

from bench.node_alone import Engine, LoneNode
from kvstore.events import questions as asked_of
from kvstore.events.publisher import EventBatch, StoredEvent
from kvstore.events.questions import (
    END,
    HEAD,
    PAGES,
    SAMPLE,
    SNAPSHOT,
    Asked,
    OpenQuestion,
    RefusedError,
)
from kvstore.server import questions as answering
from kvstore.server import turns
from kvstore.server.questions import FollowerQuestions
from tests.collected import references
from tests.loops import eventually, in_loop

_BATCH = msgspec.msgpack.Decoder(EventBatch)


class Publication:
    """Events that nobody publishes."""

    boot = "aa"
    sequence_next = 7

    def __init__(self) -> None:
        self.ask: Callable[[OpenQuestion], None] | None = None

    def answer_with(self, answer: Callable[[OpenQuestion], None] | None) -> None:
        self.ask = answer


class Asking(NamedTuple):
    """What a test of questions needs."""

    questions: FollowerQuestions
    publication: Publication
    lone: LoneNode
    engine: Engine

    def ask(self, asked: Asked) -> OpenQuestion:
        question = OpenQuestion(asked, lambda: None)
        assert self.publication.ask is not None
        self.publication.ask(question)
        return question


@asynccontextmanager
async def asking(pages: int) -> AsyncIterator[Asking]:
    lone = LoneNode(pages, "lru", monotonic_ns)
    engine = Engine(lone, 1)
    for _ in range(pages // 64):
        engine.put(lone.keys(64))
    publication = Publication()
    questions = FollowerQuestions(lone.desk, publication)  # type: ignore[arg-type]
    yield Asking(questions, publication, lone, engine)
    questions.close()
    assert publication.ask is None
    assert len(questions._turns) == 0


def words(question: OpenQuestion) -> list[bytes]:
    """What waits to be sent."""
    taken = iter(question.take, None)
    return [word for word, _ in taken]


@in_loop
async def test_a_follower_that_does_not_read_stops_the_walk_and_one_that_reads_lets_it_go_on(
    monkeypatch,
):
    monkeypatch.setattr(asked_of, "_READY_MAX", 2)
    monkeypatch.setattr(answering, "MESSAGE_KEYS", 256)
    async with asking(4_096) as here:
        question = here.ask(Asked(SNAPSHOT))
        await eventually(lambda: question.is_full)
        for _ in range(20):
            await asyncio.sleep(0)
            here.lone.tick()
        assert len(question._ready) == 2, "nothing is made that nobody reads"
        seen: list[bytes] = []

        def is_ended() -> bool:
            seen.extend(words(question))
            return END in seen

        await eventually(is_ended)
        assert seen == [HEAD, *[PAGES] * 16, END]


@in_loop
async def test_what_waits_to_be_sent_has_no_objects_that_the_collector_visits_for_each_page(
    monkeypatch,
):
    monkeypatch.setattr(answering, "MESSAGE_KEYS", 1_024)
    async with asking(8_192) as here:
        question = here.ask(Asked(SNAPSHOT))
        await eventually(lambda: question._ready and question._ready[-1][0] == END)
        contents = [content for word, content in question._ready if word == PAGES]
        assert len(contents) == 8
        assert references(*contents) < 8 * 100
        batches = [_BATCH.decode(payload) for word, payload in iter(question.take, None)
                   if word == PAGES]  # fmt: skip
    events = [event for batch in batches for event in batch.events]
    assert all(type(event) is StoredEvent for event in events)
    assert len({key for event in events for key in event.block_hashes}) == 8_192


@pytest.mark.parametrize("how", ["given up", "late"])
@in_loop
async def test_a_walk_that_nobody_waits_for_ends(how, monkeypatch):
    monkeypatch.setattr(asked_of, "_READY_MAX", 2)
    monkeypatch.setattr(answering, "MESSAGE_KEYS", 256)
    async with asking(4_096) as here:
        question = here.ask(Asked(SNAPSHOT))
        await eventually(lambda: question.is_full)
        if how == "late":
            question.deadline = 0.0
        else:
            question.given_up = True
        await eventually(lambda: len(here.questions._turns) == 0)
        assert words(question) == [HEAD, PAGES]


@in_loop
async def test_engines_are_served_between_the_turns_of_an_answer(monkeypatch):
    monkeypatch.setattr(answering, "MESSAGE_KEYS", 256)
    monkeypatch.setattr(asked_of, "_READY_MAX", 1_000)  # who asks holds nothing up
    monkeypatch.setattr(turns, "TURN_S", 1e-9)  # each turn takes one step
    async with asking(32_768) as here:
        question, served = here.ask(Asked(SNAPSHOT)), 0
        seen: list[bytes] = []
        while END not in seen:
            await asyncio.sleep(0)
            here.engine.put(here.lone.keys(1))
            served += 1
            seen += words(question)
        assert served > 100


@in_loop
async def test_the_end_is_told_after_all_that_was_seen_has_been_published():
    async with asking(256) as here:
        flush = here.lone.desk.flush

        def counted() -> None:
            flush()
            here.publication.sequence_next += 1

        here.lone.desk.flush = counted  # type: ignore[method-assign]
        question = here.ask(Asked(SNAPSHOT))
        messages: list[tuple[bytes, bytes]] = []

        def is_ended() -> bool:
            messages.extend(iter(question.take, None))
            return bool(messages) and messages[-1][0] == END

        await eventually(is_ended)
        end = msgspec.msgpack.decode(messages[-1][1])

        assert (messages[0][0], messages[-1][0]) == (HEAD, END)
        assert msgspec.msgpack.decode(messages[0][1])["sequence_first"] == 7
        assert end["sequence_end"] >= 8, "the turn that looked last has been published"


@in_loop
async def test_a_stopping_node_refuses_questions():
    async with asking(64) as here:
        ask = here.publication.ask
    assert ask is not None
    loop = asyncio.new_event_loop()
    loop.close()
    here.questions._loop = loop
    with pytest.raises(RefusedError, match="stopping"):
        ask(OpenQuestion(Asked(SAMPLE, 1), lambda: None))
