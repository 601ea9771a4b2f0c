"""The page index: slots, prefix trees, spaces, and the sessions that use them."""
