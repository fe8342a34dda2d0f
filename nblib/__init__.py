"""nblib: the mechanisms behind the notebooks, one idea per file. README.md beside this file gives the order."""

import atexit
import gc
import logging

__version__ = "0.1.0"
atexit.register(gc.freeze)  # or a process ends with a search for garbage in all of torch, most of a second

# Whoever imports bitsandbytes (peft, the HF Trainer) on a CPU with AVX-512 BF16 hears on stderr that an optional
# kernel could not be fetched. Said here once for all, because it must be said before the import.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
