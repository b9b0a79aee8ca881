"""Comments that allow exceptions, and files that are not what lint expects."""

from __future__ import annotations

import sys

from weft.verify.lint import lint_file, lint_text

SPIN = """
@triton.jit
def take(x, ready, out):
    {above}
    while tl.load(ready) < 1:{behind}
        pass
    tl.store(out, tl.load(x))
"""


def found(above: str = "pass", behind: str = "") -> list[tuple[str, int]]:
    text = SPIN.format(above=above, behind=behind)
    return [(problem.rule, problem.line) for problem in lint_text(text).problems]


def test_without_a_comment():
    assert found() == [("plain-load-wait", 5)]


def test_a_comment_with_a_reason_silences_its_line():
    assert found(behind="  # weft: allow plain-load-wait: a test of the checker") == []


def test_a_comment_above_silences_the_next_line_of_code():
    assert found(above="# weft: allow plain-load-wait: why not\n    # and more of it\n") == []


def test_without_a_reason_it_silences_and_is_a_finding_itself():
    assert found(behind="  # weft: allow plain-load-wait") == [("allow-without-reason", 5)]
    assert found(behind="  # weft: allow plain-load-wait:  ") == [("allow-without-reason", 5)]


def test_of_another_rule_it_silences_nothing():
    assert found(behind="  # weft: allow volatile-wait: no") == [
        ("plain-load-wait", 5),
        ("unused-allow", 5),
    ]


def test_of_no_rule_at_all():
    assert ("allow-without-reason", 5) in found(behind="  # weft: allow: everything")
    problems = lint_text(SPIN.format(above="pass", behind="  # weft: allow spins: x")).problems
    assert "no rule 'spins'" in problems[-1].message


def test_several_rules_in_one_comment():
    line = '    tl.atomic_add(wl.at(world, x, 1), 1, sem="release"){}\n'
    head = "@triton.jit\ndef f(world, x):\n    tl.store(x + tl.arange(0, 64), 1.0)\n"
    both = "  # weft: allow device-scope, release-without-barrier: planted"
    assert len(lint_text(head + line.format("")).problems) == 2
    assert lint_text(head + line.format(both)).problems == []


def test_an_allowance_in_a_string_is_none():
    text = 'X = "# weft: allow plain-load-wait"\n'
    assert lint_text(text).problems == []


def test_a_file_that_does_not_parse():
    (problem,) = lint_text("def f(:\n", "broken.py").problems
    assert (problem.rule, problem.severity, problem.line) == ("syntax-error", "error", 1)
    assert str(problem).startswith("broken.py:1:1: error: ")


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "latin.py"
    path.write_bytes(b"# caf\xe9\n")
    (problem,) = lint_file(path).problems
    assert problem.rule == "syntax-error" and "UTF-8" in problem.message


def test_files_without_kernels():
    for text in ("", "import os\n\nprint(os.getcwd())\n", "import weft\nworld = weft.init()\n"):
        result = lint_text(text)
        assert result.ok and result.kernels == []


def test_a_comment_speaks_for_its_whole_statement():
    text = """
@triton.jit
def announce(world, ready, peer):
    tl.atomic_add(
        wl.at(world, ready, peer),
        1,
        sem="release",
    )  {}
"""
    assert [problem.line for problem in lint_text(text.format("")).problems] == [4]
    assert not lint_text(text.format("# weft: allow device-scope: one node, one GPU")).problems


def test_a_comment_at_the_head_does_not_speak_for_the_body():
    text = """
@triton.jit
def announce(world, ready, n):  # weft: allow device-scope: only here
    for peer in range(n):
        tl.atomic_add(wl.at(world, ready, peer), 1)
"""
    assert [problem.rule for problem in lint_text(text).problems] == [
        "device-scope",
        "unused-allow",
    ]


def test_an_expression_too_deep_to_follow_is_told():
    text = "@triton.jit\ndef f(x):\n    tl.store(x, {})\n"
    result = lint_text(text.format("+".join(["x"] * 600)))
    assert result.ok and (not result.notes or "nested too deeply" in result.notes[0])
    result = lint_text(text.format("+".join(["x"] * 9000)))
    if sys.version_info >= (3, 11):  # whose parser counts how deep it is
        (problem,) = result.problems
        assert problem.rule == "syntax-error" and "recursion" in problem.message
    else:
        assert "nested too deeply" in result.notes[0]
