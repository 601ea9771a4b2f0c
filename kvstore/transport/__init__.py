"""Bytes of pages between nodes."""
