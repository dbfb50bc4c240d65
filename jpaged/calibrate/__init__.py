"""Scales for a KV cache in FP8, from a text."""
