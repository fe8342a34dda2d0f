"""One training method per file; none imports another unless it openly builds on it."""
