"""Statistics of an engine, and reports about the blocks of the KV pool and their changes."""
