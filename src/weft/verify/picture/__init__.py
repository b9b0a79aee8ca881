"""The space-time picture of an execution: who did what in which order, and what was missing.

`explain` makes one for each kind of finding; `terminal` and `page` draw them.
"""

from weft.verify.picture.layout import draw, explain, firsts
from weft.verify.picture.records import Arrow, Lane, Picture, Row

__all__ = ["Arrow", "Lane", "Picture", "Row", "draw", "explain", "firsts"]
