"""Programs that make things the package ships; no part of the package."""
