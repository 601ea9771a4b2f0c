"""Goal: prefill and decode engines of any adapter understand each other, or expect nothing."""

import msgspec
import pytest

from kvstore.engine.pending import ASK_S, LATER_SHARE, PendingWait, missing_tokens
from kvstore.engine.transfer import NOTHING, Transfer, read_transfer

PAGES = {
    "do_remote_prefill": True, "kvstore_pages": 4, "kvstore_page_tokens": 64, "prompt_tokens": 300,
}  # fmt: skip
TOKENS = {
    "do_remote_prefill": True, "handoff_id": "h", "first_token": 7, "prompt_tokens": 300,
    "position": 300, "tail_key": "cd" * 32, "tail_tokens": 44, "seed": None,
}  # fmt: skip
"""As the reference engine said it when it did not name pages."""


def test_what_one_engine_says_is_what_the_other_reads():
    for told in (Transfer(do_remote_decode=True), read_transfer(PAGES), read_transfer(TOKENS)):
        assert read_transfer(told.as_parameters()) == told
        assert read_transfer(msgspec.json.decode(msgspec.json.encode(told))) == told


def test_an_engine_that_knows_nothing_of_tokens_says_nothing_of_them():
    assert read_transfer(PAGES).as_parameters() == PAGES
    assert Transfer(kvstore_pages=0).as_parameters() == {"kvstore_pages": 0}


def test_an_engine_that_does_not_name_pages_promises_none():
    told = read_transfer(TOKENS)

    assert (told.first_token, told.tail_key, told.seed) == (7, "cd" * 32, None)
    assert told.promised_pages(64) == 0


def test_pages_are_promised_by_a_prefill_engine_with_pages_of_the_same_size():
    assert read_transfer(PAGES).promised_pages(64) == 4
    assert read_transfer(PAGES).promised_pages(128) == 0
    assert (
        read_transfer(
            {**PAGES, "do_remote_decode": True, "do_remote_prefill": False}
        ).promised_pages(64)
        == 0
    )
    # Beside another connector, which may say so or not.
    assert read_transfer({**PAGES, "do_remote_prefill": False}).promised_pages(64) == 4
    assert read_transfer({**PAGES, "kvstore_pages": -5}).promised_pages(64) == 0


@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"remote_host": "x"}, {**PAGES, "kvstore_pages": "many"},
     {**PAGES, "kvstore_pages": 1.5}, {"do_remote_decode": "yes"}, {"seed": []},
     {**PAGES, "seed": "\ud800"}, {**PAGES, "handoff": "\ud800"}],
)  # fmt: skip
def test_parameters_of_somebody_else_say_nothing(parameters):
    assert read_transfer(parameters) == NOTHING


def test_a_wait_for_pages_has_the_end_that_was_set_when_it_began():
    wait = PendingWait()
    assert not wait.begun
    assert wait.left_s(10.0, 0.5, 0.02) == 0.5, "nothing is waited for yet"

    assert wait.goes_on(10.0, 0.5)
    assert wait.ask_at == 10.0 + ASK_S
    assert wait.goes_on(10.4, 60.0)
    assert wait.left_s(10.4, 60.0, 0.02) == pytest.approx(0.1)
    assert not wait.goes_on(10.5, 60.0)
    assert wait.left_s(11.0, 60.0, 0.02) == 0.02, "a load that has come so far gets a moment"


@pytest.mark.parametrize("wait_s", [0.02, 0.2, 2.0, 60.0])
def test_a_wait_asks_seldom_when_it_lasts_and_ends_little_later(wait_s):
    """Whoever sends a request may promise a million pages that never come."""
    wait, now, asked = PendingWait(), 10.0, 0
    while wait.goes_on(now, wait_s):
        asked += 1
        assert wait.ask_at >= now + ASK_S
        now = wait.ask_at
    assert asked <= 150
    assert now <= 10.0 + wait_s * (1 + LATER_SHARE) + ASK_S


@pytest.mark.parametrize(
    ("pages", "wanted", "computed", "missing"),
    [(1, 4, 0, 192), (1, 4, 128, 128), (4, 4, 0, 0), (0, 2, 200, 0)],
)
def test_only_tokens_that_are_neither_there_nor_computed_are_missing(
    pages, wanted, computed, missing
):
    assert missing_tokens(pages, wanted, computed, 64) == missing
