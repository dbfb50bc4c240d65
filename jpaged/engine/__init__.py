"""The `Engine` class, the loop of steps, and the path of a request from prompt to outputs."""
