"""A request of the engine's own before all others: a complete push without the bytes.

The other engine of this push is here: managers with a secret that nobody else has, which are closed
afterwards. Whoever asks over HTTP cannot ask for such a push.
"""

import os
import queue
import secrets
import time
from contextlib import ExitStack, closing
from typing import Final

from engine_adapters.reference.engine import Engine
from engine_adapters.reference.request import FakeManagers, Output, Push, Request
from kvstore.engine.transfer import HandoffReport
from kvstore.handoff.aux_data import AuxData, prompt_digest
from kvstore.handoff.decode import DecodeManager
from kvstore.handoff.memory import HandoffPool
from kvstore.handoff.prefill import PrefillManager
from kvstore.handoff.registry import HandoffRegistry
from kvstore.handoff.rooms import BOOT_MAX, RoomNumbers
from kvstore.protocol.errors import PeerUnreachable

WARM_UP_S: Final = 20.0
_SPACE: Final = b"warm-up"
_STEPS: Final = 2
"""Tokens of a decode engine after the first."""


def warm_up(engine: Engine, timeout_s: float = WARM_UP_S) -> HandoffReport:
    """Serve a request whose K/V are pushed by nobody, or to nobody.

    Nothing of it is kept: it is shorter than a page.

    Args:
        engine: started, of mode prefill or decode, with pushes.
        timeout_s: for all of it.

    Returns:
        How the push went; ``fake`` is true.

    Raises:
        PeerUnreachable: it did not end in time, or without a push.
        KVStoreError: the managers cannot be made.
    """
    options, parts = engine.options, engine.parts
    deadline = time.monotonic() + timeout_s
    count = options.page_tokens // 2
    tokens = list(range(1, count + 1))
    blocks = -(-count // options.block_tokens)
    room = RoomNumbers(secrets.randbelow(BOOT_MAX)).draw()
    with ExitStack() as undo:
        secret, kv = os.urandom(32), parts.pool.for_transfers()
        here, there = (HandoffPool(kv, options.block_tokens, fake=True) for _ in range(2))
        registry = undo.enter_context(closing(HandoffRegistry("127.0.0.1", 0, secret)))
        prefill = PrefillManager(here, _SPACE, secret, registry=registry.url)
        undo.enter_context(closing(prefill))
        decode = undo.enter_context(closing(DecodeManager(there, _SPACE, secret, name="warm-up")))
        outputs: queue.Queue[Output] = queue.Queue()
        to_handoff = options.mode == "prefill"
        request = Request(
            id="warm-up",
            tokens=list(tokens),
            prompt_tokens=count,
            max_tokens=1 if to_handoff else 1 + _STEPS,
            emit=outputs.put,
            to_handoff=to_handoff,
            push=Push(room, "" if to_handoff else registry.url),
            fake=FakeManagers(prefill, decode),
        )
        if to_handoff:
            decode.receiver(room, registry.url, count).announce(0, range(blocks))
        else:
            sender = prefill.sender(room, count)
            sender.send(range(len(parts.pool.keys)), range(blocks), range(blocks))
            prompt = prompt_digest(tokens)
            sender.finish(AuxData(first_token=tokens[0], position=count, prompt=prompt))
        engine.submit(request)
        try:
            while (last := outputs.get(timeout=max(deadline - time.monotonic(), 0))) is not None:
                if last.finish_reason is not None:
                    break
        except queue.Empty:
            engine.abort(request)
            raise PeerUnreachable(f"it did not end within {timeout_s:.0f} s") from None
    if last.handoff is None or last.handoff.handoff is None:
        raise PeerUnreachable(f"it ended without a push: {last.finish_reason}")
    return last.handoff.handoff
