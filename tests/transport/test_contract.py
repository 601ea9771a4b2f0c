"""Goal: every transport keeps the contract of transports."""

import pytest

from kvstore.testing.transport import MemoryPair, TcpPair, TransportContract
from tests.transport.transports import context

PAIRS = {
    "tcp": TcpPair,
    "tcp with TLS": lambda: TcpPair(context(server=True), context(server=False)),
    "memory": MemoryPair,
    "memory that lands late": lambda: MemoryPair(late_ns=3_000_000),
}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("check", TransportContract.CHECKS)
def test_a_transport_keeps_the_contract(check, kind):
    getattr(TransportContract(PAIRS[kind]), check)()
