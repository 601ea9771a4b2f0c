"""A discrete-event simulation of a cluster whose scheduler is the Conductor's own dispatcher.

::

    trace ──► arrivals ──► Dispatcher ──► fetch ──► prefill ──► handoff ──► decode ──► end
                              ▲          (links,   (engine)    (links)     (engine)
                              │           tiers)
                              └── prefixes, from what the simulated caches hold

Nothing but the simulated engine sees how long an answer of the trace is. One trace, fleet, policy
and seed is one simulation: everything is decided by them, and every number comes out the same.
"""

__all__ = ["command"]
