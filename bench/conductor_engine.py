"""A stand-in engine: it answers at once, and streams tokens at a steady rate.

``python -m bench.conductor_engine`` prints ``listening on URL``. It does as little as it can: no
model, one write a token. Each event has the time at which it was written (``t``, nanoseconds of the
monotonic clock, which all processes of a machine share).
"""

import asyncio
import json
import sys
import time
from typing import Any, Final, cast

import uvloop

MODEL: Final = "bench"
MAX_RUNNING: Final = 1_000
_PAGE_TOKENS: Final = 64
_HEAD_END: Final = b"\r\n\r\n"
_STREAM: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_BAD: Final = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


def _answer(body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
    return head + str(len(raw)).encode() + _HEAD_END + raw


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event() -> bytes:
    """One token, with the present time."""
    stamp = time.monotonic_ns()
    return b'data: {"choices":[{"text":"x","index":0,"token_ids":[1]}],"t":%d}\n\n' % stamp


class _Engine(asyncio.Protocol):
    def __init__(self) -> None:
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by type

    def connection_lost(self, _: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(_HEAD_END)
        if end < 0:
            return
        head = bytes(self._received[:end]).lower()
        length = 0
        if b"content-length:" in head:
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        if len(self._received) < end + len(_HEAD_END) + length:
            return
        body = bytes(self._received[end + len(_HEAD_END) :])
        self._received.clear()
        self._serve(head.split()[1], body)

    def _serve(self, path: bytes, body: bytes) -> None:
        assert self._transport is not None
        if path == b"/v1/completions":
            asked = json.loads(body)
            self._transport.write(_STREAM)
            loop = asyncio.get_running_loop()
            self._token(asked["max_tokens"], asked.get("interval_s", 0.0), loop.time())
        elif path == b"/health":
            self._transport.write(_answer({}))
        elif path == b"/v1/engine":
            engine = {"role": "mono", "model": MODEL, "page_tokens": _PAGE_TOKENS}
            self._transport.write(_answer(engine | {"max_running": MAX_RUNNING}))
        else:
            self._transport.write(_BAD)

    def _token(self, left: int, interval_s: float, due: float) -> None:
        assert self._transport is not None
        self._transport.write(_chunk(event()))
        if left > 1:
            loop = asyncio.get_running_loop()
            due += interval_s
            self._timer = loop.call_at(due, self._token, left - 1, interval_s, due)
        else:
            usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n'
            self._transport.write(_chunk(usage) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_Engine, "127.0.0.1", 0, backlog=1024)
    sys.stdout.write(f"listening on http://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve())
