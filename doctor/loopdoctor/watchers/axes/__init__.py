"""One axis taken for another."""
