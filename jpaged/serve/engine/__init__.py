"""The processes behind HTTP: the engine's and the tokenizer's, and how to talk to them."""
