"""Payloads as they come from engines and nodes, and the bounds of what one of them may be."""

from typing import Any

import msgspec
import pytest

from kvstore.index import ingest
from kvstore.index.foreign import ForeignBlocks
from kvstore.index.holders import PrefixIndex
from kvstore.index.ingest import WorkerIngest
from kvstore.index.reading import UnreadableError, read

SPACE = "ab" * 32
KEYS = [n.to_bytes(32, "little") for n in range(3_000)]
PACK = msgspec.msgpack.encode


class Worker:
    """One worker's ingest and its index."""

    def __init__(self) -> None:
        self.index = PrefixIndex(10_000)
        self.ingest = WorkerIngest(self.index, "w", "model:m", ForeignBlocks(4, 100))

    def apply(self, *events: Any) -> int:
        """Apply a batch; gives the number of its pieces."""
        return sum(1 for _ in self.ingest.apply(PACK([1.0, events, None])))


def stored(keys: list[bytes], **fields: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": keys, "parent_block_hash": None, "token_ids": [],
        "block_size": 4, "space": SPACE, "medium": "CPU", **fields,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "plain"),
    [
        (None, True), ([], True), ([None], True), ([None] * 16, True), ([None] * 70_000, True),
        ([None, "lora"], False), ([[None]], False), ([b"\xc0"], False), ("x", False), (0, False),
        ({}, False), ([None] * 20 + [False], False),
    ],
)  # fmt: skip
def test_extra_keys_keep_a_block_out_unless_they_are_all_none(extra, plain):
    worker = Worker()
    event = stored([5], token_ids=[1, 2, 3, 4], extra_keys=extra, space=None)  # type: ignore[list-item]
    worker.apply(event)

    assert len(worker.index) == plain
    assert worker.ingest.skipped == (not plain)


def test_long_events_are_applied_in_pieces():
    worker = Worker()

    assert worker.apply(stored(KEYS)) == 4
    assert len(worker.index) == 3_000
    assert worker.apply({"type": "BlockRemoved", "block_hashes": KEYS, "space": SPACE,
                         "medium": "CPU"}) == 4  # fmt: skip
    assert len(worker.index) == 0


def test_media_that_nobody_has_heard_of_are_bounded():
    worker = Worker()
    for number in range(100):
        worker.apply(stored(KEYS[:2], medium=f"medium {number}"))

    assert len(worker.index.pages()) == ingest.MEDIA_MAX
    assert worker.ingest.skipped == 100 - ingest.MEDIA_MAX
    for _ in worker.ingest.clear():
        pass
    worker.apply(stored(KEYS[:2], medium="another"))
    assert worker.index.pages() == {("w", "another"): 2}


def test_a_clear_in_a_batch_is_applied_in_its_place():
    worker = Worker()
    worker.apply(stored(KEYS[:5]), {"type": "AllBlocksCleared"}, stored(KEYS[7:9]))

    assert worker.index.match(SPACE, b"".join(KEYS[:9])).present("w").tolist() == [
        *[False] * 7, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "error", [msgspec.ValidationError, UnicodeError, RecursionError, OverflowError, ValueError]
)
def test_whatever_a_decoder_raises_is_one_error(error):
    def decode(_: bytes) -> None:
        raise error("why")

    with pytest.raises(UnreadableError, match="why"):
        read(decode, b"")


@pytest.mark.parametrize("error", [AssertionError, TypeError, KeyError])
def test_our_own_mistakes_are_not_taken_for_somebody_elses(error):
    def decode(_: bytes) -> None:
        raise error

    with pytest.raises(error):
        read(decode, b"")
