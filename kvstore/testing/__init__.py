"""What users and our own tests check a store with: simulated time, processes and connections."""
