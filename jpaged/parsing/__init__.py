"""Parsing of answers: reasoning, content and tool calls."""
