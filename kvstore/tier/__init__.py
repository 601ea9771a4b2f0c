"""Byte movers, one file a medium."""
