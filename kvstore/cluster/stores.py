"""Opens the store of a membership."""

from typing import Literal

from kvstore.cluster.access import StoreServers
from kvstore.cluster.store import RecordStore
from kvstore.protocol.errors import ConfigError

StoreKind = Literal["etcd", "redis"]


def open_store(kind: StoreKind, servers: StoreServers, cluster: str) -> RecordStore:
    """The store of a cluster, not connected.

    Args:
        kind: ``etcd`` or ``redis``.
        servers: its servers.
        cluster: name of the cluster.

    Raises:
        ConfigError: the client's package is not installed; names the extra.
    """
    try:
        if kind == "etcd":
            from kvstore.cluster.etcd import EtcdStore

            return EtcdStore(servers, cluster)
        from kvstore.cluster.redis_records import RedisStore

        return RedisStore(servers, cluster)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"cluster.membership={kind} needs a package that is not installed ({error.name}):"
            f" pip install '.[{kind}]' in the clone"
        ) from error
