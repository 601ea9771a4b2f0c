"""Engines in the hands of a test: vLLM processes, commands in, answers out."""

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
START_WAIT_S = 180.0
ANSWER_WAIT_S = 120.0
END_WAIT_S = 30.0
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # As if the project were installed there: vLLM finds the plugin by its entry point.
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/vllm/installed")]),
}
ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "seed": 0,
    "block_size": 32,
    "num_gpu_blocks_override": 320,
}


def transfer_config(address: str, **changes: Any) -> dict[str, Any]:
    """What a user writes into ``--kv-transfer-config``, with room for a busy test machine.

    Every hit is loaded: what is faster depends on the machine. Pages have several blocks, as on a
    GPU.
    """
    extra = {
        "address": address,
        "page_tokens": 2 * ENGINE["block_size"],
        "loads": "always",
        "lookup_timeout_ms": 2000,
        "load_timeout_ms_min": 2000,
        **changes.pop("extra", {}),
    }
    return {
        "kv_connector": "KVStoreConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        **changes,
    }


class EngineError(Exception):
    """The engine said no, or nothing; its log says why."""


class Imported:
    """The process of :mod:`tests.vllm.imported`: starts programs that need vLLM."""

    def __init__(self, python: Path) -> None:
        """Start it, and wait until it has imported vLLM."""
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [python, "-m", "tests.vllm.imported", str(theirs.fileno())],
                env={**os.environ, **ENVIRONMENT}, cwd=ROOT, stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        self._requests.settimeout(START_WAIT_S)
        assert self._requests.recv(16) == b"imported"

    def begin(self, program: str, log: Path, passed: Sequence[int]) -> int:
        """Start the ``main`` of a module with descriptors; returns its process id."""
        return self._ask(program, [], log, passed, waits=False)

    def run(self, program: str, arguments: Sequence[object], log: Path) -> None:
        """Run the ``main`` of a module; it must succeed."""
        status = self._ask(program, [str(one) for one in arguments], log, (), waits=True)
        assert status == 0, log.read_text(errors="replace")

    def close(self) -> None:
        """End it; programs that run go on."""
        self._requests.close()
        self._process.wait(END_WAIT_S)

    def _ask(
        self, program: str, arguments: list[str], log: Path, passed: Sequence[int], *, waits: bool
    ) -> int:
        with log.open("wb") as output:
            request = json.dumps([program, arguments, waits]).encode()
            socket.send_fds(self._requests, [request], [output.fileno(), *passed])
        return int(self._requests.recv(16))


class Engine:
    """One engine process."""

    def __init__(
        self, imported: Imported, log: Path, program: str = "tests.vllm.engine_process"
    ) -> None:
        """Start the process; :meth:`start` makes the engine."""
        self.log = log
        commands, to_child = os.pipe()
        from_child, answers = os.pipe()
        self.pid = imported.begin(program, log, (commands, answers))
        self._ended = os.pidfd_open(self.pid)  # it ends, and is reaped, only after a command
        os.close(commands)
        os.close(answers)
        self._commands = os.fdopen(to_child, "wb", buffering=0)
        self._answers = from_child
        self._buffer = b""

    def start(self, model: Path, hooks: Sequence[str] = (), **changes: Any) -> dict[str, Any]:
        """Make the engine; ``changes`` are vLLM's arguments."""
        arguments = {**ENGINE, "model": str(model), **changes}
        return self.ask("start", START_WAIT_S, hooks=list(hooks), **arguments)

    def generate(
        self, prompts: Sequence[Sequence[int] | dict[str, Any]], max_tokens: int = 12,
        **sampling: Any,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Answers to prompts that come at once."""
        wrapped = [p if isinstance(p, dict) else {"tokens": list(p)} for p in prompts]
        answer = self.ask("generate", prompts=wrapped, max_tokens=max_tokens, **sampling)
        found: list[dict[str, Any]] = answer["answers"]
        return found

    def tokens(self, prompts: Sequence[Sequence[int]], max_tokens: int = 12) -> list[list[int]]:
        """Only the tokens."""
        return [answer["tokens"] for answer in self.generate(prompts, max_tokens)]

    def metric(self, name: str) -> float:
        """The sum of one of vLLM's metrics."""
        found = self.ask("metrics")
        return float(sum(v for k, v in found.items() if k == name or k.startswith(f"{name} ")))

    def ask(self, command: str, wait_s: float = ANSWER_WAIT_S, **arguments: Any) -> dict[str, Any]:
        """One command and its answer.

        Raises:
            EngineError: it failed, ended, or the time ran out.
        """
        self.send(command, **arguments)
        return self.answer(wait_s)

    def send(self, command: str, **arguments: Any) -> None:
        """A command whose answer is fetched later."""
        self._commands.write(json.dumps([command, arguments]).encode() + b"\n")

    def answer(self, wait_s: float = ANSWER_WAIT_S) -> dict[str, Any]:
        """The next answer; see :meth:`ask`."""
        deadline = time.monotonic() + wait_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._answers], [], [], max(0.0, left))
            data = os.read(self._answers, 1 << 20) if ready else b""
            if not data:
                why = "ended" if ready else f"was silent for {wait_s} s"
                raise EngineError(f"the engine {why}\n{self.report()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise EngineError(f"{found['error']}\n{self.report()}")
        return found

    def report(self) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace")
        return "\n".join(line[:400] for line in text.splitlines()[-40:])

    def close(self) -> None:
        """End it, orderly if it can; nothing happens when it was closed before."""
        if self._commands.closed:
            return
        self._commands.close()
        try:
            if not self._wait_end():
                os.killpg(self.pid, signal.SIGKILL)
                assert self._wait_end(), f"process {self.pid} does not end"
                pytest.fail(f"an engine did not end\n{self.report()}")
        finally:
            os.close(self._answers)
            os.close(self._ended)

    def _wait_end(self) -> bool:
        return bool(select.select([self._ended], [], [], END_WAIT_S)[0])
