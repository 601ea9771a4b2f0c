"""Goal: beside other connectors, in ``MultiConnector``, engines live and tokens are right."""

from typing import Any

from tests.vllm.conftest import Node, Start
from tests.vllm.engines import Engine, transfer_config
from tests.vllm.test_tokens import HIT_TOKENS, HITS, PROMPTS


def beside(start: Start, node: Node, *, fails: bool = False) -> Engine:
    """An engine with :class:`tests.vllm.sibling.SiblingConnector` and ours."""
    sibling = {
        "kv_connector": "SiblingConnector", "kv_connector_module_path": "tests.vllm.sibling",
        "kv_role": "kv_both", "kv_connector_extra_config": {"fails": fails},
    }  # fmt: skip
    both: dict[str, Any] = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [sibling, transfer_config(node.address)]},
    }  # fmt: skip
    return start(None, kv_transfer_config=both, enable_prefix_caching=False)


def test_a_prefill_engine_says_what_both_connectors_have(node: Node, start: Start, plain: Engine):
    expected = plain.tokens(PROMPTS)
    engine = beside(start, node)
    asked = [{"tokens": one, "transfer": {"do_remote_decode": True}} for one in PROMPTS]
    answers = engine.generate(asked, max_tokens=1)

    told = answers[0]["transfer"]
    assert (told["do_remote_prefill"], told["remote_host"]) == (True, "h")
    assert (told["kvstore_pages"], told["kvstore_page_tokens"]) == (4, 64)
    engine.ask("settle")
    asked = [
        {"tokens": one, "transfer": answer["transfer"]}
        for one, answer in zip(PROMPTS, answers, strict=True)
    ]
    assert [answer["tokens"] for answer in engine.generate(asked)] == expected
    assert engine.metric(HITS) == HIT_TOKENS


def test_nothing_is_kept_that_was_computed_on_what_another_connector_could_not_load(
    node: Node, start: Start, plain: Engine
):
    prompts = [PROMPTS[0], PROMPTS[4]]
    expected = plain.tokens(prompts)
    engine = beside(start, node, fails=True)

    assert engine.tokens(prompts) == expected, "vLLM computes it again"
    assert "Recovered from KV load failure" in engine.log.read_text()
    engine.ask("settle")
    before = engine.metric(HITS)
    assert engine.tokens(prompts) == expected, "what ours has stored is right"
    assert engine.metric(HITS) - before == 256 + 448
