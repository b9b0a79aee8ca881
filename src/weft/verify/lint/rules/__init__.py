"""The rules, a file for each family, which registers its own."""

from weft.verify.lint.registry import RULES
from weft.verify.lint.rules import loops, peers, releases, scopes, spins

__all__ = ["RULES", "loops", "peers", "releases", "scopes", "spins"]
