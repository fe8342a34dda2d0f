"""nblib: the mechanisms behind the notebooks, one idea per file. README.md beside this file gives the order."""

import atexit
import gc
import logging

__version__ = "0.1.0"
atexit.register(gc.freeze)  # or a process ends with a search for garbage in all of torch, most of a second
USUAL = gc.get_threshold()  # models.py goes back to it: until torch is there, searches take a quarter of the start
gc.set_threshold(20_000, *USUAL[1:])

# On a CPU with AVX-512 BF16, bitsandbytes says while it is imported that an optional kernel could not be fetched.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
