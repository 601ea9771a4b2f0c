"""A process of another user: ``python -m tests.faults.stranger SOCKET UID GID GROUPS TENANT...``.

It prints what the node says to it for each tenant, as JSON: empty = it may use its pages.
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


def main() -> None:
    path, uid, gid, groups, *tenants = sys.argv[1:]
    os.setgroups([int(group) for group in groups.split(",") if group])
    os.setgid(int(gid))
    os.setuid(int(uid))
    sys.stdout.write(json.dumps({tenant: said(path, tenant) for tenant in tenants}) + "\n")


if __name__ == "__main__":
    main()
