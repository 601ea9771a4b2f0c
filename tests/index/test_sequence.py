"""Numbered batches: what is applied, what is skipped, and when everything is dropped."""

from kvstore.index.sequence import BatchVerdict, Sequence, boot_of

APPLY, SKIP, CLEAR = BatchVerdict.APPLY, BatchVerdict.SKIP, BatchVerdict.CLEAR_AND_APPLY


def body(number: int) -> bytes:
    return b"batch %d" % number


def seen(sequence: Sequence, *numbers: int) -> list[BatchVerdict]:
    return [sequence.take(number, body(number)) for number in numbers]


def test_batches_in_order_are_applied_once() -> None:
    sequence = Sequence()
    assert seen(sequence, 0, 1, 2) == [APPLY] * 3
    assert seen(sequence, 0, 1, 2, 3) == [SKIP, SKIP, SKIP, APPLY]


def test_a_history_that_begins_late_is_believed_from_there() -> None:
    assert seen(Sequence(), 40, 41) == [APPLY, APPLY]


def test_a_gap_that_replay_did_not_fill_drops_what_was_there() -> None:
    sequence = Sequence()
    assert seen(sequence, 0, 1) == [APPLY, APPLY]
    assert sequence.needs_replay(4)
    assert sequence.replay_from == 1
    assert seen(sequence, 1, 2, 4, 5) == [SKIP, APPLY, CLEAR, APPLY]
    assert (sequence.gaps, sequence.gaps_lost) == (1, 1)


def test_a_gap_that_replay_filled_drops_nothing() -> None:
    sequence = Sequence()
    seen(sequence, 0, 1)
    assert sequence.needs_replay(4)
    assert seen(sequence, 1, 2, 3, 4, 4) == [SKIP, APPLY, APPLY, APPLY, SKIP]
    assert sequence.gaps_lost == 0


def test_another_boot_id_is_a_restart() -> None:
    sequence = Sequence()
    assert not sequence.met_live(b"kvstore@n@aa", 0)
    seen(sequence, 0)
    assert sequence.met_live(b"kvstore@n@bb", 1)
    assert sequence.needs_replay(1)
    assert sequence.replay_from == 0
    assert seen(sequence, 0, 1) == [APPLY, APPLY]


def test_a_number_that_runs_backwards_is_a_restart_even_without_a_boot_id() -> None:
    sequence = Sequence()
    for number in range(5):
        assert not sequence.met_live(b"kv-events", number)
        seen(sequence, number)
    assert sequence.met_live(b"kv-events", 0)
    assert seen(sequence, 0) == [APPLY]
    assert sequence.restarts == 1


def test_late_live_batches_after_a_replay_are_no_restart() -> None:
    sequence = Sequence()
    assert not sequence.met_live(b"kv-events", 2)
    seen(sequence, 0, 1, 2, 3, 4)  # a replay was faster than the live messages
    for number in (3, 4):
        assert not sequence.met_live(b"kv-events", number)
        assert not sequence.needs_replay(number)
        assert seen(sequence, number) == [SKIP]


def test_a_last_batch_that_is_another_one_is_a_restart() -> None:
    sequence = Sequence()
    seen(sequence, 0, 1, 2)
    assert sequence.take(2, b"something else") is BatchVerdict.RESTARTED
    assert sequence.replay_from == 0
    assert seen(sequence, 0) == [APPLY]


def test_an_empty_replay_is_a_restart_only_without_a_boot_id() -> None:
    named, nameless, fresh = Sequence(), Sequence(), Sequence()
    named.met(b"kvstore@n@aa")
    seen(named, 0)
    seen(nameless, 0)
    assert not named.replay_was_empty()
    assert nameless.replay_was_empty()
    assert not fresh.replay_was_empty()


def test_only_topics_of_three_parts_have_a_boot_id() -> None:
    assert boot_of(b"kvstore@node@0badcafe") == b"0badcafe"
    assert boot_of(b"kv-events") == b""
