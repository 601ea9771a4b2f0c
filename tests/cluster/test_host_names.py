"""Goal: a host name that is resolved too late, and then not at all, is told to nobody.

What the loop of a node is told of ends the node.
"""

import asyncio
import contextlib
import gc
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from kvstore.cluster.greeting import LocalNode
from kvstore.cluster.links import PeerLink
from kvstore.cluster.presence import PresenceCheck
from kvstore.cluster.records import NodeRecord
from kvstore.cluster.session import PeerSession
from kvstore.events import zmtp
from kvstore.index.channel import EventConnection
from kvstore.index.credentials import PeerCredentials
from tests.cluster.whole_node import SCHEME, local
from tests.loops import in_loop

NOWHERE = "nowhere.invalid"
PLACE = f"{NOWHERE}:7400"
OWN = LocalNode("blue", "a", b"z" * 16, SCHEME)


def link() -> Coroutine[Any, Any, Any]:
    made = PeerSession("b", OWN, [], PLACE)
    return PeerLink(made, PLACE, None, lambda *_: None).run()


def presence() -> Coroutine[Any, Any, Any]:
    return PresenceCheck(OWN, None)(NodeRecord(name="b", boot=b"x" * 16, endpoint=PLACE))


def publisher() -> Coroutine[Any, Any, Any]:
    return EventConnection.open(f"tcp://{PLACE}", zmtp.SUB, "", 5.0)


def publisher_of_a_node() -> Coroutine[Any, Any, Any]:
    shown = PeerCredentials("blue", "", local("a").scheme, None)
    return EventConnection.open(f"peer://{PLACE}", zmtp.SUB, shown, 5.0)


@pytest.mark.parametrize("connects", [link, presence, publisher, publisher_of_a_node])
@in_loop
async def test_a_lookup_that_fails_when_nobody_waits_any_more_is_no_alarm(connects: Any) -> None:
    alarms: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, one: alarms.append(one))

    task = loop.create_task(connects())
    await asyncio.sleep(0)  # it asks; the answer comes in a later turn of the loop
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()

    for _ in range(3):  # the first lookup has ended by then
        with pytest.raises(socket.gaierror):
            await loop.getaddrinfo(NOWHERE, 1)
    gc.collect()
    assert alarms == []
