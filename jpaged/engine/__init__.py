"""The `Engine` class, the loop that runs steps, and the state of each request."""
