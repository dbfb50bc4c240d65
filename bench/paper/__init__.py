"""The figures of the PagedAttention paper, made with jpaged: `python -m bench.paper --figure N`."""
