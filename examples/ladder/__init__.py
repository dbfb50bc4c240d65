"""From naive attention to one ragged launch, a rung a file: `python -m examples.ladder`."""
