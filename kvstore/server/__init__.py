"""The daemon ``kvstore-server``: socket, HTTP and events of a node."""
