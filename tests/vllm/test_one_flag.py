"""One flag without a module path or a policy, and what a wrong one does.

Every other test here starts its engines with that flag too.
"""

import json

import pytest

from tests.conftest import wait_for
from tests.vllm.engines import ENGINE, ENVIRONMENT, START_WAIT_S, transfer_config

BLOCK_TOKENS = ENGINE["block_size"]


def test_the_flag_needs_no_module_and_no_policy():
    assert set(transfer_config("")) == {"kv_connector", "kv_role", "kv_connector_extra_config"}


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"page_token": 64}, "unknown key page_token; did you mean page_tokens?"),
        (
            {"page_tokens": 48},
            f"page_tokens: 48 is not a multiple of the engine's block of {BLOCK_TOKENS} tokens",
        ),
    ],
    ids=["by itself", "beside a flag of vLLM"],
)
def test_a_wrong_option_ends_the_start_in_seconds_with_the_sentence_last(
    python, model, spawn, option, sentence
):
    flag = transfer_config("unix:///nowhere.sock", extra=option)
    process = spawn(
        [
            str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--host", "127.0.0.1", "--port", "0", "--dtype", str(ENGINE["dtype"]),
            "--block-size", str(BLOCK_TOKENS),
            "--enforce-eager", "--kv-transfer-config", json.dumps(flag),
        ],
        env={**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )  # fmt: skip
    assert wait_for(lambda: process.returncode is not None, START_WAIT_S), process.report()
    said = process.stderr.rstrip()
    assert process.returncode != 0
    assert f"kv_connector_extra_config: {sentence}" in said.splitlines()[-1], said
    assert "EngineCore" not in process.report(), "no engine was started"
