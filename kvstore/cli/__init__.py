"""The command ``kvstore``: inspect and operate a node."""

from kvstore.cli.command import main

__all__ = ["main"]
