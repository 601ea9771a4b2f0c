"""The node's state, pure: batches of events in, actions out; no I/O, clock or randomness."""

__all__ = ["metering"]
