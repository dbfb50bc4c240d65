"""Example programs. Run them from the root of the repository; pip does not install them."""
