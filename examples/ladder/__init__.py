"""Attention in five versions (rungs), from naive to one ragged launch: `python -m examples.ladder`.

Each rung is one file.
"""
