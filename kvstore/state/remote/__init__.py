"""Pages of other nodes: which of them have what, and the fetches that bring it here. Pure."""
