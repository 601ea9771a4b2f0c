"""The Conductor: sends each request to the engines where its first token comes earliest.

An OpenAI-compatible front over prefill, decode and mixed engines. It keeps an index of who holds
which pages (from KV events), a bounded queue, and decides with one pure function. Its state is
soft: everything is rebuilt from registrations and events.
"""
