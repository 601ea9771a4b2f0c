"""The tokens of a node: those that it was configured with, or one that is made at each start."""

import secrets
from pathlib import Path
from typing import Final, Literal

from kvstore.config import HttpConfig
from kvstore.errors import ConfigError, reason
from kvstore.process import privatefile

Role = Literal["read", "operate"]

_TOKEN_CHARACTERS_MIN: Final = 16


def tokens_of(config: HttpConfig) -> dict[Role, str]:
    """The configured tokens; none when the node is to make one.

    Raises:
        ConfigError: a file cannot be read, or a token is too short, cannot be sent, or is that of
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
            raise ConfigError(f"{key} has characters that no HTTP header carries: ASCII only")
        if text:
            tokens[role] = text
    if tokens and tokens.get("read") == tokens.get("operate"):
        raise ConfigError("http.read_token and http.operate_token are the same: make two")
    return tokens


def token_file(socket: Path) -> Path:
    """Where a node with that admin socket keeps the token that it made."""
    return socket.with_name(f"{socket.name}.token")


def make_token(path: Path) -> str:
    """A new token, and a file for it that only this user may read.

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
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {reason(error)}") from error
    if not text:
        raise ConfigError(f"{key}: the file is empty")
    return text
