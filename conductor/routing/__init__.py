"""Who serves which request: engines, the prefixes they need not compute, the queue, the choice."""
