"""A connector of somebody else beside ours in vLLM's ``MultiConnector``; moves nothing.

Like NIXL it answers a request that another engine will continue.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class SiblingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module."""

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """Nothing is there."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        """Nothing to load."""

    def build_connector_meta(self, output: Any) -> KVConnectorMetadata:
        """Nothing to say."""
        return KVConnectorMetadata()

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
