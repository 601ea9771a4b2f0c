"""Transports: the bytes of pages between the memories of two nodes."""
