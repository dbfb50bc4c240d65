"""Parsers that split a model's answer into reasoning, content and tool calls."""
