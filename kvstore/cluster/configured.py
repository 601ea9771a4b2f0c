"""The etcd and Redis servers in the configuration of a node or a Conductor."""

from importlib.util import find_spec
from typing import Final

from kvstore.cluster.access import StoreServers, read_login, tls_context
from kvstore.cluster.stores import StoreKind
from kvstore.config import ServerConfig
from kvstore.config.stores import StoreConfig
from kvstore.protocol.errors import ConfigError, InvalidArgument

PACKAGES: Final = {"etcd": "aetcd", "redis": "redis"}
"""The package of each client; the extra that installs it has the name of the store."""


def store_servers(section: StoreConfig) -> StoreServers:
    """The servers of a section of the configuration, and the credentials for them."""
    return StoreServers(
        section.endpoints, section.login, section.authority, section.certificate, section.key
    )


def check_stores(config: ServerConfig) -> None:
    """Check that the stores which a node's configuration uses can be used by this process.

    Raises:
        ConfigError: a package is missing, or a file cannot be used; says what to do.
    """
    for kind, user in config.cluster.stores.items():
        check_store(kind, getattr(config, kind), user)


def check_store(kind: StoreKind, section: StoreConfig, user: str) -> None:
    """Check that a store can be used by this process.

    Args:
        kind: the name of the section.
        section: the section.
        user: the setting that says that it is used.

    Raises:
        ConfigError: a package is missing, or a file cannot be used; says what to do.
    """
    if find_spec(PACKAGES[kind]) is None:
        raise ConfigError(
            f"{user} needs the package {PACKAGES[kind]}: pip install '.[{kind}]' in the clone"
        )
    servers = store_servers(section)
    try:
        read_login(servers)
        tls_context(servers)
    except InvalidArgument as error:
        raise ConfigError(f"{kind}.{error}") from None
