"""A node's HTTP API as the command uses it."""

import http.client
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from time import monotonic
from typing import Any, Final

from kvstore.errors import InvalidArgument, KVStoreError, PeerUnreachable, TransferTimeout

_TIMEOUT_S: Final = 30.0
_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Nodes are asked as they are: a proxy of the environment would not reach loopback."""
_STRETCH_MAX: Final = 1000
_PAUSE: Final = threading.Event()
"""Never set: waiting for it is a pause."""


class RemoteError(KVStoreError):
    """The node refused; the message is its own."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.remote_code = code


class Remote:
    """One node.

    Args:
        url: its HTTP address.
        token: a bearer token; empty = none.
    """

    def __init__(self, url: str, token: str = "") -> None:
        """Ask nothing yet.

        Raises:
            InvalidArgument: the address or the token cannot be one.
        """
        if not _is_address(url):
            message = f"{url!r} is no address of a node (such as http://127.0.0.1:7780)"
            raise InvalidArgument("--url", message)
        if not (token.isascii() and token.isprintable()):
            raise InvalidArgument("--token", "it has characters that no token has")
        self.url = url.rstrip("/")
        self._token = token

    def get(self, path: str, **query: object) -> Any:
        """The answer to a GET; query values that are None are left out."""
        asked = urllib.parse.urlencode({k: v for k, v in query.items() if v is not None})
        return self.send("GET", f"{path}?{asked}" if asked else path)

    def send(self, method: str, path: str, body: object = None) -> Any:
        """The answer to any request.

        Raises:
            RemoteError: the node refused.
            PeerUnreachable: nobody answers there, or somebody who is no node.
        """
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with _DIRECT.open(request, timeout=_TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error.code, error.read()) from error
        except (ValueError, http.client.HTTPException) as error:
            message = f"what answers at {self.url} is no node ({error})"
            raise PeerUnreachable(message) from error
        except OSError as error:
            reason = getattr(error, "reason", error)
            message = f"no node answers at {self.url} ({reason}); is it running?"
            raise PeerUnreachable(message) from error

    def listed(self, name: str, path: str, query: dict[str, object], limit: int) -> dict[str, Any]:
        """Up to ``limit`` entries of a listing, over as many stretches as it takes.

        Args:
            name: what the answer calls them.
            path: of the listing.
            query: what is asked for beside ``cursor`` and ``limit``.
            limit: 1 or more.

        Returns:
            ``name``: the entries, and ``next``: the cursor of the next one, None when that was all.
        """
        found: list[Any] = []
        cursor: str | None = None
        while len(found) < limit:
            part = min(_STRETCH_MAX, limit - len(found))
            answer = self.get(path, **query, cursor=cursor, limit=part)
            found += answer[name]
            cursor = answer["next"]
            if cursor is None:
                break
        return {name: found, "next": cursor}

    def finished(self, job: dict[str, Any], wait_s: float) -> dict[str, Any]:
        """A job once it has ended.

        Raises:
            TransferTimeout: it has not ended after ``wait_s`` seconds; it goes on.
        """
        deadline = monotonic() + wait_s
        pause = 0.02
        while job["state"] == "running":
            if monotonic() >= deadline:
                raise TransferTimeout(
                    f"job {job['job']} still runs ({job['done']} of {job['total']});"
                    f" see kvstore jobs {job['job']}"
                )
            _PAUSE.wait(pause)
            pause = min(1.0, pause * 1.5)
            job = self.get(f"/v1/jobs/{job['job']}")
        return job


def path_of(*parts: str) -> str:
    """The path of a thing whose names may hold any characters."""
    return "/v1/" + "/".join(urllib.parse.quote(part, safe="") for part in parts)


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    named = parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
    return named and url.isascii() and url.isprintable() and " " not in url


def _refusal(status: int, body: bytes) -> RemoteError:
    try:
        error = json.loads(body)["error"]
        code, message = str(error["code"]), str(error["message"])
        field = str(error["field"])
    except (ValueError, KeyError, TypeError):
        code, message, field = "http", body[:200].decode(errors="replace"), ""
    if status == 401:
        message += "; give --token or KVSTORE_TOKEN"
    return RemoteError(status, code, f"{field}: {message}" if field else message)
