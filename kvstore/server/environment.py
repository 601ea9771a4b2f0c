"""Environment variables of our commands, and of processes that we start."""

import os
import sys
from pathlib import Path

from kvstore.config import ServerConfig
from kvstore.process.privatefile import token_for
from kvstore.process.smallfile import read_token
from kvstore.protocol.errors import ConfigError, reason


def admin_socket(config: ServerConfig = ServerConfig()) -> Path:  # noqa: B008 - it is frozen
    """The Unix socket of a node's admin API; by default that of a node with default settings."""
    return Path(config.http.socket_path or f"{config.socket.path}.admin")


def cli_defaults() -> tuple[str, str]:
    """The default address and token of the ``kvstore`` command.

    Raises:
        ConfigError: KVSTORE_TOKEN_FILE cannot be read.
    """
    token, path = os.environ.get("KVSTORE_TOKEN", ""), os.environ.get("KVSTORE_TOKEN_FILE", "")
    if path and not token:
        try:
            token = read_token(Path(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"KVSTORE_TOKEN_FILE={path}: {reason(error)}") from error
    return os.environ.get("KVSTORE_URL", f"unix://{admin_socket()}"), token


def child_environment() -> dict[str, str]:
    """The environment of a child process, so that it imports the same code as this one."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def conductor_token(url: str) -> str:
    """The token that a Conductor of this user at ``url`` has made; empty if there is none."""
    return token_for("conductor", url)
