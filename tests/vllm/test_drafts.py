"""Goal: a draft layer's KV that come from the store are those that the request would compute.

Wrong ones change no token of a greedy answer, only how many drafts are accepted: so the KV
themselves are compared. In float32: what is computed in another batch is rounded otherwise.
"""

import base64
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.vllm.conftest import Make, Start, prompt
from tests.vllm.engines import Engine
from tests.vllm.servers import Server

BLOCK, PAGE = 32, 64
MODEL_TOKENS = 1024
SHARED = prompt(5 * PAGE, 77)
FORKS = [SHARED + prompt(100, 1), SHARED + prompt(90, 2)]
"""They part at the end of a page, and of a block."""
LONG = prompt(500, 3)
GIVEN: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 1, "hooks": ("keep drafts",), "enable_prefix_caching": True,
    "max_num_batched_tokens": 2048, "max_model_len": MODEL_TOKENS,
}  # fmt: skip
ANSWER_TOKENS = 8
CHUNK = 160
DRAFTS = 3
PREDICTING = ("mimo", "glm", "ernie")
"""Models with a layer for multi-token prediction."""


def drafting(make: Make, draft: str) -> dict[str, Any]:
    """The draft of an engine, and its model if it has the draft's weights.

    Args:
        make: what is missing.
        draft: one of ``PREDICTING``, or the method of a head for the tiny model.
    """
    if draft in PREDICTING:
        speculative: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": DRAFTS}
        return {"model": make(draft), "speculative_config": speculative}
    head = str(make("head", draft))
    return {
        "speculative_config": {
            "method": draft, "model": head, "num_speculative_tokens": DRAFTS
        }
    }  # fmt: skip


def kept(
    engine: Engine, tokens: list[int], count: int = ANSWER_TOKENS, salt: str = ""
) -> tuple[list[int], int, npt.NDArray[np.float32]]:
    """All tokens of an answered prompt, how many were cached, and the draft's KV by block."""
    (answer,) = engine.generate([{"tokens": tokens, "salt": salt}], count)
    engine.ask("settle")
    (found,) = engine.ask("drafts")["kept"]
    assert found["layer"].startswith("model.layers.4."), found["layer"]
    assert found["tokens"] == tokens + answer["tokens"]
    kv = np.frombuffer(base64.b64decode(found["kv"]), np.float32).reshape(found["shape"])
    return found["tokens"], answer["cached"], kv


def same(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> bool:
    """Whether they are equal, but for rounding."""
    return bool(np.allclose(one, other, rtol=1e-3, atol=1e-3))


@pytest.mark.parametrize("draft", ["eagle", "eagle3", *PREDICTING])
def test_the_kv_of_a_draft_from_the_store_are_those_of_the_next_token(
    draft: str, node, start: Start, make: Make
):
    given = {**GIVEN, **drafting(make, draft)}
    engine = start(node.address, **given)
    # With a salt of its own a prompt shares nothing: all of it is computed.
    expected = [kept(engine, one, salt=f"{at}") for at, one in enumerate([*FORKS, LONG])]
    assert [cached for _, cached, _ in expected] == [0, 0, 0]
    (_, _, first), (_, _, second) = expected[:2]
    fork = len(SHARED) // BLOCK - 1
    assert same(first[:fork], second[:fork])
    assert not same(first[fork], second[fork]), "the last token's KV depend on the next one"

    for tokens, (whole, _, kv) in zip([*FORKS, LONG], expected, strict=True):
        found, _, computed = kept(engine, tokens)
        assert found == whole
        assert same(computed, kv), "computed, some of it on blocks of the other fork"
    loaded(engine, expected)
    if draft not in ("eagle", "mimo"):
        return
    without_the_draft(engine)
    answered, _, _ = kept(engine, prompt(70, 5), 200, "an answer")
    _, _, kv = kept(engine, answered, 1, "another salt")
    engine.close()

    changes = {"max_num_batched_tokens": CHUNK, "hooks": ("keep drafts", "known drafts")}
    engine = start(node.address, **given | changes)
    loaded(engine, expected)
    in_chunks(engine)
    with_accepted_drafts(engine, answered, kv)
    assert engine.metric("kvstore:corrupt_pages") == 0
    assert engine.metric("kvstore:load_failed_tokens") == 0


@pytest.mark.parametrize("draft", ["eagle3", "ernie"])
def test_a_server_finds_what_its_worker_has_stored_in_a_process_of_its_own(
    draft: str, spawn, python, model, make: Make, node, wait_until
):
    """vLLM changes the draft's configuration in the worker when it loads the draft."""
    given = drafting(make, draft)
    speculative = json.dumps(given["speculative_config"])
    flags = ["--no-enable-prefix-caching", "--speculative-config", speculative]
    server = Server(spawn, python, given.get("model", model), node.address, more=flags)
    server.wait_ready()

    asked = {"kv_transfer_params": {"do_remote_decode": True}}
    first = server.complete(LONG, ANSWER_TOKENS, **asked)
    told = first["kv_transfer_params"]
    assert told["kvstore_pages"] == len(LONG) // PAGE
    answer = server.complete(LONG, ANSWER_TOKENS, kv_transfer_params=told)

    assert answer["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    hit = (len(LONG) - 1) // PAGE * PAGE
    wait_until(lambda: server.metric("kvstore:loaded_tokens_total") == hit, 10.0, "loaded")


def loaded(engine: Engine, expected: list[Any]) -> None:
    """All whole pages come from the store, and are right."""
    for tokens, (whole, _, kv) in zip([*FORKS, LONG], expected, strict=True):
        engine.ask("forget")
        found, cached, got = kept(engine, tokens)
        assert found == whole
        assert cached == (len(tokens) - 1) // PAGE * PAGE
        assert same(got, kv)


def without_the_draft(engine: Engine) -> None:
    """vLLM leaves the draft out of steps near the model's length: nothing of them is stored."""
    tokens = prompt(MODEL_TOKENS - 2, 6)
    for _ in range(2):
        engine.ask("forget")
        assert kept(engine, tokens, 1)[1] == 0


def in_chunks(engine: Engine) -> None:
    """vLLM takes a wrong next token at the end of a part of a prompt: such pages are not stored."""
    tokens = prompt(7 * PAGE + 10, 4)
    seen: list[int] = []
    right: list[npt.NDArray[np.float32]] = []
    while not seen or seen[-1] < 7 * PAGE:
        assert len(seen) < 8, seen
        engine.ask("forget")
        _, cached, kv = kept(engine, tokens)
        seen.append(cached)
        right.append(kv[: cached // BLOCK])
        if len(seen) == 1:
            wrong = kv
    assert seen[:2] == [0, CHUNK // PAGE * PAGE]
    for one in right:
        assert same(one, right[-1][: len(one)])
    ends = [(at - 1) // BLOCK for at in range(CHUNK, 7 * PAGE, CHUNK)]
    differ = [at for at, kv in enumerate(right[-1]) if not same(kv, wrong[at])]
    assert differ == ends, "if vLLM has mended it, pages at the ends of parts can be stored"


def with_accepted_drafts(engine: Engine, whole: list[int], kv: npt.NDArray[np.float32]) -> None:
    """Pages of an answer, some of whose tokens are accepted drafts, some instead of others.

    Args:
        engine: drafts what it is told.
        whole: tokens of a prompt and its answer.
        kv: of them, all computed at once.
    """
    engine.ask("forget")
    engine.ask("guess", tokens=whole)
    before = engine.metric("vllm:spec_decode_num_accepted_tokens")
    found, _, _ = kept(engine, prompt(70, 5), 200)
    assert found == whole
    assert 50 < engine.metric("vllm:spec_decode_num_accepted_tokens") - before < 180
    engine.ask("forget")
    _, cached, got = kept(engine, whole, 1)
    assert cached == (len(whole) - 1) // PAGE * PAGE
    assert same(got[: cached // BLOCK], kv[: cached // BLOCK])
