"""Goal: a record says what it said, and what is in a store can at most be left out."""

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cluster.records import (
    RECORD_BYTES_MAX,
    NodeRecord,
    read_record,
    write_record,
)
from kvstore.cluster.roster import Roster

RECORD = NodeRecord(
    name="a", boot=b"\xff" * 16, endpoint="[fd00::2]:7400", transports={"tcp": ":7401"},
    protocol="1.9", scheme="other", state="draining", admin="http://[fd00::2]:7780",
)  # fmt: skip
NAMES = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=64)


def stored(**changed: object) -> bytes:
    return json.dumps({**json.loads(write_record(RECORD)), **changed}).encode()


def test_a_record_is_json_with_the_boot_id_in_hex():
    assert json.loads(write_record(RECORD)) == {
        "name": "a", "boot": "ff" * 16, "endpoint": "[fd00::2]:7400",
        "transports": {"tcp": ":7401"}, "protocol": "1.9", "scheme": "other", "state": "draining",
        "admin": "http://[fd00::2]:7780",
    }  # fmt: skip


@given(NAMES, st.binary(min_size=16, max_size=16), st.integers(1, 65_535))
def test_a_record_is_read_as_it_was_written(name: str, boot: bytes, port: int):
    record = NodeRecord(name=name, boot=boot, endpoint=f"10.0.0.1:{port}")
    assert read_record(name, write_record(record)) == record


def test_a_node_of_an_earlier_version_tells_no_admin_api():
    before = json.loads(write_record(RECORD))
    del before["admin"]
    assert read_record("a", json.dumps(before).encode()).admin == ""


def test_fields_of_a_newer_node_are_ignored():
    assert read_record("a", stored(color="blue", weights=[1, 2])) == RECORD


@pytest.mark.parametrize(
    "value",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 5_000, b'{"x":' + b"[" * 9_000,
     stored(boot="ff"), stored(boot="x" * 32),
     stored(boot=7), stored(name="b"), stored(endpoint=""), stored(endpoint="h"),
     stored(endpoint="h:0"), stored(endpoint="0.0.0.0:7400"), stored(endpoint="[::]:7400"),
     stored(endpoint="h:1 x"), stored(state="dead"), stored(transports={"tcp": 7}),
     stored(transports={str(n): "" for n in range(17)}), stored(scheme="x" * RECORD_BYTES_MAX)],
)  # fmt: skip
def test_what_describes_no_node_is_left_out_and_counted(value: bytes):
    roster = Roster(1.0)
    roster.tell({"a": value, "b": stored(name="b")}, 0.0)
    assert (list(roster.nodes), roster.unreadable) == (["b"], 1)


@pytest.mark.parametrize("name", ["", "x/y", "a b", "x" * 65, "a\n"])
def test_a_name_that_no_node_has_is_left_out(name: str):
    with pytest.raises(ValueError, match="another name"):
        read_record(name, stored(name=name))


@given(st.binary(max_size=200))
def test_no_bytes_raise_another_error(value: bytes):
    with pytest.raises(ValueError, match=r"\w"):
        read_record("a", value)
