"""The daemon ``kvstore-server``: socket, HTTP and events of a node."""

__all__ = [
    "answers", "channel", "client", "environment", "installed", "metrics", "nodes",
    "operations", "processes", "refusal", "tenants",
]  # fmt: skip
