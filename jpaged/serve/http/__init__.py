"""The HTTP server: routes, bodies, connections, access, metrics."""
