"""A process that has imported vLLM, and forks the programs that need it; run in its environment.

To import vLLM takes 8 to 20 s of CPU time, far longer than to make one of these small engines. So
this process imports it once, computes nothing and starts no thread, and forks each program. What
the program changes then (hooks, variables, torch's threads) is its own. Servers are not made so:
they are started as users start them.

Reads requests from the socket whose descriptor is its argument: a module, arguments of its ``main``
and whether to wait for its end, as JSON, with descriptors: first that of the log, then those that
the program gets as its first arguments. Answers with the process id, or the exit status.
"""

import atexit
import gc
import importlib
import json
import os
import socket
import sys
import threading
import traceback
from contextlib import suppress
from typing import Final, NoReturn

MODULES: Final = (
    "torch", "transformers", "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core", "vllm.lora.request", "vllm.model_executor.model_loader",
    "vllm.v1.executor.uniproc_executor",
)  # fmt: skip
ON_CPU: Final = (
    "vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
)  # fmt: skip
DESCRIPTORS_MAX: Final = 8
REQUEST_BYTES: Final = 1 << 16


def main() -> int:
    """Serve requests until there are no more; in a forked process, run the program."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in MODULES:
        importlib.import_module(name)
    from vllm.platforms import current_platform

    for name in ON_CPU if current_platform.is_cpu() else ():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections of a program look at its own objects only,
    gc.unfreeze = lambda: None  # also when vLLM collects at its end
    requests.send(b"imported")
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES, DESCRIPTORS_MAX)
        if not data:
            return 0
        program, arguments, waits = json.loads(data)
        child = os.fork()
        if not child:
            requests.close()
            run(program, arguments, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if waits else child
        requests.send(str(answer).encode())
        with suppress(ChildProcessError):  # those that have ended meanwhile
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def run(program: str, arguments: list[str], descriptors: list[int]) -> NoReturn:
    """Run ``main`` of a module as a process of its own, which ends with what it returns.

    It ends in order: ``main`` ends what it has made, other threads have ended, and registered
    functions have run. But modules are not torn down: that takes longer than a test.
    """
    status = 1
    try:
        os.setsid()
        log, *passed = descriptors
        for standard in (1, 2):
            os.dup2(log, standard)
        os.close(log)
        sys.argv = [program, *map(str, passed), *arguments]
        status = importlib.import_module(program).main()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 this process ends here, and the log says why
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
