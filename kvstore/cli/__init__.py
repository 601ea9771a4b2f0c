"""The command ``kvstore``: ask a node what it holds and why, and operate it."""

from kvstore.cli.command import main

__all__ = ["main"]
