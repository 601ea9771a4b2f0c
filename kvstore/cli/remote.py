"""A client for a node's HTTP API."""

import http.client
import json
import ssl
import threading
import urllib.parse
from time import monotonic
from typing import Any, Final, TypeVar

from kvstore.cli.decoding import Reply
from kvstore.protocol.errors import InvalidArgument, KVStoreError, PeerUnreachable, TransferTimeout
from kvstore.server import client
from kvstore.server.answers import JobRow

T = TypeVar("T")

_TIMEOUT_S: Final = 30.0
_STRETCH_MAX: Final = 1000
_PAUSE: Final = threading.Event()
"""Never set; waiting for it is a pause."""


class RefusedRequest(KVStoreError):
    """The server at the address refused the request.

    Attributes:
        status: of the HTTP answer.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Remote:
    """One node.

    Args:
        url: its address: HTTP, or ``unix://`` and the path of its admin socket. If nothing listens
            on the default socket, the node's default HTTP port is used.
        token: a bearer token; empty = none. A Unix socket needs none.

    Attributes:
        given: the address that was given; ``url`` is the one that is used.
    """

    def __init__(self, url: str, token: str = "") -> None:
        """Check the arguments; send nothing yet.

        Raises:
            InvalidArgument: the address or the token is invalid.
        """
        if not client.is_address(url):
            message = (
                f"{url!r} is not an address of a node (such as {client.HERE_TCP}, or {client.HERE})"
            )
            raise InvalidArgument("--url", message)
        if not (token.isascii() and token.isprintable()):
            raise InvalidArgument("--token", "a token has printable ASCII characters only")
        self.given = url.rstrip("/")
        self.url, self._token = client.endpoint(self.given, token)

    def get(self, path: str, kind: type[T], **query: object) -> Reply[T]:
        """The answer to a GET; query values that are None are left out.

        Args:
            path: of the request.
            kind: type of the answer.
            query: parameters.
        """
        asked = urllib.parse.urlencode({k: v for k, v in query.items() if v is not None})
        return self.send("GET", f"{path}?{asked}" if asked else path, kind)

    def send(self, method: str, path: str, kind: type[T], body: object = None) -> Reply[T]:
        """The answer to any request; ``kind`` is its type.

        Raises:
            RefusedRequest: the node refused the request; the message is the node's.
            PeerUnreachable: nothing answers there, or not a node.
        """
        data = json.dumps(body).encode() if body is not None else None
        try:
            status, answer = client.send(
                self.url, method, path, body=data, token=self._token, timeout_s=_TIMEOUT_S
            )
            if status >= 300:
                raise _refusal(status, answer, self.url)
            return Reply(json.loads(answer), kind)
        except ssl.SSLCertVerificationError as error:  # a ValueError, too
            message = f"the certificate of {self.url} is not valid: {error}"
            raise PeerUnreachable(message) from error
        except (ValueError, http.client.HTTPException) as error:
            raise PeerUnreachable(_stranger(self.url)) from error
        except OSError as error:
            raise PeerUnreachable(self._silent(error)) from error

    def _silent(self, error: OSError) -> str:
        """The message for an address that cannot be connected to, or does not answer."""
        if isinstance(error, PermissionError):
            return (
                f"permission denied at {self.url}: run as the node's user or with sudo, or use"
                " --url http://HOST:PORT --token TOKEN"
            )
        first = f"{self.given} (no such socket) or " if self.given != self.url else ""
        why = error.strerror or error
        return f"no node answers at {first}{self.url} ({why}); is it running? --url selects another"

    def listed(
        self, name: str, path: str, kind: type[T], query: dict[str, object], limit: int
    ) -> Reply[T]:
        """Up to ``limit`` entries of a listing, in as many requests as needed.

        Args:
            name: name of the list in the answer.
            path: path of the listing.
            kind: type of the answer.
            query: query parameters besides ``cursor`` and ``limit``.
            limit: 1 or more.

        Returns:
            The last answer, with all entries.

        Raises:
            PeerUnreachable: what answers is not a node, or repeats a stretch of the listing.
        """
        found: list[Any] = []
        answer: dict[str, Any] = {"next": None}
        rows: list[Any] = []
        cursors: set[int | str] = set()
        while len(found) < limit:
            part = min(_STRETCH_MAX, limit - len(found))
            reply = self.get(path, kind, **query, cursor=answer["next"], limit=part)
            if not (isinstance(reply.raw, dict) and isinstance(reply.raw.get(name), list)):
                raise PeerUnreachable(_stranger(self.url))
            answer = {"next": None, **reply.raw}
            before, rows, cursor = rows, answer[name], answer["next"]
            found += rows
            if cursor is None:
                break
            goes_on = rows and rows != before
            if not goes_on or not isinstance(cursor, int | str) or cursor in cursors:
                raise PeerUnreachable(_stranger(self.url))  # it would be asked for ever
            cursors.add(cursor)
        return Reply({**answer, name: found}, kind)

    def finished(self, job: Reply[JobRow], wait_s: float) -> Reply[JobRow]:
        """Wait for a job; returns it when it has ended.

        Raises:
            TransferTimeout: it has not ended after ``wait_s`` seconds; it continues.
        """
        deadline = monotonic() + wait_s
        pause = 0.02
        while (row := job.value).state == "running":
            if monotonic() >= deadline:
                raise TransferTimeout(
                    f"job {row.job} still runs ({row.done} of {row.total});"
                    f" see kvstore jobs {row.job}"
                )
            _PAUSE.wait(pause)
            pause = min(1.0, pause * 1.5)
            job = self.get(f"/v1/jobs/{row.job}", JobRow)
        return job


def path_of(*parts: str) -> str:
    """A path made of quoted parts."""
    return "/v1/" + "/".join(urllib.parse.quote(part, safe="") for part in parts)


def _stranger(url: str) -> str:
    """The message for an address where something else than a node answers."""
    message = f"the server at {url} is not the HTTP API of a node"
    if url.startswith("unix://") and not url.endswith(".admin"):
        message += f": engines use that socket; give --url {url}.admin"
    return message


def _refusal(status: int, body: bytes, url: str) -> RefusedRequest:
    try:
        error = json.loads(body)["error"]
        if "field" not in error:
            return RefusedRequest(status, f"{error['message']}; is --url the address of a node?")
        message, field = str(error["message"]), str(error["field"])
    except (ValueError, KeyError, TypeError):
        message, field = body[:200].decode(errors="replace"), ""
    parts = urllib.parse.urlsplit(url)
    if status == http.client.NOT_FOUND and not field and parts.scheme != "unix" and parts.path:
        message += f"; a node's address has no path: give --url {parts.scheme}://{parts.netloc}"
    if status == 401:
        message += "; give --token, KVSTORE_TOKEN or KVSTORE_TOKEN_FILE, or leave --url out"
    return RefusedRequest(status, f"{field}: {message}" if field else message)
