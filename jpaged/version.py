"""The version, alone in a module so that the build reads it without importing JAX."""

__version__ = "0.1.0"
