"""The registry of a prefill instance: its ranks register here, decode engines ask. HTTP and JSON.

``PUT /v1/ranks`` registers a rank for ``lease_s`` seconds, ``GET /v1/ranks`` lists those whose
lease runs. The secret of the handoffs signs requests and answers (header ``Kvstore-Proof``); it is
not sent. A registration counts up, so that an old one cannot be sent again.
"""

import contextlib
import hmac
import http.client
import os
import socket
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from kvstore.errors import InvalidArgument, PeerUnreachable, ProtocolError, reason
from kvstore.handoff.greeting import proof_of
from kvstore.handoff.ranks import RANKS_MAX
from kvstore.handoff.shape import PoolShape

LEASE_S: Final = 10.0
LEASE_S_MAX: Final = 3_600
_BODY_BYTES_MAX: Final = 1 << 20
_WAIT_S: Final = 2.0
"""For each step of a connection."""
_REQUEST_S = 5.0
"""For a whole request and its answer; then the connection is cut."""
_REQUESTS_MAX: Final = 32
_HEADER: Final = "Kvstore-Proof"
_PATH: Final = "/v1/ranks"


class RankRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of a prefill instance.

    Attributes:
        rank: its number.
        address: ``host:port`` of its manager.
        boot: hex of its boot id.
        count: higher in each registration of a boot.
        layers: first layer, and the one after the last.
        heads: first KV head, and the one after the last.
        shape: of its pool.
        space: hex of what both sides must have in common.
        transports: how KV can be pushed.
        protocol: version.
        lease_s: the registration ends after so many seconds; 0 = now.
        ranks: how many ranks the instance has, of each data-parallel rank.
        data_rank: which data-parallel rank this one belongs to.
        data_ranks: how many there are.
    """

    rank: int
    address: str
    boot: str
    count: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    shape: PoolShape
    space: str
    transports: list[str]
    protocol: int
    lease_s: float
    ranks: int = 1
    data_rank: int = 0
    data_ranks: int = 1

    @property
    def is_possible(self) -> bool:
        """Whether its numbers can be."""
        ranks = 0 <= self.rank < self.ranks <= RANKS_MAX
        return (
            ranks
            and 0 <= self.data_rank < self.data_ranks <= RANKS_MAX
            and 0 <= self.lease_s <= LEASE_S_MAX
        )


_ranks: Final = msgspec.json.Decoder(list[RankRecord])
_record: Final = msgspec.json.Decoder(RankRecord)


class HandoffRegistry:
    """The server; it runs in threads of its own until :meth:`close`.

    Args:
        host: address to listen at.
        port: 0 = any free one.
        secret: of the handoffs.

    Attributes:
        url: what ranks and decode engines are given.
    """

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._ranks: dict[tuple[int, int], tuple[RankRecord, float]] = {}
        self._places = threading.BoundedSemaphore(_REQUESTS_MAX)
        registry = self

        class RankHandler(BaseHTTPRequestHandler):
            timeout = _WAIT_S

            def do_GET(self) -> None:
                registry.answer(self, b"")

            def do_PUT(self) -> None:
                size = self.headers.get("Content-Length", "")
                if not size.isdecimal() or int(size) > _BODY_BYTES_MAX:
                    self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
                    return
                registry.answer(self, self.rfile.read(int(size)))

            def log_message(self, format: str, *args: Any) -> None:
                """No line for each request."""

        class RankServer(ThreadingHTTPServer):
            daemon_threads = False

            def process_request(self, request: Any, client_address: Any) -> None:
                if registry._places.acquire(blocking=False):
                    super().process_request(request, client_address)
                else:
                    self.shutdown_request(request)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                late = threading.Timer(_REQUEST_S, _cut, (request,))
                late.daemon = True
                late.start()
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    late.cancel()
                    late.join()
                    registry._places.release()

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A connection that broke is no error of ours."""

        try:
            self._server = RankServer((host, port), RankHandler)
        except OSError as error:
            raise InvalidArgument("port", f"cannot listen: {reason(error)}") from error
        bound, at = self._server.server_address[:2]
        shown = f"[{bound!s}]" if ":" in str(bound) else str(bound)
        self.url = f"http://{shown}:{at}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="kvstore-handoff-registry",
            daemon=True,
        )  # fmt: skip
        self._thread.start()

    def close(self) -> None:
        """Stop answering, and free the port."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        """Answer one request."""
        path, _, nonce = request.path.partition("?")
        proof = request.headers.get(_HEADER, "")
        method = request.command or ""
        wanted = proof_of(self._secret, b"ask", method.encode(), request.path.encode(), body).hex()
        if path != _PATH or len(nonce) > 64:
            status, said = HTTPStatus.NOT_FOUND, b"{}"
        elif not hmac.compare_digest(proof.encode(), wanted.encode()):
            status, said = HTTPStatus.UNAUTHORIZED, b"{}"
        elif method == "PUT":
            status, said = self._register(body), b"{}"
        else:
            status, said = HTTPStatus.OK, msgspec.json.encode(self._listed())
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(said)))
        if status != HTTPStatus.UNAUTHORIZED:
            request.send_header(_HEADER, _answer_proof(self._secret, nonce, said))
        request.end_headers()
        request.wfile.write(said)

    def _register(self, body: bytes) -> HTTPStatus:
        try:
            record = _record.decode(body)
        except (msgspec.MsgspecError, InvalidArgument):
            return HTTPStatus.BAD_REQUEST
        if not record.is_possible:
            return HTTPStatus.BAD_REQUEST
        key = (record.data_rank, record.rank)
        with self._lock:
            before = self._ranks.get(key)
            if before is None and len(self._ranks) >= RANKS_MAX:
                return HTTPStatus.INSUFFICIENT_STORAGE
            if before and before[0].boot == record.boot and record.count <= before[0].count:
                return HTTPStatus.CONFLICT
            self._ranks[key] = (record, time.monotonic() + record.lease_s)
        return HTTPStatus.OK

    def _listed(self) -> list[RankRecord]:
        with self._lock:
            now = time.monotonic()
            return [record for record, until in self._ranks.values() if until > now]


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended by itself
        connection.shutdown(socket.SHUT_RDWR)


def _answer_proof(secret: bytes, nonce: str, body: bytes) -> str:
    return proof_of(secret, b"answer", nonce.encode(), body).hex()


class RegistryClient:
    """Asks one registry; each call waits two seconds at most for each step of the connection.

    Args:
        url: of the registry.
        secret: of the handoffs.

    Raises:
        InvalidArgument: it is no URL of a registry.
    """

    def __init__(self, url: str, secret: bytes) -> None:
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
        except ValueError:
            scheme, host, port = "", None, None
        if scheme != "http" or host is None or port is None:
            raise InvalidArgument("registry", f"{url!r} is not http://host:port")
        self._host, self._port = host, port
        self._secret = secret

    def register(self, record: RankRecord) -> None:
        """Register a rank, or renew its lease.

        Raises:
            PeerUnreachable: the registry does not answer.
            ProtocolError: it refuses, or does not know the secret.
        """
        self._ask("PUT", msgspec.json.encode(record))

    def ranks(self) -> list[RankRecord]:
        """The ranks whose leases run; raises as :meth:`register`."""
        try:
            return _ranks.decode(self._ask("GET", b""))
        except (msgspec.MsgspecError, InvalidArgument) as error:
            raise ProtocolError(f"the registry's answer cannot be read: {error}") from error

    def _ask(self, method: str, body: bytes) -> bytes:
        nonce = os.urandom(16).hex()
        path = f"{_PATH}?{nonce}"
        proof = proof_of(self._secret, b"ask", method.encode(), path.encode(), body).hex()
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_WAIT_S)
        try:
            with contextlib.closing(connection):
                connection.request(method, path, body or None, {_HEADER: proof})
                answer = connection.getresponse()
                said = answer.read(_BODY_BYTES_MAX)
                told = answer.getheader(_HEADER) or ""
        except (OSError, http.client.HTTPException) as error:
            where = f"{self._host}:{self._port}"
            raise PeerUnreachable(f"the registry at {where}: {reason(error)}") from error
        if answer.status != HTTPStatus.OK:
            raise ProtocolError(f"the registry answers {answer.status}")
        if not hmac.compare_digest(
            told.encode(), _answer_proof(self._secret, nonce, said).encode()
        ):
            raise ProtocolError("the registry does not know the secret")
        return said
