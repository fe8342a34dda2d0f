"""One folder per training method, each whole: `from nblib.methods import lrc`.

None imports another but by name.
"""
