"""The paper's evaluation: `python -m bench.paper --figure N`."""
