"""Request fields and response formats of OpenAI's and Anthropic's APIs."""
