"""What can be seen of an engine: its pool and what changed there, its statistics."""
