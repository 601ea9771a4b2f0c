"""The admin process of a node: HTTP, tokens, JSON, Prometheus; it asks the node for the rest.

The node starts it (:mod:`kvstore.server.http`); nothing else runs it, and it ends with the node.
"""
