"""The APIs of OpenAI and Anthropic: fields, answers, errors."""
