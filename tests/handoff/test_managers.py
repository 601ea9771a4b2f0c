"""Goal: KV arrives byte for byte in the other pool, and what ends a handoff ends only that."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.handoff import decode, staging
from kvstore.handoff.aux_data import AuxData
from kvstore.handoff.sending import Senders
from kvstore.handoff.states import FailureCode, Patience, State
from kvstore.protocol.errors import CapacityError, InvalidArgument
from tests.handoff.pair import BLOCK_TOKENS, BLOCKS, LAYERS, managers, push_all


def test_kv_and_aux_data_arrive_whole_in_scattered_blocks(wait_until):
    shuffled = random.Random(3)
    with managers() as pair:

        def hand_over(room):
            here = shuffled.sample(range(BLOCKS), 40)
            there = shuffled.sample(range(BLOCKS), 40)
            sender, receiver = pair.begin(room, 40)
            receiver.announce(0, there)
            push_all(sender, pair.here, here)
            wait_until(lambda: pair.prefill.poll([sender]) == [State.SUCCESS])

            assert pair.decode.poll([receiver]) == [State.SUCCESS]
            assert pair.there.has(room, range(40), there)
            assert receiver.aux() == AuxData(first_token=7, position=40 * BLOCK_TOKENS)
            wait_until(lambda: not sender.holds_blocks)
            assert not receiver.holds_blocks
            sender.close()
            receiver.close()

        for room in range(1, 4):
            hand_over(room)
        assert pair.prefill.describe() == pair.decode.describe() == []
        assert pair.decode.stats()["succeeded"] == 3


def test_what_decode_has_already_is_not_sent(wait_until):
    with managers() as pair:
        sender, receiver = pair.begin(1, 10)
        receiver.announce(7 * BLOCK_TOKENS + 3, [50, 51, 52])
        push_all(sender, pair.here, list(range(10)))
        wait_until(lambda: receiver.state == State.SUCCESS)

        assert pair.there.has(1, range(7, 10), [50, 51, 52])
        assert not pair.there.planes[:, :50].any()
        assert not pair.there.planes[:, 53:].any()


def test_prefill_may_send_before_decode_has_memory(wait_until):
    with managers() as pair:
        sender, receiver = pair.begin(1, 20)
        push_all(sender, pair.here, list(range(20)))
        assert sender.state == State.BOOTSTRAPPING
        receiver.renew()
        receiver.announce(0, list(range(30, 50)))
        wait_until(lambda: receiver.state == State.SUCCESS)

        assert pair.there.has(1, range(20), list(range(30, 50)))


def test_an_abort_on_either_side_gives_the_blocks_back_and_costs_no_other_request_anything(
    wait_until,
):
    with managers() as pair:
        other, others = pair.begin(9, 10)
        others.announce(0, list(range(100, 110)))

        def abort(room, by_decode):
            sender, receiver = pair.begin(room, 20)
            receiver.announce(0, list(range(20)))
            pair.here.write(room, range(1), range(20), list(range(20)))
            sender.send(range(1), range(20), list(range(20)))
            wait_until(lambda: receiver.state == State.TRANSFERRING)
            (receiver if by_decode else sender).abort()
            wait_until(lambda: sender.state == receiver.state == State.FAILED)
            wait_until(lambda: not (sender.holds_blocks or receiver.holds_blocks))

            assert sender.failure == receiver.failure
            assert receiver.failure.code == FailureCode.ABORTED
            sender.close()
            receiver.close()

        abort(1, by_decode=True)
        abort(2, by_decode=False)
        push_all(other, pair.here, list(range(50, 60)))
        wait_until(lambda: others.state == State.SUCCESS)
        assert pair.there.has(9, range(10), list(range(100, 110)))
        assert pair.decode.stats()["limbo_blocks"] == 0


def test_64_handoffs_at_once_and_200_in_a_row_leave_no_more_threads(wait_until):
    with managers() as pair:
        many = []
        for room in range(1, 65):
            sender, receiver = pair.begin(room, 1)
            receiver.announce(0, [room])
            many.append((sender, receiver))
        for sender, _ in many:
            push_all(sender, pair.here, [sender.room])
        wait_until(lambda: {r.state for _, r in many} == {State.SUCCESS})
        with pytest.raises(CapacityError, match="handoffs"):
            pair.decode.receiver(1_000, pair.registry.url, 1)
        for sender, receiver in many:
            sender.close()
            receiver.close()
        threads = threading.active_count()

        def hand_over(room):
            sender, receiver = pair.begin(room, 2)
            receiver.announce(0, [0, 1])
            push_all(sender, pair.here, [2, 3])
            wait_until(lambda: sender.state == State.SUCCESS)
            sender.close()
            receiver.close()

        for room in range(100, 300):
            hand_over(room)
        assert threading.active_count() == threads
        assert pair.decode.describe() == []


def test_a_block_that_prefill_gives_away_too_early_fails_the_handoff(wait_until):
    with managers() as pair:
        sender, receiver = pair.begin(1, 4)
        push_all(sender, pair.here, [0, 1, 2, 3])
        pair.here.generations[2] += 1
        pair.here.planes[:, 2] = 0xEE
        receiver.announce(0, [0, 1, 2, 3])
        wait_until(lambda: receiver.state == State.FAILED)

        assert receiver.failure.code == FailureCode.BLOCKS_REUSED
        wait_until(lambda: not receiver.holds_blocks)


def test_wrong_calls_are_refused_by_field_and_change_nothing(wait_until):
    with managers() as pair:
        sender, receiver = pair.begin(1, 4)
        for call, field in [
            (lambda: receiver.announce(0, [0, 1, 2]), "blocks"),
            (lambda: receiver.announce(0, [0, 1, 2, 2]), "blocks"),
            (lambda: receiver.announce(0, [0, 1, 2, BLOCKS]), "blocks"),
            (lambda: receiver.announce(65, []), "first_token"),
            (lambda: pair.decode.receiver(1, pair.registry.url, 64), "room"),
            (lambda: pair.decode.receiver(-1, pair.registry.url, 64), "room"),
            (lambda: pair.decode.receiver(2, "ftp://x", 64), "registry"),
            (lambda: pair.decode.receiver(2, "http://[1", 64), "registry"),
            (lambda: pair.decode.receiver(2, "http://x:y", 64), "registry"),
            (lambda: pair.decode.receiver(2, "http://a..b:80", 64), "registry"),
            (lambda: pair.decode.receiver(2, f"http://{'x' * 64}.b:80", 64), "registry"),
            (lambda: pair.prefill.sender(1, 64), "room"),
            (lambda: pair.prefill.sender(3, 0), "token_count"),
            (lambda: sender.send(range(1), range(2), [0]), "blocks"),
            (lambda: sender.send(range(LAYERS + 1), range(1), [0]), "positions"),
            (lambda: sender.send(range(1), range(3, 5), [0, 1]), "positions"),
            (lambda: sender.send(range(1), range(1), [BLOCKS]), "blocks"),
            (lambda: sender.finish(AuxData(first_token=1, position=1)), "room"),
            (
                lambda: sender.finish(
                    AuxData(first_token=1, position=1, hidden_state=bytes(65_537))
                ),
                "hidden_state",
            ),
        ]:
            with pytest.raises(InvalidArgument) as caught:
                call()
            assert caught.value.field == field
        receiver.announce(0, [0, 1, 2, 3])
        push_all(sender, pair.here, [4, 5, 6, 7])
        wait_until(lambda: receiver.state == State.SUCCESS)
        with pytest.raises(InvalidArgument, match="announced"):
            pair.begin(2, 1)[1].announce(0, [0]) or pair.decode.act(
                lambda core, now: core.announce(2, 0, [0], now)
            )


def test_closing_a_manager_ends_all_of_its_handoffs(wait_until):
    with managers() as pair:
        alone = pair.prefill.sender(1, 16)
        sender, receiver = pair.begin(2, 1)
        receiver.announce(0, [3])
        wait_until(lambda: sender.state == State.WAITING_FOR_INPUT)
        pair.prefill.close()

        assert pair.prefill.poll([alone, sender]) == [State.FAILED, State.FAILED]
        assert not alone.holds_blocks
        assert not sender.holds_blocks
        wait_until(lambda: receiver.state == State.FAILED and not receiver.holds_blocks)
        assert receiver.failure.code == FailureCode.PEER_CLOSED


def test_handoffs_that_an_engine_closes_while_their_manager_closes_are_no_fault(monkeypatch):
    abort, closing = Senders.abort, threading.Event()

    def noted(self, room, now):
        closing.set()
        return abort(self, room, now)

    with managers() as pair:
        senders = [pair.prefill.sender(room, 16) for room in range(1, 1_001)]
        monkeypatch.setattr(Senders, "abort", noted)

        def close_all() -> None:
            assert closing.wait(30)
            for sender in reversed(senders):
                sender.close()

        with ThreadPoolExecutor(1) as threads:
            ended = threads.submit(close_all)
            pair.prefill.close()
            ended.result(30)
        assert {sender.state for sender in senders} == {State.FAILED}
        assert pair.prefill.describe() == []


def test_a_manager_that_was_closed_begins_nothing(wait_until):
    """Nobody would end it: there is no clock any more."""
    with managers() as pair:
        sender, receiver = pair.begin(1, 1)
        pair.prefill.close()
        pair.decode.close()
        assert sender.state is receiver.state is State.FAILED
        for begin in (
            lambda: pair.prefill.sender(2, 16),
            lambda: pair.decode.receiver(2, pair.registry.url, 16),
        ):
            with pytest.raises(CapacityError, match="closed") as caught:
                begin()
            assert caught.value.field == "closed"
        assert [one.room for one in pair.prefill.describe()] == [1]
        assert [one.room for one in pair.decode.describe()] == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_of_prefill_that_ends_by_a_fault_of_ours_gives_the_blocks_back(
    wait_until, monkeypatch
):
    def faulty(*_):
        raise RuntimeError("a fault of ours")

    with managers() as pair:
        sender, receiver = pair.begin(1, 4)
        monkeypatch.setattr(staging, "digests_of", faulty)
        push_all(sender, pair.here, [0, 1, 2, 3])
        receiver.announce(0, [0, 1, 2, 3])

        wait_until(lambda: sender.state == receiver.state == State.FAILED)
        wait_until(lambda: not sender.holds_blocks and not receiver.holds_blocks)


@pytest.mark.parametrize(
    "name", ["kvstore-handoff-reader", "kvstore-handoff-link", "kvstore-handoff-writer"]
)
def test_a_thread_that_cannot_start_fails_a_handoff_and_not_the_next(name, wait_until, monkeypatch):
    start = threading.Thread.start

    def limited(thread):
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with managers() as pair:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", limited)
            receiver = pair.decode.receiver(1, pair.registry.url, 64)
            wait_until(lambda: receiver.state == State.FAILED)
            assert receiver.failure.code == FailureCode.UNREACHABLE
        sender, receiver = pair.begin(2, 4)
        receiver.announce(0, [0, 1, 2, 3])
        push_all(sender, pair.here, [0, 1, 2, 3])
        wait_until(lambda: receiver.state == State.SUCCESS)


def test_an_odd_error_while_connecting_fails_a_handoff_and_not_the_next(
    wait_until, monkeypatch, caplog
):
    def faulty(*_):
        raise MemoryError("a fault of ours")

    with managers() as pair:
        with monkeypatch.context() as patched:
            patched.setattr(decode, "link_to", faulty)
            receiver = pair.decode.receiver(1, pair.registry.url, 64)
            wait_until(lambda: receiver.state == State.FAILED)
            assert receiver.failure.code == FailureCode.UNREACHABLE
            assert "MemoryError" in receiver.failure.message
            wait_until(lambda: pair.decode.stats()["threads"] == 0)
        assert "MemoryError" in caplog.text
        sender, receiver = pair.begin(2, 4)
        receiver.announce(0, [0, 1, 2, 3])
        push_all(sender, pair.here, [0, 1, 2, 3])
        wait_until(lambda: receiver.state == State.SUCCESS)


def test_a_link_that_is_made_while_its_manager_closes_is_not_used(wait_until, monkeypatch):
    with managers() as pair:
        connect = pair.decode._connect

        def slow(link, client, made):
            connect(link, client, made)
            pair.decode._drop(link, FailureCode.CLOSED, "for a test: it closes just now")

        monkeypatch.setattr(pair.decode, "_connect", slow)
        receiver = pair.decode.receiver(1, pair.registry.url, 64)
        wait_until(lambda: receiver.state == State.FAILED)
        assert receiver.failure.code == FailureCode.UNREACHABLE
        wait_until(lambda: pair.decode.stats()["threads"] == pair.decode.stats()["links"] == 0)


def test_deadlines_are_kept_after_a_fault_of_ours_in_the_ticker(wait_until, monkeypatch, caplog):
    with managers(Patience(0.5, 0.5, 2, 20)) as pair:
        tick, faults = pair.prefill._core.tick, iter([RuntimeError("a fault of ours")])

        def faulty(now):
            for fault in faults:
                raise fault
            return tick(now)

        monkeypatch.setattr(pair.prefill._core, "tick", faulty)
        sender = pair.prefill.sender(1, 64)
        wait_until(lambda: sender.state == State.FAILED)
        assert "continues after an internal error" in caplog.text


def test_a_shorter_silence_than_pings_allow_is_refused():
    with pytest.raises(InvalidArgument, match="silence_s"):
        Patience(silence_s=0.9)
    with pytest.raises(InvalidArgument, match="silence_s"):
        Patience(silence_s=float("nan"))
