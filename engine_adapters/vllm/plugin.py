"""vLLM's plugin: makes ``KVStoreConnector`` known by its name, and checks early what it can.

vLLM calls :func:`register` in each of its processes (entry point ``vllm.general_plugins``), before
it reads its command line, whether a connector is used or not. It must not fail, and costs no import
of the connector.
"""

import logging
import os
import secrets
import weakref
from collections.abc import Callable
from typing import Any, Final

log = logging.getLogger("vllm.kvstore")

CONNECTOR: Final = "KVStoreConnector"
_MULTI: Final = "MultiConnector"
_MODULE: Final = "engine_adapters.vllm"
_MARK: Final = "_checked_by_kvstore"


class LiveConnectors:
    """The connectors of this process, of which an engine has one for each role.

    vLLM's ``MultiConnector`` gives its connectors one description of the KV cache. Without the
    plugin (``kv_connector_module_path``) nothing else shows that two of them are ours.
    """

    def __init__(self) -> None:
        self._engines: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()

    def join(self, connector: Any, role: Any, kv_cache_config: Any) -> None:
        """A connector is made for this engine.

        Args:
            connector: it is forgotten when nothing else refers to it.
            role: ``KVConnectorRole``.
            kv_cache_config: the engine's ``KVCacheConfig``.

        Raises:
            ConfigError: the engine has one of this role.
        """
        for known_role, known in self._engines.values():
            if known_role is role and known is kv_cache_config:
                raise _doubled(2)
        self._engines[connector] = role, kv_cache_config

    def leave(self, connector: Any) -> None:
        """A connector is shut down."""
        self._engines.pop(connector, None)


def server_secret() -> str:
    """A secret of this server's processes; the first of them makes it, the others inherit it."""
    return os.environ.setdefault("KVSTORE_VLLM_SECRET", secrets.token_hex(16))


def register() -> None:
    """Register the connector with vLLM; may be called several times."""
    server_secret()
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
        whole: ``VllmConfig``; the same for options that do not fit the rest of it, and for a model
            that our connector does not support. Those of ours in a ``MultiConnector`` are told so
            there: vLLM's ``LLM`` makes the other configuration before it loads plugins.
    """
    _check_after_init(transfer, _check_options)
    _check_after_init(whole, _check_whole)


def _check_options(made: Any) -> None:
    if made.kv_connector == CONNECTOR:
        from engine_adapters.vllm.options import read_options

        read_options(made.kv_connector_extra_config)


def _check_whole(made: Any) -> None:
    transfer = made.kv_transfer_config
    ours: list[dict[str, Any]] = []
    if transfer is not None and transfer.kv_connector == CONNECTOR:
        ours = [transfer.kv_connector_extra_config]
    elif transfer is not None and transfer.kv_connector == _MULTI:
        ours = _options_inside(transfer.kv_connector_extra_config)
    if ours:
        from engine_adapters.vllm.names import note_config
        from engine_adapters.vllm.options import check_against, read_options
        from engine_adapters.vllm.support import check_model

        for one in ours:
            check_against(read_options(one), made)
        if len(ours) > 1:
            raise _doubled(len(ours))
        check_model(made)
        if made.model_config is not None:
            note_config(made.model_config)
        if getattr(made.model_config, "multimodal_config", None) is not None:
            mark_images()


def mark_images() -> None:
    """Let vLLM note which requests have images, audio and videos named by their content only.

    vLLM names them in the process that takes the request, where it makes its configuration, too.
    The connector believes no name without that note, so a process without it, or a version of vLLM
    that names them elsewhere, costs hits only. The names themselves stay as they are.
    """
    try:
        from vllm.multimodal.processing.inputs import ProcessorInputs
        from vllm.v1.engine.input_processor import InputProcessor
    except ImportError as error:
        log.warning("kvstore: no KV of images, audio and videos is stored or loaded: %s", error)
        return
    if getattr(ProcessorInputs, _MARK, False):
        return
    from engine_adapters.vllm.names import mark_contents, note_contents

    identify: Callable[..., dict[str, list[str]]] = ProcessorInputs.get_mm_hashes
    process: Callable[..., Any] = InputProcessor.process_inputs

    def get_mm_hashes(inputs: Any, *given: Any, **named: Any) -> dict[str, list[str]]:
        return mark_contents(identify(inputs, *given, **named), inputs.mm_uuid_items or {})

    def process_inputs(processor: Any, *given: Any, **named: Any) -> Any:
        request = process(processor, *given, **named)
        note_contents(request, server_secret())
        return request

    ProcessorInputs.get_mm_hashes = get_mm_hashes
    InputProcessor.process_inputs = process_inputs
    setattr(ProcessorInputs, _MARK, True)


def _doubled(count: int) -> Exception:
    from kvstore.protocol.errors import ConfigError

    return ConfigError(
        f"kv_connector_extra_config: connectors: {count} are {CONNECTOR}: they would store every"
        " page twice, and have one name at their node; leave one"
    )


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
