"""Examples to read and to run from the repository's root; they are not installed."""
