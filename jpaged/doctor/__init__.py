"""Report what jpaged finds on this machine, and what it would use: `jpaged doctor`."""
