"""The HTTP server for OpenAI's and Anthropic's APIs: `python -m jpaged.serve`."""
