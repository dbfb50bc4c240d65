"""Flax models of all supported families, and the loading of Hugging Face checkpoints."""
