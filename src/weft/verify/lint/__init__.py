"""Lint: what can be seen in a file without running it. `weft lint` is its front door."""

from weft.verify.lint.linter import Result, lint_file, lint_text, python_files

__all__ = ["Result", "lint_file", "lint_text", "python_files"]
