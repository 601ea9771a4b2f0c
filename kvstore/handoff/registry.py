"""The registry of a prefill instance: its ranks register here, decode engines ask. HTTP and JSON.

``PUT /v1/ranks`` registers a rank for ``lease_s`` seconds, ``GET /v1/ranks`` lists those with a
current lease. The secret of the handoffs signs requests and answers (header ``Kvstore-Proof``); it
is not sent. Registrations are numbered, so that an old one cannot be replayed; nor can one of a
boot that another one has replaced, while the lease of the new one is current.
"""

import contextlib
import hmac
import http.client
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from kvstore.handoff.crowd import BACKLOG, Crowd
from kvstore.handoff.greeting import proof_of
from kvstore.handoff.messages import UNREADABLE
from kvstore.handoff.ranks import RANKS_MAX
from kvstore.handoff.shape import PoolShape
from kvstore.process.faults import Faults
from kvstore.process.tls import CertificateFiles
from kvstore.protocol.errors import (
    InvalidArgument,
    PeerUnreachable,
    ProtocolError,
    TransferError,
    reason,
)
from kvstore.transport.streams import dial, host_and_port

LEASE_S: Final = 10.0
LEASE_S_MAX: Final = 3_600.0
NUMBER_MAX: Final = 1 << 16
"""Of layers, and of heads."""
TRANSPORTS_MAX: Final = 16
_RECORD_BYTES_MAX: Final = 8 << 10
"""Of a registration; with 16 state buffers it has 4 KiB."""
_LIST_BYTES_MAX: Final = RANKS_MAX * 2 * _RECORD_BYTES_MAX
"""Of all; fields that a rank has left out are in it."""
_WAIT_S: Final = 2.0
"""For each step of a connection."""
_REQUEST_S = 5.0
"""For a whole request and its answer; then the connection is cut."""
_REQUESTS_MAX = 64
_BOOTS_KEPT: Final = 16
"""Boots of a rank that were replaced and are remembered."""
_HEADER: Final = "Kvstore-Proof"
_PATH: Final = "/v1/ranks"
_LOG: Final = logging.getLogger(__name__)


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
        space: hex of the identity that both sides must share.
        transports: through which KV can be pushed.
        protocol: version.
        lease_s: duration of the registration in seconds; 0 = it ends now.
        ranks: number of ranks of the instance, for each data-parallel rank.
        data_rank: which data-parallel rank this one belongs to.
        data_ranks: number of data-parallel ranks.
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

    def check(self) -> None:
        """Refuse an invalid record.

        Raises:
            InvalidArgument: with the field that is wrong.
        """
        host_and_port(self.address)
        for field, text, sizes in (("boot", self.boot, range(16, 17)), ("space", self.space,
                                                                       range(65))):  # fmt: skip
            try:
                size = len(bytes.fromhex(text))
            except ValueError as error:
                raise InvalidArgument(field, str(error)) from error
            if size not in sizes:
                raise InvalidArgument(field, f"{size} bytes")
        for field, (first, stop) in (("layers", self.layers), ("heads", self.heads)):
            if not 0 <= first < stop < NUMBER_MAX:
                raise InvalidArgument(field, f"{first} to {stop}")
        for field, number, of in (("rank", self.rank, self.ranks),
                                  ("data_rank", self.data_rank, self.data_ranks)):  # fmt: skip
            if not 0 <= number < of <= RANKS_MAX:
                raise InvalidArgument(field, f"{number} of {of}, at most {RANKS_MAX}")
        if not 0 <= self.lease_s <= LEASE_S_MAX:
            raise InvalidArgument("lease_s", f"{self.lease_s} is not 0 to {LEASE_S_MAX}")
        if self.count < 0 or self.protocol < 1:
            raise InvalidArgument("count", f"{self.count} of protocol {self.protocol}")
        if not 0 < len(self.transports) <= TRANSPORTS_MAX:
            raise InvalidArgument("transports", f"{len(self.transports)} of them")


class RankTable:
    """The registrations of an instance. Pure."""

    def __init__(self) -> None:
        #: (data-parallel rank, rank) → registration, with the end of its lease.
        self._ranks: dict[tuple[int, int], tuple[RankRecord, int]] = {}
        self._former: dict[tuple[int, int], list[str]] = {}  # boots that were replaced

    def register(self, record: RankRecord, now_ns: int) -> str:
        """Store a checked registration; returns why it is refused, empty = it is not."""
        key = (record.data_rank, record.rank)
        before = self._ranks.get(key)
        if before is None and len(self._ranks) >= RANKS_MAX:
            self._forget(now_ns)
        if before is None and len(self._ranks) >= RANKS_MAX:
            return f"rank: {RANKS_MAX} are registered"
        former = self._former.setdefault(key, [])
        if before and before[0].boot == record.boot and record.count <= before[0].count:
            return "count: it has come before"
        if before and before[0].boot != record.boot:
            if record.boot in former and before[1] > now_ns:
                return "boot: another one has replaced it"
            former.append(before[0].boot)
            del former[:-_BOOTS_KEPT]
        self._ranks[key] = (record, now_ns + int(record.lease_s * 1e9))
        return ""

    def _forget(self, now_ns: int) -> None:
        """Remove registrations whose leases have ended, and the boots they replaced."""
        self._ranks = {key: one for key, one in self._ranks.items() if one[1] > now_ns}
        self._former = {key: boots for key, boots in self._former.items() if key in self._ranks}

    def listed(self, now_ns: int) -> list[RankRecord]:
        """Those whose leases run."""
        return [record for record, until_ns in self._ranks.values() if until_ns > now_ns]


_ranks: Final = msgspec.json.Decoder(list[RankRecord])
_record: Final = msgspec.json.Decoder(RankRecord)


class HandoffRegistry:
    """The server; it runs in threads of its own until :meth:`close`.

    Args:
        host: address to listen at.
        port: 0 = any free one.
        secret: of the handoffs.
        certificates: shown to clients, which must show ones of the same authority; None = no TLS.

    Raises:
        InvalidArgument: it cannot listen there, or a file of ``certificates`` cannot be used; with
            its field.

    Attributes:
        url: for ranks and decode engines.
        faults: requests that were refused, by cause.
    """

    def __init__(
        self, host: str, port: int, secret: bytes, certificates: CertificateFiles | None = None
    ) -> None:
        self._tls = certificates.accepting() if certificates is not None else None
        self._secret = secret
        self._lock = threading.Lock()
        self._table = RankTable()
        self.faults = Faults(_LOG, "handoff, registry")
        self._crowd = Crowd(_REQUESTS_MAX)
        registry = self

        class RankHandler(BaseHTTPRequestHandler):
            timeout = _WAIT_S

            def do_GET(self) -> None:
                registry.answer(self, b"")

            def do_PUT(self) -> None:
                size = self.headers.get("Content-Length", "")
                if not size.isdecimal() or len(size) > 9 or int(size) > _RECORD_BYTES_MAX:
                    self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
                    return
                registry.answer(self, self.rfile.read(int(size)))

            def log_error(self, format: str, *args: Any) -> None:
                registry.refused(self.client_address[0], format % args)

            def log_message(self, format: str, *args: Any) -> None:
                """No line for each request."""

        class RankServer(ThreadingHTTPServer):
            daemon_threads = False
            request_queue_size = BACKLOG

            def process_request(self, request: Any, client_address: Any) -> None:
                start = partial(super().process_request, request, client_address)
                if not registry.starts(start, request, client_address[0]):
                    self.shutdown_request(request)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                with contextlib.ExitStack() as ends:
                    ends.callback(registry._crowd.leave, request)
                    try:
                        stream = registry.begin(request)
                    except OSError as error:  # ssl.SSLError is one
                        registry.refused(client_address[0], f"TLS: {reason(error)}")
                        self.shutdown_request(request)
                        return
                    ends.enter_context(_cut_after(stream, _REQUEST_S))
                    super().process_request_thread(stream, client_address)

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A connection that broke is no error of ours."""

        try:
            self._server = RankServer((host, port), RankHandler)
        except OSError as error:
            what = f"cannot listen at {host}:{port}: {reason(error)}"
            raise InvalidArgument("port", what) from error
        bound, at = self._server.server_address[:2]
        shown = f"[{bound!s}]" if ":" in str(bound) else str(bound)
        self.url = f"{_scheme(self._tls)}://{shown}:{at}"
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

    def begin(self, connection: socket.socket) -> socket.socket:
        """A new connection after its TLS handshake, if there is TLS, within two seconds.

        Raises:
            OSError: the other side shows no certificate of our authority, or does not use TLS.
        """
        if self._tls is None:
            return connection
        connection.settimeout(_WAIT_S)
        stream = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        self._crowd.change(connection, partial(_cut, stream))
        try:
            stream.do_handshake()
        except OSError:
            self._crowd.leave(connection)
            stream.close()
            raise
        return stream

    def starts(self, start: Callable[[], None], request: socket.socket, peer: str) -> bool:
        """Start the thread of a request, once it has a place; see :class:`Crowd`.

        Returns:
            Whether it runs.
        """
        has_place, are_many = self._crowd.enter(request, partial(_cut, request), peer)
        if are_many:
            self.faults.note("crowd", f"{peer}: too many requests at a time")
        if not has_place:
            return False
        try:
            start()
        except RuntimeError as error:  # no thread is left
            self._crowd.leave(request)
            self.refused(peer, str(error))
            return False
        return True

    def refused(self, peer: str, why: str) -> None:
        """Note a request that is refused; any thread."""
        self.faults.note("refused", f"{peer}: {why}")

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
            status, why = self._register(body)
            said = msgspec.json.encode({"refused": why} if why else {})
        else:
            status, said = HTTPStatus.OK, msgspec.json.encode(self._listed())
        if status != HTTPStatus.OK:
            why = "no proof of our secret" if status == HTTPStatus.UNAUTHORIZED else repr(said)
            self.refused(request.client_address[0], f"{method} {path}: {status}: {why}")
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(said)))
        if status != HTTPStatus.UNAUTHORIZED:
            request.send_header(_HEADER, _answer_proof(self._secret, nonce, said))
        request.end_headers()
        request.wfile.write(said)

    def _register(self, body: bytes) -> tuple[HTTPStatus, str]:
        """Process a registration; returns the status, and why it is refused."""
        try:
            record = _record.decode(body)
            record.check()
        except (*UNREADABLE, InvalidArgument) as error:
            return HTTPStatus.BAD_REQUEST, str(error)[:200]
        with self._lock:
            why = self._table.register(record, time.monotonic_ns())
        return (HTTPStatus.CONFLICT if why else HTTPStatus.OK), why

    def _listed(self) -> list[RankRecord]:
        with self._lock:
            return self._table.listed(time.monotonic_ns())


def _scheme(tls: ssl.SSLContext | None) -> str:
    return "http" if tls is None else "https"


def _cut(connection: socket.socket) -> None:
    """Break a connection that is in use: ``SSLSocket.shutdown`` would drop its TLS state."""
    with contextlib.suppress(OSError):  # it has ended by itself
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


@contextlib.contextmanager
def _cut_after(connection: socket.socket, seconds: float) -> Iterator[None]:
    """Cut a connection if it is used for longer."""
    late = threading.Timer(seconds, _cut, (connection,))
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()
        late.join()


def _answer_proof(secret: bytes, nonce: str, body: bytes) -> str:
    return proof_of(secret, b"answer", nonce.encode(), body).hex()


class RegistryClient:
    """Queries one registry, in seven seconds at most: two of them to resolve its name and connect.

    Args:
        url: of the registry.
        secret: of the handoffs.
        tls: for the connecting side; None = no TLS. Registry and client must agree on TLS.

    Raises:
        InvalidArgument: it is not a URL of a registry.
    """

    def __init__(self, url: str, secret: bytes, tls: ssl.SSLContext | None = None) -> None:
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
            (host or "").encode("idna")
        except ValueError:  # UnicodeError is one
            scheme, host, port = "", None, None
        if scheme not in ("http", "https") or host is None or port is None:
            raise InvalidArgument("registry", f"{url!r} is not http://host:port, or https")
        self._host, self._port = host, port
        self._secret = secret
        self._tls = tls
        self._unlike = f"{url} is not {_scheme(tls)}" if scheme != _scheme(tls) else ""

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
            found = _ranks.decode(self._ask("GET", b""))
            for record in found:
                record.check()
        except (*UNREADABLE, InvalidArgument) as error:
            raise ProtocolError(f"the registry's answer cannot be read: {error}") from error
        return found

    @contextlib.contextmanager
    def _connection(self) -> Iterator[http.client.HTTPConnection]:
        """A connection to ask once; it is cut if it is used for too long, its handshake included.

        Raises:
            OSError: there is none; ssl.SSLError is one.
            RuntimeError: no thread is left.
            TransferError: the registry cannot be reached.
        """
        asking = http.client.HTTPConnection(self._host, self._port)
        with dial(self._host, self._port, time.monotonic_ns() + int(_WAIT_S * 1e9)) as plain:
            plain.settimeout(_WAIT_S)
            if self._tls is None:
                with _cut_after(plain, _REQUEST_S):
                    asking.sock = plain
                    yield asking
                return
            with (
                self._tls.wrap_socket(
                    plain, do_handshake_on_connect=False, server_hostname=self._host
                ) as sealed,
                _cut_after(sealed, _REQUEST_S),
            ):
                sealed.do_handshake()
                asking.sock = sealed
                yield asking

    def _ask(self, method: str, body: bytes) -> bytes:
        nonce = os.urandom(16).hex()
        path = f"{_PATH}?{nonce}"
        proof = proof_of(self._secret, b"ask", method.encode(), path.encode(), body).hex()
        if self._unlike:
            what = "both engines need certificates, or none of them has any"
            raise ProtocolError(f"{self._unlike}: {what}")
        try:
            with self._connection() as connection:
                connection.request(method, path, body or None, {_HEADER: proof})
                with connection.getresponse() as answer:
                    said = answer.read(_LIST_BYTES_MAX)
                received_proof = answer.getheader(_HEADER) or ""
        except TransferError as error:
            raise PeerUnreachable(f"the registry: {error}") from error
        except (OSError, http.client.HTTPException, RuntimeError) as error:  # or no thread is left
            where = f"{self._host}:{self._port}"
            raise PeerUnreachable(f"the registry at {where}: {reason(error)}") from error
        if answer.status == HTTPStatus.UNAUTHORIZED:
            raise ProtocolError("the registry answers 401: it has another secret than this engine")
        if answer.status != HTTPStatus.OK:
            raise ProtocolError(f"the registry answers {answer.status}: {said[:200]!r}")
        if not hmac.compare_digest(
            received_proof.encode(), _answer_proof(self._secret, nonce, said).encode()
        ):
            raise ProtocolError("the registry has another secret")
        return said
