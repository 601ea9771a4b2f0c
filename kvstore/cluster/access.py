"""The addresses of a store's servers, and the files for TLS and login.

The contents of the files never appear in an error, a log line or a ``repr``.
"""

import ssl
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvstore.config.addresses import Address, read_address
from kvstore.protocol.errors import InvalidArgument, reason

LOGIN_BYTES_MAX: Final = 4 << 10
PEM_BYTES_MAX: Final = 1 << 20


class StoreServers(msgspec.Struct, frozen=True):
    """The servers of etcd or Redis, as a section of the configuration has them.

    Attributes:
        endpoints: ``host:port`` of each; tried one after another.
        login: file with one line ``user:password``; empty = no login.
        authority: PEM file with the authority that has signed the servers' certificates; empty =
            no TLS. The name or address of an endpoint must be in its certificate.
        certificate: PEM file with a certificate to show to them; empty = none.
        key: PEM file with its private key, not encrypted.
    """

    endpoints: tuple[str, ...]
    login: str = ""
    authority: str = ""
    certificate: str = ""
    key: str = ""


class Login(NamedTuple):
    """A user and a password."""

    user: str
    password: str

    def __repr__(self) -> str:
        return "Login(…)"


class EndpointTurns:
    """The endpoints of a store, one after another."""

    def __init__(self, servers: StoreServers) -> None:
        assert servers.endpoints
        self._addresses = [read_address(text) for text in servers.endpoints]
        self._at = -1

    def next(self) -> Address:
        """The next endpoint; after the last one the first one."""
        self._at = (self._at + 1) % len(self._addresses)
        return self._addresses[self._at]


def read_login(servers: StoreServers) -> Login | None:
    """Read the login; None = there is none.

    Raises:
        InvalidArgument: ``login``: the file cannot be read, or is not ``user:password``.
    """
    if not servers.login:
        return None
    text = _read("login", servers.login, LOGIN_BYTES_MAX)
    try:
        user, colon, password = text.decode().removesuffix("\n").removesuffix("\r").partition(":")
    except UnicodeDecodeError:
        user = colon = password = ""
    if not (user and colon and password) or not (user + password).isprintable():
        raise InvalidArgument("login", f"{servers.login} is not one line user:password")
    return Login(user, password)


def read_pem(servers: StoreServers) -> tuple[bytes, bytes | None, bytes | None] | None:
    """The authority, the certificate and its key in PEM; None = no TLS.

    Raises:
        InvalidArgument: a file cannot be read; ``field`` is its attribute.
    """
    if not servers.authority:
        return None
    authority = _read("authority", servers.authority, PEM_BYTES_MAX)
    if not servers.certificate:
        return authority, None, None
    certificate = _read("certificate", servers.certificate, PEM_BYTES_MAX)
    return authority, certificate, _read("key", servers.key, PEM_BYTES_MAX)


def tls_context(servers: StoreServers) -> ssl.SSLContext | None:
    """The context for connections to the servers; None = no TLS.

    Raises:
        InvalidArgument: a file cannot be read or used; ``field`` is its attribute.
    """
    if read_pem(servers) is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(servers.authority)
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            "authority", f"{servers.authority} is not a certificate in PEM"
        ) from error
    try:
        if servers.certificate:
            # Without a password, an encrypted key would make OpenSSL ask at the terminal.
            context.load_cert_chain(servers.certificate, servers.key, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            "certificate",
            f"{servers.certificate} and {servers.key} are not a certificate and its unencrypted"
            " key in PEM",
        ) from error
    return context


def _read(field: str, path: str, bytes_max: int) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(bytes_max)
    except (OSError, ValueError) as error:
        raise InvalidArgument(field, f"{path}: {reason(error)}") from error
