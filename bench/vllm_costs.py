"""The connector as vLLM runs it, and the CPU time that it takes: ``MeasuredConnector``.

Named in ``--kv-transfer-config`` in the place of ``KVStoreConnector``. Every call of vLLM is
measured by the calling thread's CPU clock, the connector's own threads by the kernel's account of
each (``/proc/self/task/N/schedstat``). Every process writes both again and again to the file that
:mod:`bench.vllm_spent` reads.
"""

import inspect
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.vllm_spent import EVERY_S, FOLDER, Spent, write
from engine_adapters.vllm.connector import KVStoreConnector

_ONCE: Final = {"register_kv_caches", "shutdown"}
"""Calls that start and end a server, which are not measured."""


class _Costs:
    """CPU seconds of this process's connectors."""

    def __init__(self) -> None:
        self._calls_s = 0.0
        self._inside = threading.local()
        self._lock = threading.Lock()
        self._writing = False

    def measured(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, counted; what it calls of the connector itself is counted once."""

        def counted(*arguments: Any, **named: Any) -> Any:
            if getattr(self._inside, "yes", False):
                return call(*arguments, **named)
            self._inside.yes = True
            began_s = time.thread_time()
            try:
                return call(*arguments, **named)
            finally:
                self._inside.yes = False
                with self._lock:
                    self._calls_s += time.thread_time() - began_s

        return counted

    def start(self) -> None:
        """Begin to write, once."""
        with self._lock:
            if self._writing:
                return
            self._writing = True
        threading.Thread(target=self._write, name="bench-costs", daemon=True).start()

    def _write(self) -> None:
        path = Path(os.environ[FOLDER]) / str(os.getpid())
        ended_s, last = 0.0, dict[int, float]()
        while True:
            running = _threads()
            ended_s += sum(spent for thread, spent in last.items() if thread not in running)
            last = running
            with self._lock:
                calls_s = self._calls_s
            write(path, Spent(calls_s, ended_s + sum(running.values())))
            time.sleep(EVERY_S)


def _threads() -> dict[int, float]:
    """CPU seconds of each of the connector's threads that runs now."""
    found = {}
    for thread in threading.enumerate():
        if thread.native_id is None or not thread.name.startswith("kvstore-"):
            continue
        try:
            account = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
        except OSError:  # it just ended
            continue
        found[thread.native_id] = int(account.split()[0]) / 1e9
    return found


_costs: Final = _Costs()


class MeasuredConnector(KVStoreConnector):
    """See the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """As its base class does, and begin to write what calls cost."""
        super().__init__(vllm_config, role, kv_cache_config)
        _costs.start()


for _name, _call in list(vars(KVStoreConnector).items()):
    if inspect.isfunction(_call) and not _name.startswith("_") and _name not in _ONCE:
        setattr(MeasuredConnector, _name, _costs.measured(_call))
