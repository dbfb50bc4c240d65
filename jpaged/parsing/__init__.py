"""What an answer's text consists of: reasoning, content and tool calls."""
