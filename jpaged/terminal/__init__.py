"""Answers, conversations and the calculator demo in the terminal."""
