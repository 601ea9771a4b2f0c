"""Access control: bearer tokens with roles.

=========== ===================================== ===================================
role        on loopback                           on other addresses
=========== ===================================== ===================================
health      all                                   all
client      all, unless a token is configured     a token, or ``http.open_requests``
read        all, unless a token is configured     a token
operate     a token, generated if none is set     a token
=========== ===================================== ===================================

A token of a later row includes the earlier ones. Where no token is needed, requests that a browser
sends for a web page are refused.
"""

import enum
import hmac
import secrets
from pathlib import Path
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from conductor.config import HttpConfig
from conductor.front.openai import error_response
from kvstore.process import privatefile
from kvstore.process.faults import Faults
from kvstore.process.smallfile import read_token
from kvstore.protocol.errors import ConfigError, reason

_TOKEN_CHARACTERS_MIN: Final = 16


class CallerRole(enum.IntEnum):
    """The role of a token; a higher one includes the lower ones."""

    CLIENT = 1
    READ = 2
    OPERATE = 3


class Auth:
    """The tokens of one Conductor.

    Attributes:
        made: the token generated at the start; empty if one is configured.
    """

    def __init__(self, config: HttpConfig, faults: Faults) -> None:
        """Read the tokens, and generate an operate token if none is configured.

        Raises:
            ConfigError: a file cannot be read, or a token is too short, is not ASCII, or is used
                for two roles.
        """
        self._faults = faults
        self._open = {CallerRole.CLIENT: config.open_requests or config.is_loopback}
        self._open[CallerRole.READ] = config.is_loopback
        self._open[CallerRole.OPERATE] = False
        self._tokens: dict[CallerRole, bytes] = {}
        for role, key, token, path in (
            (CallerRole.CLIENT, "client", config.client_token, config.client_token_file),
            (CallerRole.READ, "read", config.read_token, config.read_token_file),
            (CallerRole.OPERATE, "operate", config.operate_token, config.operate_token_file),
        ):
            text = token or read_token_file(f"http.{key}_token_file", path)
            if text:
                self._tokens[role] = checked_token(f"http.{key}_token", text)
                self._open[role] = False
        self.made = "" if CallerRole.OPERATE in self._tokens else secrets.token_urlsafe(24)
        self._where = ""
        if self.made:
            self._tokens[CallerRole.OPERATE] = self.made.encode()
            self._where = ": it is in the file that this Conductor named when it started"
        if len(set(self._tokens.values())) < len(self._tokens):
            raise ConfigError(
                "http.client_token, http.read_token and http.operate_token must differ"
            )

    def needs(self, role: CallerRole, handler: Handler) -> Handler:
        """Wrap a handler: clients without this role get 401 or 403."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            if self._open[role]:
                if "Origin" in request.headers:
                    self._faults.note("forbidden", f"a web page at {request.remote}")
                    what = "web pages may not use a Conductor that needs no token"
                    return error_response(403, "forbidden", what)
                return await handler(request)
            held = self._role(request)
            if held is None:
                self._faults.note("unauthorized", f"{request.remote} for {request.path[:200]!r}")
                what = f"send 'Authorization: Bearer TOKEN' with a known token{self._where}"
                response = error_response(401, "unauthorized", what)
                response.headers["WWW-Authenticate"] = "Bearer"
                return response
            if held < role:
                self._faults.note("forbidden", f"{request.remote} for {request.path[:200]!r}")
                what = f"this token is for {held.name.lower()}; {role.name.lower()} is needed"
                return error_response(403, "forbidden", what)
            return await handler(request)

        return guarded

    def _role(self, request: web.Request) -> CallerRole | None:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        shown = token.strip().encode(errors="surrogateescape")
        found = None
        for role, known in self._tokens.items():
            if hmac.compare_digest(shown, known) and kind.lower() == "bearer":
                found = role
        return found


class MadeToken:
    """The generated token, in a file that programs of the same user can find.

    Attributes:
        path: path of the file; None if there is none.
    """

    def __init__(self, token: str, port: int) -> None:
        """Write the file.

        Raises:
            ConfigError: no directory is writable.
        """
        self._token = token
        self.path: Path | None = None
        if token:
            try:
                self.path = privatefile.write(privatefile.token_name("conductor", port), token)
            except ConfigError as error:
                raise ConfigError(f"set http.operate_token_file: {error}") from error

    def remove(self) -> None:
        """Remove the file if it is still ours."""
        if self.path is not None:
            privatefile.remove(self.path, self._token)


def checked_token(key: str, text: str) -> bytes:
    """A token as it is sent.

    Raises:
        ConfigError: it is too short, or HTTP headers do not allow it; names ``key``.
    """
    if len(text) < _TOKEN_CHARACTERS_MIN:
        raise ConfigError(
            f"{key} has {len(text)} characters; {_TOKEN_CHARACTERS_MIN} or more are needed"
        )
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise ConfigError(f"{key} has characters that HTTP headers do not allow: ASCII only")
    return text.encode()


def read_token_file(key: str, path: str) -> str:
    """The token in a file; empty without one.

    Raises:
        ConfigError: it cannot be read, or is empty; names ``key``, the setting.
    """
    if not path:
        return ""
    try:
        text = read_token(Path(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}={path}: {reason(error)}") from error
    if not text:
        raise ConfigError(f"{key}={path}: the file is empty")
    return text
