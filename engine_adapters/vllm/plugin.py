"""vLLM's plugin: makes ``KVStoreConnector`` known by its name, and checks its options early.

vLLM calls :func:`register` in each of its processes (entry point ``vllm.general_plugins``), before
it reads its command line, whether a connector is used or not. It must not fail, and costs no import
of the connector.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

log = logging.getLogger("vllm.kvstore")

CONNECTOR: Final = "KVStoreConnector"
_MODULE: Final = "engine_adapters.vllm"
_MARK: Final = "_checked_by_kvstore"


def register() -> None:
    """Register the connector with vLLM; may be called several times."""
    try:
        from vllm.config.kv_transfer import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if CONNECTOR not in KVConnectorFactory._registry:  # noqa: SLF001 - there is no question
            KVConnectorFactory.register_connector(CONNECTOR, _MODULE, CONNECTOR)
        check_early(KVTransferConfig)
    except (ImportError, AttributeError, ValueError) as error:
        log.warning(
            "kvstore cannot register its connector with this vLLM (%s): add"
            ' "kv_connector_module_path":"%s" to --kv-transfer-config', error, _MODULE,
        )  # fmt: skip


def check_early(config: type[Any]) -> None:
    """Check the connector's options whenever vLLM makes its configuration of KV transfers.

    vLLM creates connectors in child processes, after it has loaded the model: a mistyped option
    would end the start minutes later, with the reason somewhere in the log. The configuration is
    made from the command line, in the process that the user started.

    Args:
        config: ``KVTransferConfig``. Its ``__post_init__`` raises :class:`ConfigError` for a wrong
            option of our connector; other connectors are not affected.
    """
    if getattr(config, _MARK, False):
        return
    checked: Callable[[Any], None] = config.__post_init__

    def post_init(made: Any) -> None:
        checked(made)
        if made.kv_connector == CONNECTOR:
            from engine_adapters.vllm.options import read_options

            read_options(made.kv_connector_extra_config)

    config.__post_init__ = post_init
    setattr(config, _MARK, True)
