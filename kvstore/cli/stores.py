"""Checks of ``kvstore doctor``: do the etcd and the Redis of a node answer, and may it use them?"""

import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from kvstore.cluster.access import StoreServers, tls_context
from kvstore.cluster.configured import check_stores, store_servers
from kvstore.cluster.stores import StoreKind
from kvstore.config import ServerConfig
from kvstore.config.addresses import is_loopback, read_address
from kvstore.config.machine import Check
from kvstore.protocol.errors import ConfigError, reason
from kvstore.server.answers import ConfigValue

_TIMEOUT_S: Final = 3.0
"""Of each connection."""
_SECTIONS: Final = ("cluster", "etcd", "redis")
_GIVE_CONFIG: Final = "run doctor on the node's machine as its user, with --config"
_AWAY: Final = "does it run, and does a firewall let this machine reach it? The node serves alone"


def store_checks(config: ServerConfig) -> Iterator[Check]:
    """Check the sections ``etcd`` and ``redis``, as far as ``cluster`` uses them.

    It looks at packages and files, and connects to each server; it sends no login.

    Args:
        config: of the node.
    """
    cluster = config.cluster
    if not cluster.stores:
        return
    try:
        check_stores(config)
    except ConfigError as error:
        yield Check("stores", "fail", str(error), "correct it; the node does not start")
        return
    for kind in cluster.stores:
        yield from _servers(kind, store_servers(getattr(config, kind)))
    advertised = cluster.advertise or cluster.listen
    servers = [
        one for kind in cluster.stores for one in store_servers(getattr(config, kind)).endpoints
    ]
    if is_loopback(read_address(advertised).host) and not all(
        is_loopback(read_address(one).host) for one in servers
    ):
        advice = "set cluster.advertise to an address that the other nodes reach"
        yield Check(
            "cluster.advertise", "warn", f"{advertised}: other machines cannot connect", advice
        )


def running_store_checks(settings: Sequence[ConfigValue] | None) -> Iterator[Check]:
    """Check the stores that a running node uses, as far as it tells them.

    Args:
        settings: rows of ``/v1/config``; None = the node does not tell them.
    """
    config = _reported_config(settings)
    if config is None:
        found = "not checked: the node does not say which stores it uses"
        yield Check("stores", "warn", found, _GIVE_CONFIG)
        return
    try:
        check_stores(config)
    except ConfigError as error:  # of this user, or this machine: the node runs with it
        yield Check("stores", "warn", f"not checked: {error}", _GIVE_CONFIG)
        return
    yield from store_checks(config)


def _reported_config(settings: Sequence[ConfigValue] | None) -> ServerConfig | None:
    """The sections that stores are in; None = they cannot be read."""
    tree: dict[str, dict[str, Any]] = {}
    try:
        for one in settings or ():
            section, _, name = one.key.partition(".")
            if section in _SECTIONS:
                tree.setdefault(section, {})[name] = one.value
        return msgspec.convert(tree, ServerConfig) if tree else None
    except msgspec.ValidationError:  # another version
        return None


def _servers(section: StoreKind, store: StoreServers) -> Iterator[Check]:
    tls = tls_context(store)
    for endpoint in store.endpoints:
        name = f"{section} {endpoint}"
        try:
            with socket.create_connection(read_address(endpoint), _TIMEOUT_S) as connection:
                if tls is not None:
                    host = read_address(endpoint).host
                    tls.wrap_socket(connection, server_hostname=host).close()
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", "") or reason(error)
            advice = f"its certificate must be of {section}.authority and name this host"
            yield Check(name, "warn", why, advice)
        except OSError as error:
            yield Check(name, "warn", reason(error), _AWAY)
        else:
            yield Check(name, "ok", "it accepts connections" + (" over TLS" if tls else ""))
