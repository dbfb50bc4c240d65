"""Development tools that create files which ship with jpaged; the package does not import them."""
