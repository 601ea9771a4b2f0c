"""A process of another user: ``python -m tests.faults.stranger SOCKET UID GID GROUPS TENANT...``.

It prints what the node says to it for each tenant, as JSON: empty = it may use its pages. For
``?TENANT`` it prints which tenants it sees in the statistics, in a session of that tenant.
"""

import contextlib
import json
import os
import socket
import sys

import msgspec

from kvstore.protocol import wire
from tests.faults import content
from tests.faults.test_connections import HELLO, receive


def said(path: str, tenant: str) -> str:
    """What the node refuses a session of the tenant with."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        try:
            connection.connect(path)
            with contextlib.suppress(BrokenPipeError):  # refused already: the answer says why
                connection.sendall(wire.encode(HELLO))
            answer = receive(connection)
            if isinstance(answer, wire.Welcome):
                identity = msgspec.structs.replace(content.IDENTITY, tenant=tenant)
                connection.sendall(wire.encode(wire.OpenSpace(2, identity, [content.SHARD])))
                answer = receive(connection)
        except OSError as error:
            return type(error).__name__
    return answer.message if isinstance(answer, wire.Failure) else ""


def seen(path: str, tenant: str) -> list[str]:
    """The tenants that the statistics name in a session of the tenant, and models with lookups."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(path)
        identity = msgspec.structs.replace(content.IDENTITY, tenant=tenant)
        opens = wire.OpenSpace(2, identity, [content.SHARD])
        lookup = wire.Lookup(3, 0 if tenant == "red" else 1, [0], content.keys(1, 1).packed)
        for message in (HELLO, opens, lookup, wire.Stats(4)):
            connection.sendall(wire.encode(message))
            answer = receive(connection)
    assert isinstance(answer, wire.StatsReply), answer
    stats = json.loads(answer.json)
    rows = [row["tenant"] for row in stats["spaces"] + stats["sessions"]]
    return rows + [row["model"] for row in stats["lookups"]]


def main() -> None:
    path, uid, gid, groups, *tenants = sys.argv[1:]
    os.setgroups([int(group) for group in groups.split(",") if group])
    os.setgid(int(gid))
    os.setuid(int(uid))
    told = {
        tenant: seen(path, tenant[1:]) if tenant.startswith("?") else said(path, tenant)
        for tenant in tenants
    }
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
