"""What requests may ask: each field is declared once; reading, checks and schema come of that."""
