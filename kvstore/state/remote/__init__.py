"""Pages that other nodes have: what is asked of the cluster, and what came of it; pure."""
