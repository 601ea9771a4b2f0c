"""A daemon for each module, its API as an operator meets it, and a store beside it."""

import json
import os
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.protocol.page import PrefixKeys
from kvstore.server import client
from tests.client.conftest import FLAT, READY, Daemon, arguments, content, identity
from tests.client.conftest import new_keys as keys_of
from tests.conftest import Process, WaitUntil, wait_for
from tests.open_files import open_files

PAGE_BYTES = FLAT.page_bytes(identity())
TIMEOUT_S = 10.0
_seeds = count(100)


class Api:
    """The admin API of one daemon: over its Unix socket, or with a token ("" = none) over TCP."""

    def __init__(self, daemon: Daemon, token: str | None = None) -> None:
        self.daemon = daemon
        self.url = daemon.admin if token is None else daemon.http
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    def send(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        """Status and body."""
        data = json.dumps(body).encode() if body is not None else None
        every = {**self.headers, **headers}
        status, text = client.send(
            self.url, method, path, body=data, headers=every, timeout_s=TIMEOUT_S
        )
        return status, json.loads(text)

    def get(self, path: str) -> Any:
        status, body = self.send("GET", path)
        assert status == 200, body
        return body

    def post(self, path: str, **body: object) -> Any:
        status, answer = self.send("POST", path, body)
        assert status in (200, 202), answer
        return answer

    def refused(self, method: str, path: str, body: object = None) -> tuple[int, str, str]:
        """Status, code and field of what must be an error."""
        status, answer = self.send(method, path, body)
        assert answer.keys() == {"error"}, answer
        assert answer["error"]["message"]
        return status, answer["error"]["code"], answer["error"]["field"]

    def ended(self, job: dict[str, Any]) -> dict[str, Any]:
        """A job once it has ended."""
        path = f"/v1/jobs/{job['job']}"
        assert wait_for(lambda: self.get(path)["state"] != "running", TIMEOUT_S)
        return self.get(path)


class Stored:
    """Pages of one space, stored through the daemon's socket."""

    def __init__(self, store: KVStore, **fields: Any) -> None:
        self.space: Space = store.space(identity(**fields), (FLAT,))
        self._seed = next(_seeds)
        self.label = self.space.identity.digest.hex()

    def content(self, pages: int) -> list[Any]:
        """What :meth:`put` stores; another space's pages are other bytes."""
        return content(pages, PAGE_BYTES, self._seed)

    def put(self, pages: int, start: int = 0, **options: Any) -> PrefixKeys:
        keys = keys_of(self.space, pages, start)
        self.space.put(keys, self.content(pages), **options)
        return keys


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("daemon")
    process = Process(
        arguments(folder / "kv.sock"), {**os.environ, "PYTHONUNBUFFERED": "1"}, folder / "daemon"
    )
    try:
        process.wait_ready(READY, 30.0)
        yield Daemon(process)
    finally:
        assert process.stop() == 0, process.report()


@pytest.fixture
def api(daemon: Daemon) -> Api:
    return Api(daemon)


@pytest.fixture
def stored(daemon: Daemon) -> Iterator[Stored]:
    with daemon.connect() as store:
        yield Stored(store)


def flip_a_byte(daemon: Daemon, wanted: bytes) -> None:
    """Change one byte of the page that holds ``wanted`` in the daemon's memory."""
    for entry, link in open_files(daemon.process.pid):
        if "/memfd:kvstore:" not in link:
            continue
        with entry.open("r+b", buffering=0) as memory:
            at = memory.read().find(wanted)
            if at >= 0:
                memory.seek(at + 7)
                memory.write(bytes([wanted[7] ^ 1]))
                return
    pytest.fail("the page is in no memory of the daemon")


__all__ = ["Api", "Stored", "WaitUntil", "flip_a_byte"]
