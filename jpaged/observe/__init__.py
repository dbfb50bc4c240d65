"""What an engine says of itself: statistics, and the pool as text."""
