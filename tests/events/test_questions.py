"""Goal: a question costs who asks it, and gives up what nobody reads; garbage is refused."""

import threading
from typing import Any

import msgspec
import pytest

from kvstore.events import publisher as publishing_thread
from kvstore.events import questions as asking
from kvstore.events import server as eventserver
from kvstore.events import zmtp
from kvstore.events.publisher import END_OF_REPLAY, ClearedEvent, EventPublisher
from kvstore.events.questions import (
    AUDIT,
    END,
    HEAD,
    KEYS_MAX,
    PAGES,
    REFUSED,
    SAMPLE,
    SNAPSHOT,
    Asked,
    OpenQuestion,
    RefusedError,
    encode_question,
    read_question,
)
from tests.events.test_event_followers import TOPIC, Follow, Follower, follow, publishing, serves

__all__ = ["follow"]

ASKED = {
    "a snapshot": Asked(SNAPSHOT),
    "a sample": Asked(SAMPLE, KEYS_MAX),
    "an audit": Asked(AUDIT, 2, "ab" * 32, "cd" * 8, bytes(64)),
}
GARBAGE = {
    "nothing": [b"", b"ask"],
    "another word": [b"", b"ask", b"everything"],
    "a snapshot of something": [b"", b"ask", b"snapshot", b"x"],
    "a sample of nothing": [b"", b"ask", b"sample", bytes(4)],
    "a sample of too much": [b"", b"ask", b"sample", (KEYS_MAX + 1).to_bytes(4, "big")],
    "a sample of a long number": [b"", b"ask", b"sample", bytes(5)],
    "an audit without keys": [b"", b"ask", b"audit", b"ab", b"cd", b""],
    "an audit of a part of a key": [b"", b"ask", b"audit", b"ab", b"cd", bytes(33)],
    "an audit of too many keys": [b"", b"ask", b"audit", b"ab", b"cd", bytes(32 * KEYS_MAX + 32)],
    "a space that is no text": [b"", b"ask", b"audit", b"\xff", b"cd", bytes(32)],
    "a space with a long name": [b"", b"ask", b"audit", b"a" * 65, b"cd", bytes(32)],
    "an audit of no shard": [b"", b"ask", b"audit", b"ab", bytes(32)],
}
ALL = Asked(SNAPSHOT)
LARGE = {"keys": bytes(100_000)}


class Node:
    """Takes questions, and answers when the test says so."""

    def __init__(self, publisher: EventPublisher) -> None:
        self.asked: list[OpenQuestion] = []
        publisher.answer_with(self.asked.append)


def ask(follow: Follow, publisher: EventPublisher, asked: Asked = ALL) -> Follower:
    follower = follow(publisher.bound_replay_endpoint, zmtp.DEALER).meet()
    follower.say(*encode_question(asked))
    return follower


def refusal(follower: Follower) -> tuple[str, bool]:
    """Code of a refusal, and whether to ask again."""
    empty, topic, word, payload = follower.hear()
    assert (empty, topic, word) == (b"", TOPIC, REFUSED)
    told: dict[str, Any] = msgspec.msgpack.decode(payload)
    assert told["message"]
    return told["code"], told["retry_s"] > 0


@pytest.mark.parametrize("kind", ASKED)
def test_a_question_is_read_as_it_was_asked(kind):
    assert read_question(encode_question(ASKED[kind])) == ASKED[kind]


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_malformed_question_is_refused_and_the_next_one_is_answered(
    kind, tmp_path, follow, wait_until
):
    with pytest.raises(RefusedError):
        read_question(GARBAGE[kind])
    with publishing(tmp_path) as publisher:
        node = Node(publisher)
        follower = follow(publisher.bound_replay_endpoint, zmtp.DEALER).meet()
        follower.say(*GARBAGE[kind])
        assert refusal(follower) == ("malformed", False)
        assert node.asked == []
        follower.say(*encode_question(Asked(SNAPSHOT)))
        wait_until(lambda: node.asked)
        node.asked[0].put(END, {})
        assert follower.hear()[2] == END
        stats = publisher.stats()
        refused = stats.snapshots_refused + stats.audits_refused
        assert (refused, stats.snapshots_served) == (1, 1)


def test_the_parts_of_an_answer_come_in_order_and_the_follower_may_ask_again(
    tmp_path, follow, wait_until
):
    with publishing(tmp_path) as publisher:
        node = Node(publisher)
        follower = ask(follow, publisher, ASKED["an audit"])
        for turn in (1, 2):
            wait_until(lambda turn=turn: len(node.asked) == turn)
            question = node.asked[-1]
            assert question.asked == ASKED["an audit"]
            for number in range(100):
                question.put(PAGES, number)
            question.put(END, {"pages": turn})
            heard = [follower.hear() for _ in range(101)]
            assert [msgspec.msgpack.decode(one[3]) for one in heard] == [
                *range(100), {"pages": turn},
            ]  # fmt: skip
            assert [one[2] for one in heard] == [PAGES] * 100 + [END]
            follower.say(*encode_question(ASKED["an audit"]))
        wait_until(lambda: len(node.asked) == 3)
        assert publisher.stats().audits_served == 2
        assert question.given_up


def test_who_asks_twice_at_a_time_is_refused(tmp_path, follow, wait_until):
    with publishing(tmp_path) as publisher:
        node = Node(publisher)
        follower = ask(follow, publisher)
        wait_until(lambda: node.asked)
        follower.say(*encode_question(Asked(SNAPSHOT)))

        assert refusal(follower) == ("busy", True)
        node.asked[0].put(END, {})
        assert follower.hear()[2] == END
        assert len(node.asked) == 1


def test_more_snapshots_than_may_be_at_a_time_are_refused_and_other_questions_are_not(
    tmp_path, follow, monkeypatch, wait_until
):
    monkeypatch.setattr(asking, "SNAPSHOTS_MAX", 2)
    monkeypatch.setattr(asking, "QUESTIONS_MAX", 3)
    with publishing(tmp_path) as publisher:
        node = Node(publisher)
        for _ in range(2):
            ask(follow, publisher)
        wait_until(lambda: len(node.asked) == 2)
        assert refusal(ask(follow, publisher)) == ("busy", True)
        ask(follow, publisher, ASKED["a sample"])
        wait_until(lambda: len(node.asked) == 3)
        assert refusal(ask(follow, publisher, ASKED["a sample"])) == ("busy", True)
        node.asked[0].put(END, {})
        wait_until(lambda: publisher.stats().snapshots_served)
        ask(follow, publisher)
        wait_until(lambda: len(node.asked) == 4)


def test_a_publisher_without_a_node_refuses_and_one_of_an_engine_ends_a_replay(tmp_path, follow):
    with publishing(tmp_path) as publisher:
        assert refusal(ask(follow, publisher)) == ("unavailable", True)
        follower = follow(publisher.bound_replay_endpoint, zmtp.DEALER).meet()
        follower.say(b"", b"snapshot?")
        assert follower.hear() == [b"", TOPIC, END_OF_REPLAY, b""]


def test_a_node_that_refuses_is_asked_no_more(tmp_path, follow):
    def refuse(question: OpenQuestion) -> None:
        raise RefusedError("unavailable", "it is stopping")

    with publishing(tmp_path) as publisher:
        publisher.answer_with(refuse)
        follower = ask(follow, publisher)
        assert refusal(follower) == ("unavailable", False)
        follower.say(*encode_question(Asked(SNAPSHOT)))
        assert refusal(follower) == ("unavailable", False), "the question before is not open"


def test_the_answer_of_a_follower_that_leaves_is_given_up(tmp_path, follow, wait_until):
    with publishing(tmp_path) as publisher:
        node = Node(publisher)
        follower = ask(follow, publisher)
        wait_until(lambda: node.asked)
        node.asked[0].put(HEAD, {})
        assert follower.hear()[2] == HEAD
        follower.close()

        wait_until(lambda: node.asked[0].given_up)
        wait_until(lambda: publisher.stats().snapshots_cut == 1)
        assert publisher.stats().followers_cut == 0, "it may leave"


def fill(question: OpenQuestion) -> int:
    """Put messages until the node has to wait; how many."""
    count = 0
    while not question.is_full:
        question.put(PAGES, LARGE)
        count += 1
    return count


def test_who_does_not_read_stops_the_node_and_is_disconnected(
    tmp_path, follow, monkeypatch, wait_until
):
    monkeypatch.setattr(asking, "STALLED_S", 0.3)
    monkeypatch.setattr(eventserver, "_CHECK_S", 0.01)
    with publishing(tmp_path) as publisher:
        node = Node(publisher)
        follower = ask(follow, publisher)
        wait_until(lambda: node.asked)
        question, put = node.asked[0], 0

        def stopped() -> bool:
            nonlocal put
            put += fill(question)
            return question.given_up

        wait_until(stopped)
        assert put < 100, "what waits for one follower is bounded"
        wait_until(lambda: publisher.stats().snapshots_cut == 1)
        assert publisher._server.faults.counts == {"deaf": 1}
        assert follower.is_cut_off()
        assert serves(publisher, follow)


def test_an_answer_that_takes_too_long_ends_the_connection(
    tmp_path, follow, monkeypatch, wait_until
):
    monkeypatch.setattr(asking, "_SNAPSHOT_S_MAX", 0.1)
    monkeypatch.setattr(eventserver, "_CHECK_S", 0.01)
    with publishing(tmp_path) as publisher:
        node = Node(publisher)
        follower = ask(follow, publisher)

        assert follower.is_cut_off()
        assert node.asked[0].given_up
        assert publisher._server.faults.counts == {"late": 1}


def test_a_slow_reader_gets_all_as_long_as_it_reads(tmp_path, follow, wait_until):
    with publishing(tmp_path) as publisher:
        node = Node(publisher)
        follower = ask(follow, publisher)
        wait_until(lambda: node.asked)
        question, put, heard = node.asked[0], 0, 0
        while put < 200:
            put += fill(question)
            while question.is_full:
                heard += follower.hear()[2] == PAGES
        question.put(END, {})
        while follower.hear()[2] == PAGES:
            heard += 1

        assert heard == put


def test_an_answer_goes_out_as_fast_as_it_is_read_with_no_other_event(
    follow, monkeypatch, wait_until
):
    monkeypatch.setattr(eventserver, "_CHECK_S", 60.0)  # nothing else wakes the thread
    monkeypatch.setattr(publishing_thread, "_POLL_S", 60.0)
    where = "tcp://127.0.0.1:*"  # its sockets take more at once than is queued for them
    with EventPublisher(where, where, topic=TOPIC) as publisher:
        node = Node(publisher)
        follower = ask(follow, publisher)
        wait_until(lambda: node.asked)
        put = fill(node.asked[0])
        node.asked[0].put(END, {})

        assert [follower.hear()[2] for _ in range(put + 1)] == [PAGES] * put + [END]


def test_live_events_go_on_while_an_answer_waits(tmp_path, follow, wait_until):
    with publishing(tmp_path) as publisher:
        node = Node(publisher)
        ask(follow, publisher)
        wait_until(lambda: node.asked)
        fill(node.asked[0])

        assert serves(publisher, follow)
        publisher.publish([ClearedEvent()])


def test_a_publisher_that_ends_gives_all_answers_up(tmp_path, follow, wait_until):
    with publishing(tmp_path) as publisher:
        node = Node(publisher)
        ask(follow, publisher)
        wait_until(lambda: node.asked)
        fill(node.asked[0])
    assert node.asked[0].given_up
    node.asked[0].put(PAGES, LARGE)  # wakes nobody, and fails not


def test_an_answer_put_from_another_thread_arrives_whole(tmp_path, follow, wait_until):
    with publishing(tmp_path) as publisher:
        node = Node(publisher)
        follower = ask(follow, publisher)
        wait_until(lambda: node.asked)

        def answer() -> None:
            for number in range(3_000):
                node.asked[0].put(PAGES, number)
            node.asked[0].put(END, None)

        thread = threading.Thread(target=answer)
        thread.start()
        heard = [follower.hear() for _ in range(3_001)]
        thread.join()

        assert [msgspec.msgpack.decode(one[3]) for one in heard] == [*range(3_000), None]
