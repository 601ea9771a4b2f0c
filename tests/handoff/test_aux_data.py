"""Goal: all that continues a request arrives as it was, and what makes no sense is refused."""

from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.handoff.aux_data import (
    AUX_BYTES_MAX,
    HIDDEN_BYTES_MAX,
    AuxData,
    decode_aux,
    encode_aux,
)
from kvstore.handoff.staging import Staging
from kvstore.handoff.states import FailureCode, State
from kvstore.protocol.errors import InvalidArgument, ProtocolError
from tests.handoff.pair import BLOCK_TOKENS, managers
from tests.handoff.wrong_fields import of_another_type

ALL = AuxData(
    first_token=1 << 20, position=4 * BLOCK_TOKENS, seed=(1 << 63) - 1, is_final=True,
    logprobs={1 << 20: -0.25, 7: -1.5, 9: float("-inf")}, draft_top_k=[5, 4, 3],
    cached_tokens=17, hidden_state=Random(1).randbytes(HIDDEN_BYTES_MAX), prompt=bytes(16),
)  # fmt: skip


def test_every_field_with_a_hidden_state_of_64_kib_arrives(wait_until):
    assert all(getattr(ALL, name) for name in AuxData.__struct_fields__), "none has its default"
    with managers() as pair:
        sender, receiver = pair.begin(1, 4)
        receiver.announce(0, [0, 1, 2, 3])
        sender.send(range(4), range(4), [0, 1, 2, 3])
        sender.finish(ALL)
        wait_until(lambda: receiver.state == State.SUCCESS)

        assert receiver.aux() == ALL


def test_what_is_too_large_is_refused_by_field():
    with pytest.raises(InvalidArgument, match="64 KiB") as caught:
        encode_aux(msgspec.structs.replace(ALL, hidden_state=bytes(HIDDEN_BYTES_MAX + 1)))
    assert caught.value.field == "hidden_state"
    with pytest.raises(InvalidArgument) as caught:
        encode_aux(msgspec.structs.replace(ALL, draft_top_k=[1 << 40] * AUX_BYTES_MAX))
    assert caught.value.field == "aux"


def test_a_peer_that_keeps_no_bound_is_refused():
    large = msgspec.structs.replace(ALL, hidden_state=bytes(HIDDEN_BYTES_MAX + 1))
    with pytest.raises(ProtocolError, match="64 KiB"):
        decode_aux(msgspec.msgpack.encode(large))


@pytest.mark.parametrize("field", ["hidden_state", "draft_top_k", "logprobs"])
def test_a_byte_that_changes_on_the_way_fails_the_handoff(field, wait_until, monkeypatch):
    value = {"hidden_state": b"hidden", "draft_top_k": [99_991], "logprobs": {99_991: -0.5}}[field]
    sent = AuxData(first_token=1, position=64, **{field: value})
    real, kept = Staging.read, []

    def flipping(self, pool, job):
        places, digests = real(self, pool, job)
        if job.aux:
            kept.append(np.frombuffer(job.aux, dtype=np.uint8).copy())
            kept[-1][-1] ^= 1  # the last byte is of this field
            places = [(int(kept[-1].ctypes.data), len(kept[-1]))]
        return places, digests

    monkeypatch.setattr(Staging, "read", flipping)
    with managers() as pair:
        sender, receiver = pair.begin(1, 4)
        receiver.announce(0, [0, 1, 2, 3])
        sender.send(range(4), range(4), [0, 1, 2, 3])
        sender.finish(sent)
        wait_until(lambda: receiver.state == State.FAILED)
        assert receiver.failure.code == FailureCode.DIGEST


def test_a_field_of_another_type_is_refused():
    whole = msgspec.structs.replace(ALL, hidden_state=b"h")
    for what, wrong in of_another_type(whole):
        if what == "('seed',) is None" or (what.startswith("('logprobs', ") and "is -7" in what):
            continue  # these are right
        packed = msgspec.msgpack.encode(wrong)
        with pytest.raises(ProtocolError):
            assert decode_aux(packed) is None, what


@given(st.binary(max_size=200))
def test_any_bytes_are_aux_data_or_are_refused(packed):
    try:
        found = decode_aux(packed)
    except ProtocolError:
        return
    assert decode_aux(encode_aux(found)) == found
