"""nbworkbook: runs notebooks with parameters, by hand, overnight and on a cluster.

Its command is `nblib`.
"""

import logging

# On a CPU with AVX-512 BF16, bitsandbytes warns on import that an optional kernel could not be
# fetched. On a page that warning would be the first thing a reader sees.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
