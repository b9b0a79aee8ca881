"""Going through every schedule of a small world that could make a difference.

`search` is the way in; docs/verifier.md says why it may leave out what it leaves out.
"""
