"""Advice: which engines a fleet lacks, from their costs and the recent load. Pure."""

__all__ = ["advise"]
