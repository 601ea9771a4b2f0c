"""Advice: which engines a fleet is short of, from their costs and the recent load. Pure."""
