"""How many bytes may wait in a connection depends on where the peer is."""

import socket
from contextlib import ExitStack

import pytest

from kvstore.handoff.links import fit_send_buffer


@pytest.mark.parametrize(("at", "near"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_few_bytes_wait_in_a_connection_to_the_same_address_only(at, near):
    with ExitStack() as undo:
        listener = undo.enter_context(socket.create_server(("127.0.0.1", 0)))
        there = undo.enter_context(
            socket.create_connection(listener.getsockname(), 5, source_address=(at, 0))
        )
        here = undo.enter_context(listener.accept()[0])
        before = here.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

        fit_send_buffer(here)

        after = here.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert after in (160 << 10, 320 << 10) if near else after == before
        there.sendall(b"x")
        assert here.recv(1) == b"x"


def test_a_connection_that_is_broken_is_left_to_whoever_uses_it():
    one, other = socket.socketpair()
    one.close()
    other.close()

    fit_send_buffer(one)
