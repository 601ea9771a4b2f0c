"""The admin process of a node: HTTP, tokens, JSON, Prometheus; gets all data from the node.

Only the node starts it (:mod:`kvstore.server.http`), and it ends with the node.
"""

__all__: list[str] = []
