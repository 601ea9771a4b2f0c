"""Maps users and groups of peers to tenants."""

import grp
import logging
import pwd
import socket
import struct
from collections.abc import Sequence
from typing import Final

from kvstore.protocol.errors import ConfigError
from kvstore.server.processes import credentials

log = logging.getLogger(__name__)

_SO_PEERGROUPS: Final = 59
_GROUP: Final = struct.Struct("I")
_GROUPS_MAX: Final = 256
"""Maximum groups that Python's ``getsockopt`` can return; with more, the primary one counts."""


class Tenants:
    """The entries of ``socket.tenants``.

    Args:
        entries: ``TENANT=USER`` and ``TENANT=@GROUP``, by name or number.

    Raises:
        ConfigError: an entry is invalid, or its user or group does not exist.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._of_user: dict[int, set[str]] = {}
        self._of_group: dict[int, set[str]] = {}
        for entry in entries:
            tenant, _, who = entry.partition("=")
            if not tenant or not who.removeprefix("@"):
                raise ConfigError(f"socket.tenants: {entry!r} is not TENANT=USER or TENANT=@GROUP")
            if who.startswith("@"):
                self._of_group.setdefault(_group(entry, who[1:]), set()).add(tenant)
            else:
                self._of_user.setdefault(_user(entry, who), set()).add(tenant)

    def __bool__(self) -> bool:
        return bool(self._of_user or self._of_group)

    def of(self, connection: socket.socket) -> frozenset[str]:
        """The tenants that the process behind a connection may use."""
        found = set(self._of_user.get(credentials(connection).uid, ()))
        for group in groups(connection) if self._of_group else ():
            found |= self._of_group.get(group, set())
        return frozenset(found)


def groups(connection: socket.socket) -> set[int]:
    """All groups of the process behind a connection."""
    return {credentials(connection).gid, *_further_groups(connection)}


def _further_groups(connection: socket.socket) -> Sequence[int]:
    size = _GROUPS_MAX * _GROUP.size
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, size)
    except OSError as error:
        log.warning("the groups of a peer cannot be read and are ignored: %s", error)
        return []
    return [group for (group,) in _GROUP.iter_unpack(packed)]


def _user(entry: str, name: str) -> int:
    if name.isdecimal():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError as error:
        raise ConfigError(f"socket.tenants: {entry!r}: there is no user {name!r}") from error


def _group(entry: str, name: str) -> int:
    if name.isdecimal():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise ConfigError(f"socket.tenants: {entry!r}: there is no group {name!r}") from error
