"""`python -m weft VERB`, the same as `weft VERB`."""

from weft.tools.main import entry

entry()
