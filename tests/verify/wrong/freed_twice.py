"""Symmetric memory that is freed twice.

Met in  clean-up code that runs both at the end of a step and at the end of the program
Raises  NotSymmetricError on every rank: it is no longer on the heap
"""

from pieces import row

RAISES = "NotSymmetricError"


def main(world):
    x = row(world)
    world.free(x)
    world.free(x)  # BUG: again
