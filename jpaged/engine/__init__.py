"""The engine: its public face, its loop, and requests from what callers give to their outputs."""
