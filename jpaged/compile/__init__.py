"""What programs an engine needs, where they are kept, and who compiles them."""
