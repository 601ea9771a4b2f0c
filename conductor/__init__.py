"""The Conductor: routes each request to the engines that give its first token earliest.

An OpenAI-compatible router for prefill, decode and mixed engines. It has an index of the pages of
each engine and node (from KV events) and a bounded queue, and decides with one pure function. It
has no persistent state: everything is rebuilt from registrations and events.
"""

__all__ = ["config"]
