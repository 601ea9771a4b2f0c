"""Goal: a name server that does not answer costs a transfer its deadline, and no thread more."""

import threading
import time

import pytest

from kvstore.protocol.errors import PeerUnreachable, TransferTimeout
from kvstore.transport import names as host_names
from kvstore.transport.names import HostNames
from tests.conftest import WaitUntil


class SlowNames:
    """Resolves names once its gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked: list[str] = []

    def __call__(self, host: str) -> list[str]:
        self.asked.append(host)
        assert self.gate.wait(30)
        if host == "nobody":
            raise OSError("Name or service not known")
        return ["10.0.0.1", "fd00::1"]


def soon_ns(seconds: float = 30) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def names_threads() -> int:
    return sum(one.name == "kvstore-names" for one in threading.enumerate())


def test_a_name_that_is_not_resolved_costs_only_the_deadline_and_one_thread(
    wait_until: WaitUntil,
):
    ask = SlowNames()
    names = HostNames(ask)
    for _ in range(3):
        with pytest.raises(TransferTimeout, match="slow"):
            names.addresses("slow", soon_ns(0.01))
    wait_until(lambda: ask.asked, what="it is asked")
    assert ask.asked == ["slow"]
    assert names_threads() == 1

    ask.gate.set()
    wait_until(lambda: not names_threads())
    assert names.addresses("slow", soon_ns()) == ["10.0.0.1", "fd00::1"]
    assert ask.asked == ["slow", "slow"], "an old answer is not used"


def test_a_name_that_nobody_has_is_a_peer_that_cannot_be_reached():
    ask = SlowNames()
    ask.gate.set()
    with pytest.raises(PeerUnreachable, match=r"nobody: .*not known"):
        HostNames(ask).addresses("nobody", soon_ns())
    with pytest.raises(PeerUnreachable, match=r"a\.\.b"):
        HostNames().addresses("a..b", soon_ns())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_address_is_not_asked_for(host):
    assert HostNames(SlowNames()).addresses(host, 0) == [host]


def test_a_name_is_asked_for_again_after_no_thread_could_be_started(monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    ask = SlowNames()
    ask.gate.set()
    names = HostNames(ask)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(PeerUnreachable, match="thread"):
            names.addresses("slow", soon_ns())

    assert names.addresses("slow", soon_ns()) == ["10.0.0.1", "fd00::1"]


def test_peers_that_tell_another_name_each_time_cost_a_bounded_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
):
    monkeypatch.setattr(host_names, "NAMES_MAX", 2)
    ask = SlowNames()
    names = HostNames(ask)
    for host in ("a", "b"):
        with pytest.raises(TransferTimeout):
            names.addresses(host, soon_ns(0.01))

    with pytest.raises(PeerUnreachable, match=r"c: .*names"):
        names.addresses("c", soon_ns())
    wait_until(lambda: len(ask.asked) == 2, what="both are asked")
    assert set(ask.asked) == {"a", "b"}

    ask.gate.set()
    wait_until(lambda: not names_threads())
    assert names.addresses("c", soon_ns()) == ["10.0.0.1", "fd00::1"]
