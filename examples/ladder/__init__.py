"""From naive attention to one ragged launch, one step per file: `python -m examples.ladder`."""
