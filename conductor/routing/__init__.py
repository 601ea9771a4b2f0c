"""Routing: engines, their cached prefixes, the queue, policies and the decision log. Pure."""
