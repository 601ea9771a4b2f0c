"""Addresses in the configuration: ``host:port``, ``[::1]:port``."""

import ipaddress
from typing import NamedTuple


class Address(NamedTuple):
    """A host and a TCP port.

    Attributes:
        host: a name or an address, without brackets.
        port: 0 to 65,535; 0 = any free one.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_address(text: str) -> Address:
    """Parse ``host:port``; an IPv6 address is in brackets.

    Raises:
        ValueError: it is none; the message says what it must be.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    plain = host[1:-1] if bracketed else host
    is_number = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65_535
    is_host = plain.isascii() and plain.isprintable() and not set(plain) & set(" []/@*=,")
    if not bracketed:  # the parts of a name, as DNS and TLS take them
        is_host = is_host and all(0 < len(part) < 64 for part in plain.removesuffix(".").split("."))
    if not (colon and plain and is_host and is_number and bracketed == (":" in plain)):
        raise ValueError(f"{text!r} is not host:port, such as 10.0.0.2:7400 or [fd00::2]:7400")
    return Address(plain, int(port))


def read_url(text: str) -> Address:
    """The address in ``http://host:port`` or ``https://host:port``.

    Raises:
        ValueError: it is none, or nobody can connect to it. The message does not repeat it, because
            it could have a password.
    """
    scheme, separator, where = text.partition("://")
    try:
        address = read_address(where)
    except ValueError:
        address = Address("", 0)
    if not separator or scheme not in ("http", "https") or not address.port:
        raise ValueError("must be http://host:port or https://host:port, and nothing else")
    if is_wildcard(address.host):
        raise ValueError("stands for all addresses: name the one that others reach")
    return address


def is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses of this machine, so that no client can connect to it."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an address; False for names but ``localhost``."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, whatever it begins with
        return False
