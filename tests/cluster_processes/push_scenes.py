"""Reference engines that push to each other as processes, and a router between them."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from tests.cluster_processes.conftest import _next_host
from tests.conftest import Process, Spawn, wait_for

ANSWER_S: Final = 45.0
BACK_S: Final = 15.0
"""Until what was held is back; longer than any deadline that it may have to wait for."""
PORT, PUSH_PORT, REGISTRY_PORT = 7500, 7501, 7502
SAMPLING: Final = {"temperature": 0.8, "seed": 7}
SECRET: Final = b"a secret for tests, of 32 bytes."
_rooms = count(int.from_bytes(os.urandom(3), "little") << 32)


class PushEngine:
    """One engine; it is started again with the same addresses.

    Attributes:
        url: of its HTTP.
        registry: of a prefill engine.
    """

    def __init__(self, nursery: "Nursery", name: str, mode: str, *words: str) -> None:
        self.name = name
        self._nursery = nursery
        self._gates = nursery.folder / f"{name}.gates"
        self._gates.mkdir()
        self._output = nursery.folder / f"{name}.out"
        host = _next_host()
        self.url = f"http://{host}:{PORT}"
        self.registry = f"http://{host}:{REGISTRY_PORT}"
        self._words = [
            "--mode", mode, "--host", host, "--port", str(PORT), "--threads", "1",
            "--prefix-cache", "off", "--token-budget", "64", "--handoff", "push",
            "--handoff-secret-file", str(nursery.secret), "--handoff-port", str(PUSH_PORT),
            "--handoff-registry-port", str(REGISTRY_PORT), *words,
        ]  # fmt: skip
        self.pid = 0
        self.free_blocks = 0.0

    def start(self, *words: str) -> None:
        """Start it, again perhaps, and wait until it answers."""
        before = self.output.count("listening on")
        for path in self._gates.iterdir():
            path.unlink()
        self.pid = self._nursery.fork(self.name, [*self._words, *words])

        def ready() -> bool:
            return self.output.count("listening on") > before or not self.runs

        assert wait_for(ready, ANSWER_S), self.output
        assert self.runs, self.output
        assert wait_for(lambda: self.metric("free_blocks")), "it has made no step yet"
        self.free_blocks = self.metric("free_blocks")

    def end(self) -> None:
        """End it as an operator does."""
        os.kill(self.pid, signal.SIGTERM)
        assert wait_for(lambda: not self.runs, ANSWER_S)

    @property
    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    @property
    def runs(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP, SIGCONT or SIGKILL; returns when it has had its effect."""
        os.kill(self.pid, number)
        if number is signal.SIGKILL:
            assert wait_for(lambda: not self.runs)
        if number is signal.SIGSTOP:
            status = Path(f"/proc/{self.pid}/stat")
            assert wait_for(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")

    def close_gate(self, name: str) -> None:
        os.mkfifo(self._gates / name)

    def at_gate(self, name: str) -> None:
        if not wait_for((self._gates / f"{name}.held").exists, ANSWER_S):
            pytest.fail(f"{self.name} never came to gate {name}\n{self.output}")

    def open_gate(self, name: str) -> None:
        with (self._gates / f"{name}.held").open("w") as opened:
            opened.write("go\n")
        (self._gates / f"{name}.held").unlink()

    def notices(self) -> None:
        """Wait until it has heard that a client is gone, and begin anew."""
        assert wait_for((self._gates / "left").exists, ANSWER_S), "it has not noticed"
        (self._gates / "left").unlink()

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=ANSWER_S) as answer:
            return json.load(answer)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(self.url + "/metrics", timeout=ANSWER_S) as answer:
            text = answer.read().decode()
        found = re.search(rf"^reference_engine_{name} (\S+)$", text, re.MULTILINE)
        assert found is not None, (name, text)
        return float(found[1])

    def complete(
        self, prompt: str, max_tokens: int = 8, over: socket.socket | None = None, **body: Any
    ) -> dict[str, Any]:
        """The answer to a prompt; raises OSError or HTTPException if there is none.

        Args:
            prompt: text.
            max_tokens: of the answer.
            over: a socket to connect and use; it is closed.
            body: more fields.
        """
        fields = {"prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True, **SAMPLING}
        host, port = self.url.removeprefix("http://").split(":")
        with contextlib.closing(HTTPConnection(host, int(port), timeout=ANSWER_S)) as connection:
            if over is not None:
                over.settimeout(ANSWER_S)
                over.connect((host, int(port)))
                connection.sock = over
            connection.request("POST", "/v1/completions", json.dumps(fields | body))
            answer = connection.getresponse()
            found = json.load(answer)
        if answer.status != 200:
            pytest.fail(f"{self.name} answers {answer.status}: {found}")
        return found  # type: ignore[no-any-return]

    def handoffs(self) -> list[dict[str, Any]]:
        return list(self.get("/v1/handoffs")["handoffs"])

    def has_given_up(self, room: int) -> bool:
        """Whether nothing will come of a push any more."""
        return all(one["state"] == "failed" for one in self.handoffs() if one["room"] == room)

    def held(self) -> dict[str, Any]:
        """What it holds for pushes now; empty when that is nothing."""
        found: dict[str, Any] = {
            name: self.metric(name) for name in ("limbo_blocks", "aux_slots", "running", "waiting")
        }
        found["blocks"] = self.free_blocks - self.metric("free_blocks")
        found["handoffs"] = self.handoffs()
        return {name: value for name, value in found.items() if value}

    def threads_and_descriptors(self) -> tuple[int, int]:
        """Numbers of both, of the process."""
        place = Path(f"/proc/{self.pid}")
        return len(list((place / "task").iterdir())), len(list((place / "fd").iterdir()))


class Nursery:
    """Starts the engines of a test."""

    def __init__(self, spawn: Spawn, folder: Path) -> None:
        self.folder = folder
        self.secret = folder / "secret"
        descriptor = os.open(self.secret, os.O_CREAT | os.O_WRONLY, 0o600)
        os.write(descriptor, SECRET)
        os.close(descriptor)
        os.mkfifo(folder / "start")
        program = [sys.executable, "-m", "tests.cluster_processes.gated_engine", str(folder)]
        self._process: Process = spawn(program, ready="ready")

    def fork(self, name: str, words: list[str]) -> int:
        """Start an engine; its process id."""
        told = self.folder / f"{name}.pid"
        told.unlink(missing_ok=True)
        with (self.folder / "start").open("w") as commands:
            commands.write(json.dumps({"name": name, "words": words}) + "\n")
        assert wait_for(told.exists), self._process.report()
        return int(told.read_text())


class Asked:
    """A request that was sent to both engines of a pair, as the Conductor sends it."""

    def __init__(
        self, scene: "PushScene", prompt: str, registry: str = "", *, leaves: bool = False
    ) -> None:
        prefill, decode, room = scene.prefill, scene.decode, next(_rooms)
        self.room = room
        self._engines = {"prefill": prefill, "decode": decode}
        here = {"handoff": "push", "room": room, "do_remote_decode": True}
        there = {
            "handoff": "push", "room": room, "do_remote_prefill": True,
            "registry": registry or prefill.registry,
        }  # fmt: skip
        ask_prefill = partial(prefill.complete, prompt, 1, kv_transfer_params=here)
        ask_decode = partial(decode.complete, prompt, 8, kv_transfer_params=there)
        self._sockets: dict[str, socket.socket] = {}
        if leaves:
            self._sockets = {"prefill": socket.socket(), "decode": socket.socket()}
            ask_prefill = partial(ask_prefill, over=self._sockets["prefill"])
            ask_decode = partial(ask_decode, over=self._sockets["decode"])
        self.prefill = scene.threads.submit(ask_prefill)
        self.decode = scene.threads.submit(ask_decode)

    def leave(self, *sides: str, answered: str = "") -> None:
        """The client of these engines goes; returns when they know.

        Args:
            sides: of the engines.
            answered: of the one that may have answered already.
        """
        for side in sides:
            with contextlib.suppress(OSError):  # it has been closed, after an answer
                self._sockets[side].shutdown(socket.SHUT_RDWR)
            answer = self.prefill if side == "prefill" else self.decode
            if answer.exception(ANSWER_S) is not None:
                self._engines[side].notices()
            else:
                assert side == answered


def tokens_of(answer: "Future[dict[str, Any]]") -> list[int]:
    return list(answer.result(ANSWER_S)["choices"][0]["token_ids"])


def outcome_of(answer: "Future[dict[str, Any]]") -> tuple[str, str | None]:
    """How a push went at the engine of an answer: its state and its code."""
    told = answer.result(ANSWER_S)["kv_transfer_params"]["handoff"]
    return told["state"], told.get("code")


class PushScene:
    """A prefill and a decode engine, and a prefill engine that nothing happens to.

    Args:
        spawn: starts processes.
        folder: for their files.
        words: more arguments of each engine.
    """

    def __init__(self, spawn: Spawn, folder: Path, *words: str) -> None:
        nursery = Nursery(spawn, folder)
        self.secret = SECRET
        self.threads = ThreadPoolExecutor(8)
        self.prefill = PushEngine(nursery, "p", "prefill", *words)
        self.decode = PushEngine(nursery, "d", "decode", *words)
        self.other = PushEngine(nursery, "q", "prefill", *words)
        for engine in (self.prefill, self.decode, self.other):
            engine.start()

    @property
    def engines(self) -> list[PushEngine]:
        return [self.prefill, self.decode, self.other]

    def ask(self, prompt: str, registry: str = "", *, leaves: bool = False) -> Asked:
        return Asked(self, prompt, registry, leaves=leaves)

    def ask_other(self, prompt: str) -> Asked:
        """A push from the other prefill engine to the same decode engine."""
        prefill, self.prefill = self.prefill, self.other
        try:
            return Asked(self, prompt)
        finally:
            self.prefill = prefill

    def end(self) -> None:
        self.threads.shutdown()
        for engine in self.engines:
            assert "Traceback" not in engine.output, engine.output
