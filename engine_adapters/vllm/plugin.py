"""vLLM's plugin: makes ``KVStoreConnector`` known by its name, and checks early what it can.

vLLM calls :func:`register` in each of its processes (entry point ``vllm.general_plugins``), before
it reads its command line, whether a connector is used or not. It must not fail, and costs no import
of the connector.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

log = logging.getLogger("vllm.kvstore")

CONNECTOR: Final = "KVStoreConnector"
_MULTI: Final = "MultiConnector"
_MODULE: Final = "engine_adapters.vllm"
_MARK: Final = "_checked_by_kvstore"


def register() -> None:
    """Register the connector with vLLM; may be called several times."""
    try:
        from vllm.config.kv_transfer import KVTransferConfig
        from vllm.config.vllm import VllmConfig
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if CONNECTOR not in KVConnectorFactory._registry:  # noqa: SLF001 - there is no question
            KVConnectorFactory.register_connector(CONNECTOR, _MODULE, CONNECTOR)
        check_early(KVTransferConfig, VllmConfig)
    except (ImportError, AttributeError, ValueError) as error:
        log.warning(
            "kvstore cannot register its connector with this vLLM (%s): add"
            ' "kv_connector_module_path":"%s" to --kv-transfer-config', error, _MODULE,
        )  # fmt: skip


def check_early(transfer: type[Any], whole: type[Any]) -> None:
    """Check the connector's options and the model whenever vLLM makes its configuration.

    vLLM creates connectors in child processes, after it has loaded the model: a mistyped option or
    a model that cannot be stored would end the start minutes later, with the reason somewhere in
    the log. The configuration is made from the command line, in the process that the user started.

    Args:
        transfer: ``KVTransferConfig``. Its ``__post_init__`` raises :class:`ConfigError` for a
            wrong option of our connector; other connectors are not affected.
        whole: ``VllmConfig``; the same for a model that our connector does not support. Those of
            ours in a ``MultiConnector`` are told so there: vLLM's ``LLM`` makes the other
            configuration before it loads plugins.
    """
    _check_after_init(transfer, _check_options)
    _check_after_init(whole, _check_whole)


def _check_options(made: Any) -> None:
    if made.kv_connector == CONNECTOR:
        from engine_adapters.vllm.options import read_options

        read_options(made.kv_connector_extra_config)


def _check_whole(made: Any) -> None:
    transfer = made.kv_transfer_config
    inside = transfer is not None and transfer.kv_connector == _MULTI
    given = _options_inside(transfer.kv_connector_extra_config) if inside else []
    if given:
        from engine_adapters.vllm.options import read_options
        from kvstore.protocol.errors import ConfigError

        for one in given:
            read_options(one)
        if len(given) > 1:
            raise ConfigError(
                f"kv_connector_extra_config: connectors: {len(given)} are {CONNECTOR}: they would"
                " store every page twice, and have one name at their node; leave one"
            )
    if given or (transfer is not None and transfer.kv_connector == CONNECTOR):
        from engine_adapters.vllm.support import check_model

        check_model(made)


def _options_inside(multi: dict[str, Any]) -> list[dict[str, Any]]:
    """Options of our connectors in a ``MultiConnector``, with a note of where they are in them."""
    found: list[dict[str, Any]] = []
    for child in multi.get("connectors") or ():
        if child.get("kv_connector") == CONNECTOR:
            given = child.get("kv_connector_extra_config") or {}
            child["kv_connector_extra_config"] = {**given, "in_multi_connector": True}
            found.append(child["kv_connector_extra_config"])
    return found


def _check_after_init(config: type[Any], check: Callable[[Any], None]) -> None:
    if getattr(config, _MARK, False):
        return
    finish: Callable[[Any], None] = config.__post_init__

    def post_init(made: Any) -> None:
        finish(made)
        check(made)

    config.__post_init__ = post_init
    setattr(config, _MARK, True)
