"""Goal: links on which nothing lives give way to new ones; those on which something does stay."""

import contextlib
from collections.abc import Iterator

import pytest

from kvstore.handoff import decode, links, prefill
from kvstore.handoff.decode import DecodeManager, Receiver
from kvstore.handoff.states import FailureCode, State
from kvstore.protocol.errors import CapacityError
from tests.handoff.pair import BLOCK_TOKENS, PATIENCE, SECRET, SPACE, Memory, Pair, managers

pytestmark = pytest.mark.usefixtures("at_once")


@pytest.fixture
def at_once(monkeypatch) -> None:
    monkeypatch.setattr(links, "IDLE_S", 0.0)


@contextlib.contextmanager
def another_decode() -> Iterator[DecodeManager]:
    made = DecodeManager(Memory(8).pool, SPACE, SECRET, name="another", patience=PATIENCE)
    try:
        yield made
    finally:
        made.close()


def begun(decode: DecodeManager, pair: Pair, room: int, wait_until) -> Receiver:
    """A handoff that prefill knows of."""
    receiver = decode.receiver(room, pair.registry.url, BLOCK_TOKENS)
    wait_until(lambda: room in [one.room for one in pair.prefill.describe()])
    return receiver


def end(receiver: Receiver, pair: Pair, wait_until) -> None:
    """Prefill gives it up; decode hears of that, so nothing lives on the link."""
    sender = pair.prefill.sender(receiver.room, BLOCK_TOKENS)
    sender.abort()
    wait_until(lambda: receiver.state is State.FAILED)
    assert receiver.failure.code == FailureCode.ABORTED
    sender.close()


def test_an_instance_on_whose_links_nothing_lives_gives_way_to_another(wait_until, monkeypatch):
    monkeypatch.setattr(decode, "PEERS_MAX", 1)
    with managers() as first, managers() as second:
        ours = first.decode
        receiver = begun(ours, first, 1, wait_until)
        with pytest.raises(CapacityError, match="in use") as caught:
            ours.receiver(2, second.registry.url, BLOCK_TOKENS)
        assert caught.value.field == "peers"
        assert receiver.state is State.BOOTSTRAPPING
        for room, pair, other in ((3, second, first), (4, first, second), (5, second, first)):
            end(receiver, other, wait_until)
            receiver.close()
            receiver = begun(ours, pair, room, wait_until)
            wait_until(lambda: other.prefill.stats()["links"] == 0)  # noqa: B023
        assert ours.stats()["links"] == 1
        assert ours.stats()["idle_peers_closed"] == 3
        assert receiver.state is State.BOOTSTRAPPING
        wait_until(lambda: ours.stats()["threads"] == 2, what="those of one link")


def test_links_that_were_used_just_now_give_way_to_nobody(wait_until, monkeypatch):
    """Their last messages may not have been read."""
    monkeypatch.setattr(decode, "PEERS_MAX", 1)
    with managers() as first, managers() as second:
        end(begun(first.decode, first, 1, wait_until), first, wait_until)
        monkeypatch.setattr(links, "IDLE_S", 60.0)
        with pytest.raises(CapacityError, match="in use"):
            first.decode.receiver(2, second.registry.url, BLOCK_TOKENS)
        assert first.decode.stats()["links"] == 1
        monkeypatch.setattr(links, "IDLE_S", 0.0)
        begun(first.decode, second, 3, wait_until)


def test_blocks_that_wait_for_prefill_keep_their_links(wait_until, monkeypatch):
    """The handoff has ended at decode, but prefill has not said that nothing arrives."""
    monkeypatch.setattr(decode, "PEERS_MAX", 1)
    with managers() as first, managers() as second:
        receiver = begun(first.decode, first, 1, wait_until)
        receiver.announce(0, [3])
        with first.prefill._lock:  # it does not answer
            receiver.abort()
            assert receiver.holds_blocks
            with pytest.raises(CapacityError, match="in use"):
                first.decode.receiver(2, second.registry.url, BLOCK_TOKENS)
        wait_until(lambda: not receiver.holds_blocks)
        begun(first.decode, second, 3, wait_until)


def test_too_many_links_are_refused_before_they_are_connected_and_idle_ones_give_way(
    wait_until, monkeypatch
):
    link_to, connected = decode.link_to, []

    def counted(rank, *arguments):
        connected.append(rank)
        return link_to(rank, *arguments)

    monkeypatch.setattr(decode, "LINKS_MAX", 1)
    monkeypatch.setattr(decode, "link_to", counted)
    with managers() as first, managers() as second:
        receiver = begun(first.decode, first, 1, wait_until)
        refused = first.decode.receiver(2, second.registry.url, BLOCK_TOKENS)
        wait_until(lambda: refused.state is State.FAILED)
        assert refused.failure.code == FailureCode.UNREACHABLE
        assert "1 links are in use, 1 more are too many" in refused.failure.message
        assert len(connected) == 1
        assert receiver.state is State.BOOTSTRAPPING

        end(receiver, first, wait_until)
        receiver = begun(first.decode, second, 3, wait_until)
        assert len(connected) == 2
        end(receiver, second, wait_until)
        monkeypatch.setattr(decode, "LINKS_MAX", 0)  # then nobody is closed in vain
        refused = first.decode.receiver(4, first.registry.url, BLOCK_TOKENS)
        wait_until(lambda: refused.state is State.FAILED)
        assert "1 links are in use, 1 more" in refused.failure.message
        assert first.decode.stats()["links"] == 1
        assert first.decode.stats()["idle_peers_closed"] == 1


def test_a_decode_rank_on_whose_link_nothing_lives_gives_way_to_another(wait_until, monkeypatch):
    monkeypatch.setattr(prefill, "LINKS_MAX", 1)
    with managers() as pair, another_decode() as other:
        receiver = begun(pair.decode, pair, 1, wait_until)
        refused = other.receiver(2, pair.registry.url, BLOCK_TOKENS)
        wait_until(lambda: refused.state is State.FAILED)
        assert receiver.state is State.BOOTSTRAPPING
        assert pair.prefill.stats()["links"] == 1

        end(receiver, pair, wait_until)
        begun(other, pair, 3, wait_until)
        wait_until(lambda: pair.decode.stats()["links"] == 0)
        assert pair.prefill.stats()["links"] == pair.prefill.stats()["idle_links_closed"] == 1
        assert other.poll([refused]) == [State.FAILED]


def test_jobs_of_an_ended_handoff_keep_their_link(wait_until, monkeypatch):
    """Its blocks are still read, and decode hears over the link when that has ended."""
    monkeypatch.setattr(prefill, "LINKS_MAX", 1)
    with managers() as pair, another_decode() as other:
        receiver = begun(pair.decode, pair, 1, wait_until)
        receiver.announce(0, [3])
        sender = pair.prefill.sender(1, BLOCK_TOKENS)
        wait_until(lambda: sender.state is State.WAITING_FOR_INPUT)
        (link,) = pair.prefill._links.values()
        with monkeypatch.context() as patch:
            patch.setattr(link.outbox, "put_job", lambda _job: True)  # it is under way for now
            sender.send(range(1), range(1), [0])
        sender.abort()
        assert sender.holds_blocks
        refused = other.receiver(2, pair.registry.url, BLOCK_TOKENS)
        wait_until(lambda: refused.state is State.FAILED)
        assert not link.is_closed
        pair.prefill._completed(pair.prefill._core._jobs._submitted[1], None)
        wait_until(lambda: not (receiver.holds_blocks or sender.holds_blocks))
        begun(other, pair, 3, wait_until)
        assert link.is_closed
