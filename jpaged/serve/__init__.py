"""OpenAI's API over HTTP: `python -m jpaged.serve`. Knows only jpaged's public names."""
