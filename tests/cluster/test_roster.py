"""Goal: a store that comes back empty does not make nodes disappear that are there."""

import pytest

from kvstore.cluster.records import (
    RECORD_BYTES_MAX,
    NodeRecord,
    differing_field,
    read_record,
    settings_of,
    write_record,
)
from kvstore.cluster.roster import Roster

HOLD_S = 10.0
A, B = (
    NodeRecord(name=name, boot=name.encode() * 16, endpoint=f"10.0.0.{at}:7400")
    for at, name in enumerate("ab")
)


def records(*nodes: NodeRecord) -> dict[str, bytes]:
    return {one.name: write_record(one) for one in nodes}


def returned(*before: NodeRecord) -> Roster:
    """A store that has come back at 100 s."""
    roster = Roster(HOLD_S)
    roster.tell(records(*before), 0.0)
    roster.doubt()
    roster.trust(100.0)
    return roster


def test_who_leaves_is_gone_at_once() -> None:
    roster = Roster(HOLD_S)
    roster.tell(records(A, B), 0.0)
    roster.tell(records(A), 1.0)
    assert roster.nodes == {"a": A}


def test_who_was_there_before_the_store_was_away_stays_for_a_leases_time() -> None:
    roster = returned(A, B)
    roster.tell(records(A), 100.0)
    assert roster.nodes == {"a": A, "b": B}
    roster.expire(109.9)
    assert roster.nodes == {"a": A, "b": B}
    roster.expire(110.0)
    assert roster.nodes == {"a": A}


def test_who_has_come_back_and_leaves_then_is_gone_at_once() -> None:
    roster = returned(A, B)
    roster.tell(records(A, B), 101.0)
    roster.tell(records(A), 102.0)
    assert roster.nodes == {"a": A}


def test_nobody_is_gone_while_the_store_is_away() -> None:
    roster = Roster(HOLD_S)
    roster.tell(records(A, B), 0.0)
    roster.doubt()
    roster.expire(1e9)
    assert roster.nodes == {"a": A, "b": B}


def test_a_record_that_has_become_unreadable_is_nobody() -> None:
    roster = returned(A, B)
    roster.tell(records(A) | {"b": b"?"}, 101.0)
    assert (roster.nodes, roster.unreadable) == ({"a": A}, 1)


@pytest.mark.parametrize(
    "value",
    [
        b"", b"[]", b"{}", b"\xff", write_record(B), write_record(A).replace(b"61", b"6g"),
        write_record(A).replace(A.boot.hex().encode(), b"61"),
        write_record(A).replace(b'"up"', b'"gone"'),
        write_record(A)[:-1] + b',"more":"' + b"x" * RECORD_BYTES_MAX + b'"}',
    ],
)  # fmt: skip
def test_what_is_no_record_of_that_node_cannot_be_read(value: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of several libraries
        read_record("a", value)


def test_a_record_is_the_same_after_it_was_written() -> None:
    full = NodeRecord(
        name="c", boot=b"c" * 16, endpoint="[::1]:1", transports={"tcp": ":2"}, protocol="1.9",
        scheme="other", state="draining",
    )  # fmt: skip
    assert read_record("c", write_record(full)) == full
    assert read_record("c", write_record(full)[:-1] + b',"later":[1]}') == full


@pytest.mark.parametrize(
    ("there", "field"),
    [
        (b'{"scheme":"other","protocol":"1"}', "scheme"),
        (b'{"scheme":"sha256/xxh3_128 1","protocol":"2"}', "protocol"),
        (b"?", "settings"), (b"{}", "settings"), (b"\xff", "settings"),
    ],
)  # fmt: skip
def test_what_differs_from_the_settings_of_the_cluster_is_named(there: bytes, field: str) -> None:
    differs = differing_field(settings_of(A), there)
    assert differs is not None
    assert differs[0] == field


def test_settings_with_more_in_them_differ_in_nothing() -> None:
    there = b'{"scheme":"sha256/xxh3_128 1","protocol":"1","later":true}'
    assert differing_field(settings_of(A), there) is None
