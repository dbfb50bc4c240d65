"""Calibration of the FP8 scales of a KV cache with a text."""
