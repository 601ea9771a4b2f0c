"""Faults of others: every one is counted, few of them are lines."""

import logging

import pytest

from kvstore.process import faults
from kvstore.process.faults import Faults
from kvstore.protocol.errors import FOREIGN_TEXT_MAX, printable


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(faults.time, "monotonic", lambda: now[0])
    return now


def test_each_cause_has_one_line_in_a_while_which_says_how_many_there_were(clock, caplog):
    counted = Faults(logging.getLogger("x"), "somebody")
    for _ in range(1_000):
        counted.note("late", "by an hour")
    counted.note("early", "by a day")
    clock[0] += faults.SILENCE_S
    counted.note("late", "again")

    assert counted.counts == {"late": 1_001, "early": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "somebody: late: by an hour",
        "somebody: early: by a day",
        "somebody: late: again (999 more since the last such line)",
    ]


def test_what_others_say_is_a_part_of_one_line():
    assert printable("a\nb\x1b[2Jc\u2028d") == "a?b?[2Jc?d"
    assert len(printable("x" * 10_000)) == FOREIGN_TEXT_MAX
