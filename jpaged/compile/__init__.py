"""Compile an engine's programs: which programs exist, where they are stored, and which thread or
process compiles them."""
