"""Examples to run from the root of the repository; they are not installed."""
