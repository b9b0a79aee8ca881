"""Ranks that call collective operators in different order: an error at once, and no hang.

Met in  models whose layers are skipped on some ranks
Raises  CallOrderError on the later rank
"""

RAISES = "CallOrderError"


def main(world):
    calls = ["all_gather", "all_reduce"]
    for name in calls if world.rank else reversed(calls):
        world.operator_call(name)  # BUG: the ranks disagree
