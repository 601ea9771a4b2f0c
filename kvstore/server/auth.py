"""The tokens of a node: configured ones, or one generated at each start."""

import secrets
from pathlib import Path
from typing import Final, Literal

from kvstore.config import HttpConfig
from kvstore.process import privatefile
from kvstore.process.smallfile import read_token
from kvstore.protocol.errors import ConfigError, reason

Role = Literal["read", "operate"]

_TOKEN_CHARACTERS_MIN: Final = 16


def tokens_of(config: HttpConfig) -> dict[Role, str]:
    """The configured tokens; empty if the node must generate one.

    Raises:
        ConfigError: a file cannot be read, or a token is too short, is not ASCII, or is used for
            both roles.
    """
    tokens: dict[Role, str] = {}
    given: tuple[tuple[Role, str, str], ...] = (
        ("read", config.read_token, config.read_token_file),
        ("operate", config.operate_token, config.operate_token_file),
    )
    for role, token, path in given:
        key = f"http.{role}_token" if token or not path else f"http.{role}_token_file={path}"
        text = token or _read(key, path)
        if text and len(text) < _TOKEN_CHARACTERS_MIN:
            raise ConfigError(
                f"{key} has {len(text)} characters; {_TOKEN_CHARACTERS_MIN} or more are needed"
            )
        if text and not (text.isascii() and text.isprintable()):
            raise ConfigError(f"{key} has characters that HTTP headers do not allow: ASCII only")
        if text:
            tokens[role] = text
    if tokens and tokens.get("read") == tokens.get("operate"):
        raise ConfigError("http.read_token and http.operate_token are equal: make them different")
    return tokens


def token_file(socket: Path) -> Path:
    """Path of the generated token of a node with this admin socket."""
    return socket.with_name(f"{socket.name}.token")


def make_token(path: Path) -> str:
    """Generate a token, and write it to a file that only this user may read.

    Raises:
        ConfigError: the file cannot be written.
    """
    token = secrets.token_urlsafe(32)
    try:
        privatefile.write_at(path, token + "\n")
    except OSError as error:
        raise ConfigError(
            f"the token of this node cannot be written to {path}: {reason(error)}"
        ) from error
    return token


def _read(key: str, path: str) -> str:
    if not path:
        return ""
    try:
        text = read_token(Path(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {reason(error)}") from error
    if not text:
        raise ConfigError(f"{key}: the file is empty")
    return text
