"""A schedule as a picture: each rank's engines as rows, what they do as bars, signals as arrows.

`chart_of` lays spans and signals out, wherever they come from; `page` draws them.
"""

from weft.tools.schedule.chart import Chart, chart_of
from weft.tools.schedule.page import page

__all__ = ["Chart", "chart_of", "page"]
