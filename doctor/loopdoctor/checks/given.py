"""What a model is given, and taken for something else: D31, S45, S47, F101, F102 and F104.

A code for a number, the farthest for the nearest, an angle for a number that has ends. Watchers noted them step by
step; here it is asked whether they are a habit.

Footgun: each of these lines is right somewhere (watchers/ says where), so these checks warn.
"""

import math

CIRCLES = {"-pi to pi": (-math.pi, math.pi), "0 to 2 pi": (0.0, 2 * math.pi), "0 to 360": (0.0, 360.0)}
CIRCLES |= {"-180 to 180": (-180.0, 180.0)}
END, OTHER = 0.016, 0.035  # parts of a circle that lack at one end, and at the other
SECTORS, SECTOR, LEAST = 8, 0.04, 48  # of a circle, the share of one; targets
