"""Host-side policy: requests, blocks, scheduling. Imports no JAX."""
