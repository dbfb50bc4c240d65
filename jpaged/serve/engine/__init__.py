"""The engine process, the tokenizing process, and the clients of both in the HTTP process."""
