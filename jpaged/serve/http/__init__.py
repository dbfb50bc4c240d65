"""The HTTP server: routes, request bodies, connections, access control and metrics."""
