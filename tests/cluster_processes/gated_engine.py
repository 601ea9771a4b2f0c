"""Reference engines that stop at gates in the middle of a push, started by forks of one process.

Run as ``python -m tests.cluster_processes.gated_engine FOLDER``. Each line of the named pipe
``FOLDER/start`` is JSON: ``{"name": NAME, "words": [ARGUMENT OF THE ENGINE]...}``; the engine's
output goes to ``FOLDER/NAME.out``, its gates are in ``FOLDER/NAME.gates`` (see ``gated``). torch is
imported once, so a start costs a tenth of a second. Gates of prefill:

* ``greet``: decode has connected, and is not answered;
* ``start``: decode has announced, nothing was computed;
* ``layer``: the second layer of the second chunk is computed and not sent;
* ``range``: one half of a range is sent;
* ``aux``: all KV is sent, the aux data are not.

Of decode, for prompts that begin with :data:`BEGINNING`: ``announce``: it has blocks and has not
said so; ``success``: everything has arrived and the engine has not looked.

An engine makes the file ``left`` beside its gates when it has heard that a client is gone.
"""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from engine_adapters.reference import __main__ as program
from engine_adapters.reference.engine import Engine
from engine_adapters.reference.landing import DecodePushes
from engine_adapters.reference.pushing import PrefillPushes
from engine_adapters.reference.request import Request
from engine_adapters.reference.tokenizer import encode
from kvstore.handoff.greeting import Greeter, SealedStream
from kvstore.handoff.prefill import PrefillManager
from kvstore.handoff.states import Patience, State
from kvstore.mover.memory import memory_at
from tests.cluster_processes.gated import stand

BEGINNING = "In "
DEADLINES = {"bootstrapping_s": 6.0, "waiting_s": 12.0, "transferring_s": 8.0, "total_s": 40.0}
"""Long enough that a test never sees one by chance, short enough that it could wait for it."""


def put_gates_into_prefill(gates: Path) -> None:
    answer, hook = Greeter.answer, PrefillPushes.layer_hook
    computed = PrefillPushes._layer_computed
    job, seal = PrefillManager._send, SealedStream.send

    def gated_answer(self: Greeter, stream: Any) -> Any:
        stand(gates, "greet")
        return answer(self, stream)

    def gated_hook(self: PrefillPushes, work: Any) -> Any:
        work = list(work)
        if any(request.push is not None for request, _ in work):
            stand(gates, "start")
        return hook(self, work)

    def gated_computed(self: PrefillPushes, pieces: Any, layer: int) -> None:
        if layer == 1 and any(one.positions.start for one in pieces):
            stand(gates, "layer")
        computed(self, pieces, layer)

    def gated_job(self: PrefillManager, one: Any, *rest: Any) -> Any:
        if one.aux:
            stand(gates, "aux")
        return job(self, one, *rest)

    def gated_seal(self: SealedStream, body: bytes, after: Any, limit_s: float) -> None:
        if not after or not (gates / "range").exists():
            return seal(self, body, after, limit_s)
        (address, size), *others = after
        half = size // 2
        seal(self, body, [(address, half)], limit_s)
        stand(gates, "range")
        rest = [(address + half, size - half), *others]
        self._stream.send([memory_at(*place) for place in rest], 1 << 62)
        return None

    Greeter.answer = gated_answer  # type: ignore[method-assign]
    PrefillPushes.layer_hook = gated_hook  # type: ignore[method-assign]
    PrefillPushes._layer_computed = gated_computed  # type: ignore[method-assign]
    PrefillManager._send = gated_job  # type: ignore[method-assign]
    SealedStream.send = gated_seal  # type: ignore[method-assign]


def put_gates_into_decode(gates: Path) -> None:
    announce, poll = DecodePushes.announce, DecodePushes.poll

    def is_meant(request: Request) -> bool:
        return request.tokens[: len(BEGINNING)] == encode(BEGINNING)

    def gated_announce(self: DecodePushes, request: Request, first_token: int) -> None:
        if is_meant(request):
            stand(gates, "announce")
        announce(self, request, first_token)

    def gated_poll(self: DecodePushes) -> Any:
        for request, push in self._pushes.items():
            if push.receiver and push.receiver.state is State.SUCCESS and is_meant(request):
                stand(gates, "success")
        return poll(self)

    DecodePushes.announce = gated_announce  # type: ignore[method-assign]
    DecodePushes.poll = gated_poll  # type: ignore[method-assign]


def mark_who_leaves(gates: Path) -> None:
    abort = Engine.abort

    def marked(self: Engine, request: Request) -> None:
        abort(self, request)
        (gates / "left").touch()

    Engine.abort = marked  # type: ignore[method-assign]


def run(folder: Path, name: str, words: list[str]) -> None:
    """Be one engine."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(folder / f"{name}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    Patience.of_silence = partial(Patience, **DEADLINES)  # type: ignore[method-assign]
    put_gates_into_prefill(folder / f"{name}.gates")
    put_gates_into_decode(folder / f"{name}.gates")
    mark_who_leaves(folder / f"{name}.gates")
    sys.argv = [name, *words]
    program.main()
    os._exit(0)


def main() -> None:
    folder, children = Path(sys.argv[1]), set[int]()

    def end(*_: object) -> None:
        for pid in children:
            if Path(f"/proc/{pid}").exists():  # no other process of the session has its number
                os.kill(pid, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody has to wait for them
    signal.signal(signal.SIGTERM, end)
    pipe = os.open(folder / "start", os.O_RDWR)  # so that it never ends
    with os.fdopen(pipe) as commands:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for line in commands:
            told = json.loads(line)
            pid = os.fork()
            if not pid:
                os.close(pipe)
                try:
                    run(folder, told["name"], told["words"])
                finally:
                    os._exit(1)
            children.add(pid)
            (folder / f"{told['name']}.pid.new").write_text(str(pid))
            (folder / f"{told['name']}.pid.new").rename(folder / f"{told['name']}.pid")


if __name__ == "__main__":
    main()
