"""etcd and Redis as a node's configuration names them."""

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvstore.cluster.store import StoreKind, StoreSettings
from kvstore.config import ServerConfig
from kvstore.config.stores import StoreConfig
from kvstore.errors import ConfigError, reason

PACKAGES: Final[dict[str, str]] = {"etcd": "aetcd", "redis": "redis"}
"""The package of each client; the extra that installs it has the name of the store."""
_FILES: Final = ("login", "authority", "certificate", "key")


def store_settings(config: ServerConfig, kind: StoreKind) -> StoreSettings:
    """Where a store of the configuration is, and how to be let in."""
    section: StoreConfig = getattr(config, kind)
    return StoreSettings(
        kind=kind, cluster=config.cluster.name, endpoints=section.endpoints, login=section.login,
        authority=section.authority, certificate=section.certificate, key=section.key,
    )  # fmt: skip


def check_stores(config: ServerConfig) -> None:
    """Check that the stores which the configuration uses can be used by this process.

    Raises:
        ConfigError: a package is missing, or a file cannot be read; says what to do.
    """
    for section, user in config.cluster.stores.items():
        if find_spec(PACKAGES[section]) is None:
            raise ConfigError(
                f"{user} needs the package {PACKAGES[section]}:"
                f" pip install 'kvstore-server[{section}]'"
            )
        for field in _FILES:
            path = getattr(getattr(config, section), field)
            if path:
                _check_readable(f"{section}.{field}", path, is_login=field == "login")


def _check_readable(key: str, path: str, *, is_login: bool) -> None:
    try:
        text = Path(path).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={path}: {reason(error)}") from None
    user, colon, _ = text.strip().partition(":")
    if is_login and (not user or not colon or "\n" in text.strip()):
        raise ConfigError(f"{key}={path}: it must have one line, user:password")
