"""The node's side of the messages with its index process about the cluster."""

from collections.abc import Callable

from kvstore.cluster.asked import AskedDirectory
from kvstore.cluster.directory import index_settings
from kvstore.cluster.membership import StoreMembership
from kvstore.cluster.messages import (
    BeginCluster,
    ChildSettings,
    NodesFound,
    ToChild,
    encode_message,
    message_from_child,
)
from kvstore.config.cluster import ClusterConfig
from kvstore.index.process import IndexProcess


def index_process(cluster: ClusterConfig) -> IndexProcess:
    """The index process of a node, not started yet; with stores it answers :class:`ChildTalk`."""
    module = "kvstore.cluster.child" if cluster.stores else "kvstore.index.child"
    return IndexProcess(index_settings(cluster.index_pages_max), module)


class ChildTalk:
    """The messages between a node and an index process that runs ``kvstore.cluster.child``.

    Args:
        index: the process; after each start it gets all messages again.
        settings: its settings; called at each start.
    """

    def __init__(self, index: IndexProcess, settings: Callable[[], ChildSettings]) -> None:
        self._index = index
        self._settings = settings
        self._membership: StoreMembership | None = None
        self._directory: AskedDirectory | None = None
        index.began = self._began
        index.heard = self._heard

    def attach_membership(self, membership: StoreMembership) -> None:
        """Pass the process's messages about nodes to this membership."""
        self._membership = membership

    def attach_directory(self, directory: AskedDirectory) -> None:
        """Pass the process's messages about pages to this directory."""
        self._directory = directory

    def tell(self, message: ToChild) -> None:
        """Send the process a message; dropped if it is away."""
        self._index.aside(encode_message(message))

    def _began(self) -> None:
        self.tell(BeginCluster(self._settings()))
        if self._membership is not None:
            self._membership.began()
        if self._directory is not None:
            self._directory.began()

    def _heard(self, body: bytes) -> None:
        message = message_from_child(body)
        if not isinstance(message, NodesFound):
            if self._directory is not None:
                self._directory.heard(message)
        elif self._membership is not None:
            self._membership.heard(message)
