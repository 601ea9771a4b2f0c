"""Who may read and who may operate: bearer tokens with a role each."""

import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, Literal

from fastapi import Request, Security
from fastapi.security import HTTPBearer

from kvstore.config import HttpConfig
from kvstore.errors import ConfigError
from kvstore.server.api import ApiError

Role = Literal["read", "operate"]

_TOKEN_CHARACTERS_MIN: Final = 16
_BEARER: Final = HTTPBearer(auto_error=False)


class Auth:
    """The tokens of one node; a token that operates may read too.

    With no token configured (which the configuration allows on a loopback address only) everybody
    on the machine may do both; requests that a browser sends for a web page may not operate.

    Args:
        config: tokens, or files that hold them.
    """

    def __init__(self, config: HttpConfig) -> None:
        """Read the tokens.

        Raises:
            ConfigError: a file cannot be read, or a token is too short, cannot be sent, or is that
                of both roles.
        """
        self._tokens: dict[Role, bytes] = {}
        for role, token, path in (
            ("read", config.read_token, config.read_token_file),
            ("operate", config.operate_token, config.operate_token_file),
        ):
            text = token or _read(f"http.{role}_token_file", path)
            if text and len(text) < _TOKEN_CHARACTERS_MIN:
                raise ConfigError(
                    f"http.{role}_token has {len(text)} characters; {_TOKEN_CHARACTERS_MIN} or more"
                    " are needed"
                )
            if text and not (text.isascii() and text.isprintable()):
                raise ConfigError(
                    f"http.{role}_token has characters that no HTTP header carries: ASCII only"
                )
            if text:
                self._tokens["read" if role == "read" else "operate"] = text.encode()
        if self._tokens.get("read", b"") == self._tokens.get("operate"):
            raise ConfigError("http.read_token and http.operate_token are the same: make two")

    def require(self, role: Role) -> Callable[[Request], None]:
        """A dependency that lets only ``role`` through: 401 without a known token, else 403."""

        def check(request: Request) -> None:
            if not self._tokens:
                if role == "operate" and "origin" in request.headers:
                    raise ApiError(
                        403, "forbidden", "a web page may not operate a node that has no tokens"
                    )
                return
            kind, _, token = request.headers.get("authorization", "").partition(" ")
            held = self._role(token.strip().encode()) if kind.lower() == "bearer" else None
            if held is None:
                raise ApiError(
                    401, "unauthorized", "send 'Authorization: Bearer TOKEN' with a known token"
                )
            if role == "operate" and held != "operate":
                raise ApiError(
                    403, "forbidden", "this token may read; operating needs http.operate_token"
                )

        def described(
            request: Request,
            _token: Annotated[object, Security(_BEARER)] = None,  # for OpenAPI
        ) -> None:
            check(request)

        return described if self._tokens else check

    def _role(self, token: bytes) -> Role | None:
        for role, known in self._tokens.items():
            if hmac.compare_digest(token, known):
                return role
        return None


def _read(key: str, path: str) -> str:
    if not path:
        return ""
    try:
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}={path}: {error}") from error
    if not text:
        raise ConfigError(f"{key}={path}: the file is empty")
    return text
