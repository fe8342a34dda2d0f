"""experiments: one module per record in outputs/published, each run once and kept.

README.md lists them.
"""
