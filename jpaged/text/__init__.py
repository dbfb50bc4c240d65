"""Conversion between text and token ids, and chat templates."""
