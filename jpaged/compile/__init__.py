"""Compilation of an engine's programs: recipes, stores, builder and worker processes."""
