"""Goal: a handoff with state data succeeds only when all of it has arrived and was verified."""

import os

import pytest

from kvstore.handoff.aux_data import AuxData
from kvstore.handoff.decode import DecodeManager
from kvstore.handoff.greeting import PROTOCOL, Greeter, LinkGreeting
from kvstore.handoff.memory import HandoffPool
from kvstore.handoff.prefill import PrefillManager
from kvstore.handoff.registry import HandoffRegistry, RankRecord, RegistryClient
from kvstore.handoff.state_data import StateBuffer, StateKind, StateShape
from kvstore.handoff.states import FailureCode, State
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.errors import InvalidArgument
from tests.handoff.pair import BLOCK_TOKENS, PATIENCE, SECRET, SPACE
from tests.handoff.stateful import (
    STATES,
    StatefulMemory,
    positions_of,
    send_kv,
    send_state,
    stateful_pair,
)
from tests.handoff.test_handoff_faults import Relay

COUNT = 5
AUX = AuxData(first_token=7, position=COUNT * BLOCK_TOKENS)
THERE = {"mamba": [4], "window": [9, 2, 3], "index": [8, 1, 2, 20, 21]}


@pytest.mark.parametrize("first", [0, 3, COUNT])
def test_state_data_of_three_kinds_arrive_beside_the_kv_that_decode_needs(first, wait_until):
    here, there = StatefulMemory(), StatefulMemory()
    with stateful_pair(here, there) as pair:
        sender, receiver = pair.begin(1, COUNT)
        blocks = [7, 8, 3, 4, 11][first:]
        wanted = {**THERE, "index": THERE["index"][first:]}
        receiver.announce(first * BLOCK_TOKENS, blocks, wanted)
        send_kv(sender, here, [1, 2, 3, 4, 5])
        for name in STATES:
            send_state(sender, here, name, COUNT, 1)
        sender.finish(AUX)
        wait_until(lambda: {sender.state, receiver.state} == {State.SUCCESS})

        assert there.has(1, "kv", range(first, COUNT), blocks)
        for name in STATES:
            assert there.has(1, name, positions_of(name, COUNT, first), wanted[name])
            assert there.others_are_zero(name, wanted[name])
        kv = (COUNT - first) * 4 * 512
        state = 2 * 4_096 + 3 * 2 * 256 + (COUNT - first) * 64
        assert kv + state < receiver.progress.moved_bytes < kv + state + 100
        assert receiver.aux() == AUX


def test_the_window_of_a_short_prompt_and_an_index_that_comes_in_chunks(wait_until):
    here, there = StatefulMemory(), StatefulMemory()
    with stateful_pair(here, there) as pair:
        sender, receiver = pair.begin(1, 2)
        send_kv(sender, here, [1, 2])
        for position in range(2):  # before decode is there
            here.write(1, "index", range(position, position + 1), [9 - position])
            sender.send_state("index", range(position, position + 1), [9 - position])
        for name in ("window", "mamba"):
            send_state(sender, here, name, 2, 0)
        sender.finish(AUX)
        receiver.announce(0, [5, 6], {"mamba": [0], "window": [1, 0], "index": [3, 4]})
        wait_until(lambda: receiver.state == State.SUCCESS)

        assert there.has(1, "window", range(2), [1, 0])
        assert there.has(1, "index", range(2), [3, 4])


@pytest.mark.parametrize("missing", STATES)
def test_prefill_cannot_finish_without_all_state_data(missing, wait_until):
    here, there = StatefulMemory(), StatefulMemory()
    with stateful_pair(here, there) as pair:
        sender, receiver = pair.begin(1, COUNT)
        receiver.announce(0, [0, 1, 2, 3, 4], THERE)
        send_kv(sender, here, [1, 2, 3, 4, 5])
        for name in STATES.keys() - {missing}:
            send_state(sender, here, name, COUNT, 1)
        with pytest.raises(InvalidArgument, match="state data"):
            sender.finish(AUX)
        wait_until(lambda: receiver.progress.moved_bytes > COUNT * 4 * 512)
        assert receiver.state == State.TRANSFERRING
        send_state(sender, here, missing, COUNT, 1)
        sender.finish(AUX)
        wait_until(lambda: receiver.state == State.SUCCESS)


def test_wrong_calls_are_refused_by_the_name_of_the_buffer():
    here, there = StatefulMemory(), StatefulMemory()
    with stateful_pair(here, there) as pair:
        sender, receiver = pair.begin(1, COUNT)
        for wrong, field in (
            ({}, "states.mamba"),
            ({**THERE, "mamba": []}, "states.mamba"),
            ({**THERE, "mamba": [6]}, "states.mamba"),
            ({**THERE, "window": [1, 2]}, "states.window"),
            ({**THERE, "window": [1, 2, 2]}, "states.window"),
            ({**THERE, "index": [-1, 1, 2, 3, 4]}, "states.index"),
            ({**THERE, "other": [1]}, "states"),
        ):
            with pytest.raises(InvalidArgument) as caught:
                receiver.announce(0, [0, 1, 2, 3, 4], wrong)
            assert caught.value.field == field
        assert not receiver.holds_blocks
        sender.send_state("window", range(2, 4), [3, 4])
        for name, positions, blocks in (
            ("mamba", range(1), [6]),
            ("mamba", range(1, 2), [1]),
            ("mamba", range(1), []),
            ("window", range(1, 3), [1, 2]),
            ("window", range(3, 5), [1, 2]),
            ("window", range(4, 6), [1, 2]),
            ("index", range(0, 4, 2), [1, 2]),
            ("index", range(0), []),
            ("other", range(1), [1]),
        ):
            with pytest.raises(InvalidArgument, match="states"):
                sender.send_state(name, positions, blocks)


@pytest.mark.parametrize("name", STATES)
def test_a_byte_of_state_data_changed_on_the_wire_fails_the_handoff(name, wait_until):
    armed: list[bool] = []

    def change(data: bytes, done: int) -> bytes:
        if armed and len(data) > 150:  # no ping
            data = data[:-1] + bytes([data[-1] ^ 1])
        return data

    registry, here, there = HandoffRegistry("127.0.0.1", 0, SECRET), StatefulMemory(), None
    prefill = PrefillManager(here.pool, SPACE, SECRET, patience=PATIENCE)
    relay = Relay(prefill.address, change)
    record = RankRecord(0, relay.address, prefill._boot.hex(), 1, (0, 2), (0, 1),
                        here.pool.shape, SPACE.hex(), ["tcp"], 1, 60.0)  # fmt: skip
    RegistryClient(registry.url, SECRET).register(record)
    there = StatefulMemory()
    decode = DecodeManager(there.pool, SPACE, SECRET, patience=PATIENCE)
    try:
        receiver = decode.receiver(1, registry.url, COUNT * BLOCK_TOKENS)
        receiver.announce(0, [0, 1, 2, 3, 4], THERE)
        sender = prefill.sender(1, COUNT * BLOCK_TOKENS)
        send_kv(sender, here, [1, 2, 3, 4, 5])
        wait_until(lambda: receiver.progress.moved_bytes == COUNT * 4 * 512)
        armed.append(True)
        send_state(sender, here, name, COUNT, 1)
        wait_until(lambda: receiver.state == State.FAILED)

        assert receiver.failure.code == FailureCode.DIGEST
        wait_until(lambda: not receiver.holds_blocks)
    finally:
        decode.close()
        prefill.close()
        relay.close()
        registry.close()


def test_a_slot_that_prefill_gives_away_too_early_fails_the_handoff(wait_until):
    here, there = StatefulMemory(), StatefulMemory()
    with stateful_pair(here, there) as pair:
        sender, receiver = pair.begin(1, COUNT)
        send_kv(sender, here, [1, 2, 3, 4, 5])
        send_state(sender, here, "mamba", COUNT, 1)
        here.generations["mamba"][1] += 1
        receiver.announce(0, [0, 1, 2, 3, 4], THERE)
        wait_until(lambda: receiver.state == State.FAILED)

        assert receiver.failure.code == FailureCode.BLOCKS_REUSED


def test_fake_pools_move_no_state_data(wait_until):
    here, there = StatefulMemory(fake=True), StatefulMemory(fake=True)
    with stateful_pair(here, there) as pair:
        sender, receiver = pair.begin(1, COUNT)
        receiver.announce(0, [0, 1, 2, 3, 4], THERE)
        send_kv(sender, here, [1, 2, 3, 4, 5])
        for name in STATES:
            send_state(sender, here, name, COUNT, 1)
        sender.finish(AUX)
        wait_until(lambda: receiver.state == State.SUCCESS)

        assert not any(memory.any() for memory in there.memory.values())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"mamba": {"block_bytes": 2_048}}, "states.mamba.block_bytes"),
        ({"mamba": {"kind": StateKind.EVERY}}, "states.mamba.kind"),
        ({"window": {"last": 4}}, "states.window.last"),
        ({"index": {"planes": (1, 2)}}, "states.index.plane_count"),
        ({"index": {"name": "other"}}, "states"),
        ({"index": None}, "states"),
        ({"mamba": None, "window": None, "index": None}, "states"),
        ({"index": {"is_alike": True}}, "states.index.is_alike"),
        ({"index": {"first_plane": 2}}, "states.index.first_plane"),
        ({"mamba": {"block_count": 3, "generations": None}}, None),
    ],
)
def test_other_state_data_than_that_of_prefill_is_refused_by_field(change, field):
    for here, there in ((None, change), (change, None)):
        prefill, decode = StatefulMemory(here).pool, StatefulMemory(there).pool
        planes = tuple(state.planes for state in decode.shape.states)
        greeting = LinkGreeting(
            PROTOCOL, "messages", os.urandom(16), os.urandom(16), "d", SPACE, decode.shape,
            decode.group, decode.shape.part, True, planes, b"",
        )  # fmt: skip
        greeter = Greeter(SECRET, SPACE, prefill.shape, prefill.group)
        if field is None:
            assert greeter.target(greeting).share == prefill.shape.whole
            continue
        with pytest.raises(InvalidArgument) as caught:
            greeter.target(greeting)
        assert caught.value.field == field


def test_a_decode_engine_with_other_state_data_is_told_which_field_does_not_fit(wait_until):
    with stateful_pair(StatefulMemory(), StatefulMemory({"window": {"last": 2}})) as pair:
        _, receiver = pair.begin(1, COUNT)
        wait_until(lambda: receiver.state == State.FAILED)

        assert receiver.failure.code == FailureCode.UNREACHABLE
        assert "states.window.last" in receiver.failure.message


@pytest.mark.parametrize(
    "fields",
    [
        {"name": ""}, {"name": "A b"}, {"name": "x" * 33}, {"plane_count": 0},
        {"plane_count": 5_000}, {"block_bytes": -1}, {"block_bytes": 1 << 31}, {"block_count": 0},
        {"first_plane": -1}, {"first_plane": 4_096},
        {"last": 1}, {"last": -1}, {"kind": StateKind.LAST}, {"kind": StateKind.LAST, "last": -3},
    ],
)  # fmt: skip
def test_a_state_buffer_that_cannot_be_is_refused(fields):
    right = {"name": "s", "kind": StateKind.SLOT, "plane_count": 1, "block_bytes": 8,
             "block_count": 2}  # fmt: skip
    StateShape(**right)
    with pytest.raises(InvalidArgument, match="states"):
        StateShape(**(right | fields))


def test_two_buffers_of_one_name_and_too_many_are_refused():
    kv = KVPool((64, 128), 8, 8, 4)
    one = StateBuffer("s", StateKind.SLOT, (8,), 8, 2)
    for buffers in ([one, one], [one._replace(name=f"s{at}") for at in range(17)]):
        with pytest.raises(InvalidArgument, match="states"):
            HandoffPool(kv, 16, states=buffers)
