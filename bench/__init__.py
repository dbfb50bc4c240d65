"""Benchmarks: each a script that prints a table and writes JSON to `bench/results/`."""
