"""What a run really did: its measured timeline, memory and messages, and the report of a run."""
