"""."""

CHECKS: list = []
