"""kvstore-server: the socket, HTTP and events around a node."""
