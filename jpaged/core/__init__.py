"""Scheduling on the host: requests, KV blocks and step plans. Does not import JAX."""
