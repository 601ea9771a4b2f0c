"""A connector of somebody else beside ours in vLLM's ``MultiConnector``; moves nothing.

Like NIXL it answers a request that another engine will continue. If it is told to fail, it says of
each prompt once that it loads some of its tokens in the step that computes the others; then it says
that it could not.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

FAILED_TOKENS = 160


@dataclass
class Failing(KVConnectorMetadata):  # type: ignore[misc]
    """Blocks that are not loaded in a step."""

    blocks: set[int] = field(default_factory=set)


class SiblingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Has failed no prompt yet."""
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._fails = extra["fails"]
        self._failed: set[tuple[int, ...]] = set()
        self._blocks: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """Tokens that it will not load."""
        tokens = tuple(request.prompt_token_ids)
        fails = self._fails and tokens not in self._failed and len(tokens) > FAILED_TOKENS
        return (FAILED_TOKENS if fails else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        """Note the blocks."""
        if tokens:
            self._failed.add(tuple(request.prompt_token_ids))
            (table,) = blocks.get_block_ids()
            self._blocks.update(table[: tokens // 32])

    def build_connector_meta(self, output: Any) -> KVConnectorMetadata:
        """The blocks of this step."""
        blocks, self._blocks = self._blocks, set()
        return Failing(blocks)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """All of them."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Failing)
        return metadata.blocks

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """As NIXL says it."""
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        return False, {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "h"}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(self, *arguments: Any, **kwargs: Any) -> None:
        """Nothing to save."""

    def wait_for_save(self) -> None:
        """Nothing was saved."""
