"""Functional Flax models and the loading of Hugging Face checkpoints."""
