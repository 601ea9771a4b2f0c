"""What is chosen: which page leaves, which is written, who has how much."""
