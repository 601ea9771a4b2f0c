"""Goal: an answer of a node is read completely or not at all, whatever the node sends."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.events import server as eventserver
from kvstore.events.publisher import EventBatch, EventPublisher, StoredEvent
from kvstore.events.questions import (
    END,
    HEAD,
    KEYS_MAX,
    PAGES,
    REFUSED,
    SNAPSHOT,
    TIERS,
    OpenQuestion,
    RefusedError,
)
from kvstore.index.keys import packed_keys
from kvstore.index.reading import UnreadableError
from kvstore.index.snapshot import (
    SnapshotEnd,
    SnapshotError,
    SnapshotHead,
    SnapshotPages,
    audit,
    read_snapshot,
    sample,
)
from kvstore.protocol.errors import InvalidArgument
from tests.loops import eventually, in_loop

SPACE, SHARD = "ab" * 32, "cd" * 8
KEYS = [bytes([at]) * 32 for at in range(40)]
Message = tuple[bytes, Any]
HEADED: Message = (HEAD, {"boot": "aa", "sequence_first": 5})
TOLD: Message = (TIERS, {"media": ["CPU"], "tiers": b"\1\0"})


def ended(pages: int) -> Message:
    return END, {"sequence_end": 9, "pages": pages}


def held(keys: list[bytes], medium: str = "CPU") -> Message:
    event = StoredEvent(
        block_hashes=keys, parent_block_hash=None, token_ids=(), block_size=4, medium=medium,
        space=SPACE, shard=0, shard_digest=SHARD,
    )  # fmt: skip
    return PAGES, EventBatch(1.0, [event])


def raw(word: bytes, data: bytes) -> Message:
    return word, msgspec.Raw(data)


@contextmanager
def answering(folder: Path, *messages: Message) -> Iterator[EventPublisher]:
    """A publisher whose node answers every question with these messages."""

    def answer(question: OpenQuestion) -> None:
        for word, content in messages:
            question.put(word, content)

    where = f"ipc://{folder}/events"
    with EventPublisher(where, f"{where}.replay", topic=b"kvstore@n@aa") as publisher:
        publisher.answer_with(answer)
        yield publisher


async def parts(publisher: EventPublisher, **options: Any) -> list[object]:
    assert publisher.bound_replay_endpoint is not None
    async with aclosing(read_snapshot(publisher.bound_replay_endpoint, **options)) as read:
        return [part async for part in read]


def cause_of(publisher: EventPublisher, **options: Any) -> str:
    with pytest.raises(SnapshotError) as refused:
        asyncio.run(parts(publisher, **options))
    assert str(refused.value)
    return refused.value.cause


def test_the_parts_of_a_snapshot_are_a_head_pages_and_an_end(tmp_path):
    messages = (HEADED, held(KEYS), held(KEYS[:3], "STORAGE"), held([]), ended(43))
    with answering(tmp_path, *messages) as publisher:
        assert asyncio.run(parts(publisher)) == [
            SnapshotHead("aa", 5),
            SnapshotPages(SPACE, SHARD, "CPU", b"".join(KEYS)),
            SnapshotPages(SPACE, SHARD, "STORAGE", b"".join(KEYS[:3])),
            SnapshotPages(SPACE, SHARD, "CPU", b""),
            SnapshotEnd(9, 43),
        ]


WRONG: dict[str, tuple[Message, ...]] = {
    "pages without a head": (held(KEYS), ended(40)),
    "an end without a head": (ended(0),),
    "two heads": (HEADED, HEADED, ended(0)),
    "tiers in a snapshot": (HEADED, TOLD, ended(0)),
    "a word that nobody knows": (HEADED, (b"\xff" * 40, 1), ended(0)),
    "fewer pages than it says": (HEADED, held(KEYS), ended(41)),
    "keys of another size": (HEADED, held([b"short"]), ended(1)),
    "hashes that are numbers": (HEADED, held([7]), ended(1)),  # type: ignore[list-item]
    "a head that is none": ((HEAD, [1, 2]), ended(0)),
    "a head with a long name": ((HEAD, {"boot": "a" * 65, "sequence_first": 1}), ended(0)),
    "a negative sequence": ((HEAD, {"boot": "a", "sequence_first": -1}), ended(0)),
    "an end that is none": (HEADED, (END, "end")),
    "pages that are no msgpack": (HEADED, raw(PAGES, b"\xc1"), ended(0)),
    "pages of another kind": (HEADED, (PAGES, [1.0, [{"type": "BlockRemoved"}], None]), ended(0)),
    "pages without a shard": (
        HEADED,
        (PAGES, [1.0, [{"type": "BlockStored", "block_hashes": [], "medium": "CPU",
                        "space": SPACE}], None]),
        ended(0),
    ),
    "text that is no UTF-8": (HEADED, raw(PAGES, b"\x93\x01\x91\x81\xa4type\xa1\xff\xc0")),
    "a refusal that is none": (HEADED, (REFUSED, 5)),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_an_answer_that_is_wrong_is_an_error_and_never_a_snapshot(kind, tmp_path):
    with answering(tmp_path, *WRONG[kind]) as publisher:
        assert cause_of(publisher) == "invalid"


def test_more_pages_than_expected_are_an_error(tmp_path):
    with answering(tmp_path, HEADED, held(KEYS), held(KEYS), ended(80)) as publisher:
        assert cause_of(publisher, pages_max=79) == "invalid"
        assert len(asyncio.run(parts(publisher, pages_max=80))) == 4


@pytest.mark.parametrize("messages", [(), (HEADED,), (HEADED, held(KEYS))])
def test_an_answer_that_stops_is_late(messages, tmp_path):
    with answering(tmp_path, *messages) as publisher:
        assert cause_of(publisher, silence_s=0.05) == "late"
        assert cause_of(publisher, limit_s=0.05) == "late"


def test_a_refusal_says_why_and_when_to_ask_again(tmp_path):
    with answering(tmp_path, HEADED) as publisher:
        publisher.answer_with(None)
        with pytest.raises(SnapshotError) as refused:
            asyncio.run(parts(publisher))
    assert (refused.value.cause, refused.value.retry_s) == ("unavailable", 1.0)


def test_a_refusal_in_the_middle_is_no_snapshot(tmp_path):
    refused = (REFUSED, {"code": "busy", "message": "later", "retry_s": 2.5})
    with answering(tmp_path, HEADED, held(KEYS), refused) as publisher:
        assert cause_of(publisher) == "busy"


def test_an_older_node_is_told_from_one_that_refuses(tmp_path, monkeypatch):
    monkeypatch.setattr(eventserver, "ASK", b"an older node does not know the word")
    with answering(tmp_path) as publisher:
        assert cause_of(publisher) == "unsupported"


@in_loop
async def test_nobody_there_and_somebody_silent_are_told_apart(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        await sample(f"ipc://{tmp_path}/nowhere")
    ends: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_unix_server(
        lambda _, writer: ends.append(writer), tmp_path / "silent"
    )
    with pytest.raises(SnapshotError) as late:
        await sample(f"ipc://{tmp_path}/silent", limit_s=0.05)
    assert late.value.cause == "late"
    for writer in ends:
        writer.close()
    silent.close()
    await silent.wait_closed()


@in_loop
async def test_who_stops_reading_early_leaves_no_connection(tmp_path):
    with answering(tmp_path, HEADED) as publisher:
        assert publisher.bound_replay_endpoint is not None
        async with aclosing(read_snapshot(publisher.bound_replay_endpoint)) as read:
            assert await anext(read) == SnapshotHead("aa", 5)
            assert publisher.stats().followers == 1
        await eventually(lambda: publisher.stats().followers == 0)
        assert publisher.stats().snapshots_cut == 1


def test_an_audit_gives_the_media_of_each_key(tmp_path):
    with answering(tmp_path, HEADED, TOLD, ended(1)) as publisher:
        assert publisher.bound_replay_endpoint is not None
        found = asyncio.run(
            audit(publisher.bound_replay_endpoint, "", SPACE, SHARD, b"".join(KEYS[:2]))
        )
    assert (found.head, found.end) == (SnapshotHead("aa", 5), SnapshotEnd(9, 1))
    assert (found.media, found.places.tolist()) == (["CPU"], [1, 0])


@pytest.mark.parametrize(
    "messages",
    [
        (HEADED, ended(0)), (TOLD, ended(0)), (HEADED, TOLD, TOLD, ended(0)), (HEADED, held(KEYS)),
        (HEADED, (TIERS, {"media": ["CPU"], "tiers": b"\1"}), ended(0)),
        (HEADED, (TIERS, {"media": "CPU", "tiers": b"\1\0"}), ended(0)),
        (HEADED, TOLD, (END, {})),
    ],
)  # fmt: skip
def test_an_audit_that_is_answered_wrongly_is_an_error(messages, tmp_path):
    with answering(tmp_path, *messages) as publisher:
        assert publisher.bound_replay_endpoint is not None
        with pytest.raises(SnapshotError) as refused:
            asyncio.run(
                audit(publisher.bound_replay_endpoint, "", SPACE, SHARD, b"".join(KEYS[:2]))
            )
    assert refused.value.cause == "invalid"


@pytest.mark.parametrize("keys", [0, KEYS_MAX + 1])
def test_a_sample_of_too_many_or_no_keys_is_not_asked_for(keys):
    with pytest.raises(InvalidArgument, match="keys"):
        asyncio.run(sample("ipc:///nowhere", keys=keys))


@pytest.mark.parametrize("size", [0, 33, 32 * KEYS_MAX + 32])
def test_an_audit_of_no_whole_keys_or_too_many_is_not_asked_for(size):
    with pytest.raises(InvalidArgument, match="keys"):
        asyncio.run(audit("ipc:///nowhere", "", SPACE, SHARD, bytes(size)))


def test_a_node_that_refuses_at_once_is_heard(tmp_path):
    def refuse(question: OpenQuestion) -> None:
        assert question.asked.kind == SNAPSHOT
        raise RefusedError("unavailable", "it is stopping")

    with answering(tmp_path) as publisher:
        publisher.answer_with(refuse)
        assert cause_of(publisher) == "unavailable"


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65_535, 65_536])
def test_packed_keys_are_those_that_were_encoded(count):
    keys = [at.to_bytes(32, "little") for at in range(count)]

    assert packed_keys(msgspec.Raw(msgspec.msgpack.encode(keys))) == b"".join(keys)


def is_array_of_keys(data: bytes) -> bool:
    """Whether bytes are an array of keys, by another decoder; at most 15 keys."""
    size = msgspec.Meta(min_length=32, max_length=32)
    try:
        keys = msgspec.msgpack.decode(data, type=list[Annotated[bytes, size]])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return data.endswith(msgspec.msgpack.encode(keys)[1:])  # each key encoded as short as can be


KEY_ENTRY = st.binary(min_size=32, max_size=32).map(lambda key: b"\xc4\x20" + key)


@given(
    st.binary(min_size=1, max_size=80)
    | st.binary(max_size=75).map(lambda rest: b"\x92" + rest)
    | st.lists(KEY_ENTRY, max_size=3).map(lambda keys: b"\x92" + b"".join(keys))
)
def test_bytes_that_are_no_keys_are_refused(data):
    if is_array_of_keys(data):
        assert packed_keys(msgspec.Raw(data)) == b"".join(msgspec.msgpack.decode(data))
    else:
        with pytest.raises(UnreadableError):
            packed_keys(msgspec.Raw(data))
