"""The client library: spaces, reads and writes, through a link to a node or embedded."""

__all__ = ["jobs", "results", "space", "store"]
