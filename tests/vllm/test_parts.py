"""Parts of the connector with vLLM's own classes around them; no engine is needed to prove them."""

from collections.abc import Iterator

import pytest

from tests.vllm.engines import Engine, Imported


@pytest.fixture(scope="module")
def parts(imported: Imported, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The process of :mod:`tests.vllm.parts_process`."""
    made = Engine(imported, tmp_path_factory.mktemp("parts") / "log", "tests.vllm.parts_process")
    try:
        yield made
    finally:
        made.close()


def test_blocks_of_one_size_that_backends_pack_otherwise_have_other_names(parts: Engine):
    ways = [
        parts.ask("names", backends={}),
        parts.ask("names", backends={"full_attention": "B12X"}),
        # As B12X asks for it, where vLLM chooses it without being told.
        parts.ask("names", backends={}, num_head_slots=2, state_content_bytes=8 * 64 * 2),
    ]

    assert len({way["bytes"] for way in ways}) == 1, "nothing else tells them apart"
    assert len({way["name"] for way in ways}) == 3
    assert parts.ask("names", backends={}) == ways[0]


def test_the_tier_shares_nothing_between_gpus_for_which_vllm_takes_other_backends(parts: Engine):
    hopper, blackwell, again = (
        parts.ask("tier_names", generation=one)["name"] for one in ([9, 0], [12, 0], [9, 0])
    )

    assert hopper == again != blackwell


def test_beside_nixl_the_layout_of_blocks_is_left_to_it(parts: Engine):
    assert parts.ask("layout", connectors=["KVStoreConnector"])["layout"] == "BLHNC"
    both = ["NixlConnector", "KVStoreConnector"]
    assert parts.ask("layout", connectors=both)["layout"] == "LBHNC"


def test_with_states_the_layout_of_blocks_is_left_to_vllm(parts: Engine):
    assert parts.ask("layout", connectors=["KVStoreConnector"], hybrid=True)["layout"] is None


def test_the_layouts_whose_tensors_are_tested_are_those_of_vllm(parts: Engine):
    from tests.engine_adapters.vllm.test_tensors import LAYOUTS

    assert parts.ask("layouts")["orders"] == {name: [*order] for name, order in LAYOUTS.items()}


def test_only_images_that_vllm_names_by_their_content_have_names_of_ours(parts: Engine):
    """With settings of the processor vLLM hashes the client's name, which looks like a content."""
    content = "0f" * 32
    for settings in ({}, {"size": 448}):
        answer = parts.ask("identifiers", names=[None, "the logo", content], settings=settings)
        assert answer["usable"] == [True, False, False], settings
    assert parts.ask("reached")["name"] == "engine_adapters.vllm.plugin"
