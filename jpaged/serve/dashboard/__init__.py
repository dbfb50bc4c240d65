"""The dashboard at `/`, which draws the KV cache pool from samples of the engine's process."""
