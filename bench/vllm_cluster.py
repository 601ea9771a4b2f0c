"""vLLM servers on this machine, with the node and the Conductor they work with."""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from bench.cluster import (
    DAEMON_READY,
    LISTENING,
    ClusterError,
    Service,
    family,
    register,
    request,
    script,
)
from bench.vllm_environment import interpreter

MODEL: Final = "demo"
HITS: Final = "vllm:external_prefix_cache_hits_total"
_ROOT: Final = Path(__file__).resolve().parent.parent
_READY_S: Final = 300.0
_POLL_S: Final = 0.25
ENVIRONMENT: Final = {
    # With any connector vLLM keeps one more core free of computing: compare equal numbers.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": str(_ROOT),
}  # fmt: skip


@dataclass
class VllmCluster:
    """Starts processes on demand; a context manager that ends them all, by their pids.

    Attributes:
        capacity_bytes: of the node's host memory.
        ssd_bytes: of its SSD tier, in this cluster's directory: a node that is stopped and started
            again has its pages there only; 0 = none.
        urls: name of each server to its URL.
    """

    capacity_bytes: int = 1 << 30
    ssd_bytes: int = 0
    urls: dict[str, str] = field(default_factory=dict)
    services: dict[str, Service] = field(default_factory=dict)
    store_url: str = ""
    node_admin: str = ""
    conductor_url: str = ""
    _undo: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        self.directory = Path(
            self._undo.enter_context(tempfile.TemporaryDirectory(prefix="kv-vllm-"))
        )
        self.python = interpreter()
        self.model = self.directory / "model"
        command = [str(self.python), "-m", "bench.vllm_model", MODEL, str(self.model)]
        subprocess.run(command, check=True, cwd=_ROOT, capture_output=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._undo.close()

    def start_node(self) -> None:
        """The node; ``store_url`` is set afterwards."""
        arguments = [script("kvstore-server"), "--log-level", "WARNING"]
        values = [
            f"socket.path={self.directory}/kvstore.sock", "http.port=0",
            f"host.capacity_bytes={self.capacity_bytes}", f"host.extent_bytes={64 << 20}",
        ]  # fmt: skip
        if self.ssd_bytes:
            folder = self.directory / "ssd"
            folder.mkdir(exist_ok=True)
            values += [f"ssd.directories={folder}", f"ssd.capacity_bytes={self.ssd_bytes}"]
        for value in values:
            arguments += ["--set", value]
        found = self.launch("node", arguments, DAEMON_READY).wait_ready()
        self.store_url = found.group(1)
        self.node_admin = f"unix://{self.directory}/kvstore.sock.admin"

    def start_conductor(self, roles: Mapping[str, str]) -> None:
        """The Conductor, and what each server is to it (name to role)."""
        arguments = [script("kvstore-conductor"), "--port", "0"]
        self.conductor_url = self.launch("conductor", arguments, LISTENING).wait_ready().group(1)
        register(self.conductor_url, "nodes", {"url": self.node_admin})
        for name, role in roles.items():
            body = {"id": name, "role": role, "url": self.urls[name]}
            register(self.conductor_url, "engines", body)

    def start_server(
        self, name: str, transfer: Mapping[str, Any] | None = None, flags: Sequence[str] = (),
        variables: Mapping[str, str] | None = None, blocks: int = 1024,
    ) -> None:  # fmt: skip
        """Begin to start a server; :meth:`wait_server` waits.

        Args:
            name: names it here.
            transfer: ``--kv-transfer-config``.
            flags: further ones of vLLM.
            variables: of its environment, besides :data:`ENVIRONMENT`.
            blocks: of 32 tokens, of its own KV cache.
        """
        port = _free_port()
        arguments = [
            str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--model",
            str(self.model), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port",
            str(port), "--dtype", "float32", "--max-model-len", "8192", "--max-num-seqs", "8",
            "--enforce-eager", "--block-size", "32", "--num-gpu-blocks-override", str(blocks),
            "--enable-prompt-tokens-details", *flags,
        ]  # fmt: skip
        if transfer is not None:
            arguments += ["--kv-transfer-config", json.dumps(transfer)]
        self.urls[name] = f"http://127.0.0.1:{port}"
        environment = {**os.environ, **ENVIRONMENT, **(variables or {})}
        # The ready line goes unused: a server is ready when /health says so.
        self.launch(name, arguments, r"$^", environment)

    def wait_server(self, name: str) -> None:
        """Wait until a server answers.

        Raises:
            ClusterError: it ended, or took too long.
        """
        deadline = time.monotonic() + _READY_S
        service = self.services[name]
        while time.monotonic() < deadline and service.process.poll() is None:
            try:
                request("GET", f"{self.urls[name]}/v1/models")
            except ClusterError:
                time.sleep(_POLL_S)
            else:
                return
        log = service.log.read_text(errors="replace")[-3000:]
        raise ClusterError(f"{name} did not become ready; the end of its log:\n{log}")

    @contextmanager
    def suspended(self, name: str) -> Iterator[None]:
        """Inside, a server stands still: for a while after a request vLLM's processes spin."""
        processes = family(self.services[name].process.pid)
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in processes:
                os.kill(pid, signal.SIGCONT)

    def cpu_s(self, name: str) -> float:
        """CPU seconds of a server's processes so far; what neighbours do hardly shows in them."""
        ticks = 0
        for pid in family(self.services[name].process.pid):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self, name: str) -> None:
        """End one process now."""
        self.services.pop(name).stop()

    def metric(self, name: str, series: str) -> float:
        """The sum of one series of a server's metrics."""
        with urllib.request.urlopen(f"{self.urls[name]}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series))

    def transfer(self, **extra: Any) -> dict[str, Any]:
        """``--kv-transfer-config`` of an engine on this cluster's node, with further options."""
        return {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "engine_adapters.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"address": self.store_url, **extra},
        }

    def launch(
        self, name: str, arguments: list[str], ready: str, environment: dict[str, str] | None = None
    ) -> Service:
        """Start a process that ends with the cluster; see :class:`~bench.cluster.Service`."""
        service = Service(name, arguments, ready, self.directory, environment)
        self.services[name] = service
        self._undo.callback(service.stop)
        return service


def _free_port() -> int:
    """A port that nobody listens on at this moment; vLLM cannot choose one by itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
