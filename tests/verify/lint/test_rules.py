"""Each rule on its examples: it speaks about the wrong one, and none does about the right one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft.verify.lint import lint_file, lint_text
from weft.verify.lint.registry import rule
from weft.verify.lint.rules import RULES

PAGE = Path(__file__).parents[3] / "docs" / "lint_rules.md"
SECTION = r"## `([\w-]+)`\n\n(.*?)\n\n```python\n(.*?)```\n\n(.*?)\n\n```python\n(.*?)```\n"
# By rule: what the page says of it, the wrong example, the remedy, the right one.
EXAMPLES = {name: rest for name, *rest in re.findall(SECTION, PAGE.read_text(), re.DOTALL)}


def test_the_page_has_every_rule_in_its_words():
    told = {name: [one[0], one[2]] for name, one in EXAMPLES.items()}
    assert told == {one.name: [one.summary, f"Put right: {one.remedy}."] for one in RULES.values()}


@pytest.mark.parametrize("name", list(RULES))
def test_a_rule_sees_the_wrong_example_only(name: str):
    _, wrong, _, right = EXAMPLES[name]
    assert [p.rule for p in lint_text(wrong).problems] == [name]
    assert not lint_text(right).problems


@pytest.mark.parametrize("name", list(RULES))
def test_a_finding_has_place_reason_and_remedy(name: str):
    wrong = EXAMPLES[name][1]
    (problem,) = lint_text(wrong, "kernels.py").problems
    assert problem.file == "kernels.py" and problem.severity in ("error", "warning")
    source, carets = problem.lines()
    assert source == wrong.splitlines()[problem.line - 1].strip()
    assert set(carets.strip()) == {"^"} and len(carets) <= len(source)
    assert problem.message[-1] not in ".;" and problem.remedy
    assert str(problem).startswith(f"kernels.py:{problem.line}:{problem.column + 1}: ")


def test_names_are_taken_once():
    with pytest.raises(ValueError, match="device-scope"):
        rule("device-scope", "error", "", remedy="")(lambda program: ())


def test_lint_knows_every_primitive_that_orders_or_moves():
    """A primitive that lint takes for arithmetic would make it silent, or wrong."""
    from weft.language.registry import PRIMITIVES
    from weft.verify.lint.calls import HANDLERS
    from weft.verify.lint.signatures import signatures

    public = {name for name, primitive in PRIMITIVES.items() if primitive.public}
    arithmetic = {"is_near", "node", "timestamp"}
    assert {name for name in public if f"wl.{name}" not in HANDLERS} == arithmetic
    assert public <= set(signatures())


# ---------------------------------------------------------------------------------------------
# What a rule must not speak about, and what it must see through

CASES = {
    "a word of one's own at device scope": """
@triton.jit
def ticket(world, done):
    wl.notify(world, done, to=wl.rank(world), scope=wl.Scope.DEVICE)
    wl.wait(done, at_least=1, scope=wl.Scope.DEVICE)
""",
    "one's own word by a number that a branch has asked for": """
@triton.jit
def tell(world, done):
    if wl.rank(world) == 0:
        wl.notify(world, done, to=0, scope=wl.Scope.DEVICE)
""",
    "the own entry of a table": """
@triton.jit
def own(flags, rank):
    flag = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    tl.atomic_add(flag, 1, sem="relaxed", scope="gpu")
""",
    "a list that a loop walks down": """
@triton.jit
def walk(after, out):
    i = 0
    while tl.load(after + i) >= 0:
        i = tl.load(after + i)
    tl.store(out, i)
""",
    "a counter of work": """
@triton.jit
def work(counter, x, n):
    i = tl.atomic_add(counter, 1, sem="relaxed")
    while i < n:
        tl.store(x + i, tl.load(x + i))
        i = tl.atomic_add(counter, 1, sem="relaxed")
""",
    "a neighbour behind a comparison": """
@triton.jit
def push(world, x):
    if wl.rank(world) + 1 < wl.num_ranks(world):
        wl.put(world, x, 1.0, to=wl.rank(world) + 1)
""",
    "a neighbour behind an early return": """
@triton.jit
def push(world, x):
    right = wl.rank(world) + 1
    if right >= wl.num_ranks(world):
        return
    wl.put(world, x, 1.0, to=right)
""",
    "a neighbour brought back by a branch": """
@triton.jit
def push(world, x):
    right = wl.rank(world) + 1
    if right == wl.num_ranks(world):
        right = 0
    wl.put(world, x, 1.0, to=right)
""",
    "the other one of two": """
@triton.jit
def push(world, x):
    wl.put(world, x, 1.0, to=1 - wl.rank(world))
""",
    "a barrier on both sides of a branch": """
@triton.jit
def work(world, x):
    if wl.rank(world) == 0:
        wl.barrier(world)
        tl.store(x, 1.0)
    else:
        wl.barrier(world)
""",
    "an outer loop around a pipelined one": """
@triton.jit
def tiles(a, c, ready, n, k):
    i = tl.arange(0, 16)
    for tile in tl.range(0, n, num_stages=2):
        wl.wait(ready + tile, at_least=1)
        total = tl.zeros((16, 16), tl.float32)
        for step in tl.range(0, k, num_stages=3):
            part = tl.load(a + tile + step + i[:, None] + i[None, :])
            total = tl.dot(part, part, total)
        tl.store(c + i[:, None] + i[None, :], total)
""",
    "a branch that is not compiled": """
@triton.jit
def signal(ready, HOW: tl.constexpr):
    if HOW == "weak":
        while tl.load(ready) < 1:
            pass
    else:
        wl.wait(ready, at_least=1)


@triton.jit
def take(x, ready, out):
    signal(ready, "strong")
    tl.store(out, tl.load(x))
""",
    "a grid as large as the device": """
@triton.jit
def phases(x, arrived):
    wl.atomic_add(arrived, 1, scope=wl.Scope.DEVICE)
    wl.wait(arrived, at_least=tl.num_programs(0), scope=wl.Scope.DEVICE)
    tl.store(x, tl.load(x))


def launch(x, arrived, tiles):
    num = torch.cuda.get_device_properties(0).multi_processor_count
    grid = (min(num, tiles),)
    phases[grid](x, arrived)
""",
    "words that are new in every turn": """
@triton.jit
def exchange(world, ready):
    wl.notify(world, ready, 1, to=1 - wl.rank(world), op=wl.SignalOp.SET)
    wl.wait(ready, at_least=1)


def main(world):
    for _ in range(3):
        ready = world.signals(1)
        exchange[(1,)](world.arg, ready)
""",
    "a credit given back by a swap": """
@triton.jit
def send_credit(world, word, x):
    while tl.atomic_xchg(wl.at(world, word, 1 - wl.rank(world)), 1, sem="release", scope="sys") > 0:
        pass
    tl.store(x, tl.load(x))
""",
    "one word of the other one of two ranks": """
@triton.jit
def answer(world, x, ready, out):
    if wl.rank(world) == 0:
        wl.wait(ready, at_least=1)
        tl.store(out, tl.load(x))
    else:
        wl.put(world, x, 1.0, to=0)
        wl.notify(world, ready, 1, to=0, op=wl.SignalOp.SET)
""",
    "a put that its caller signals": """
@triton.jit
def begin(world, x, source):
    wl.put(world, x, source, to=1 - wl.rank(world))
""",
    "a host that resets before anybody may signal": """
@triton.jit
def exchange(world, ready):
    wl.notify(world, ready, to=1 - wl.rank(world))
    wl.wait(ready, at_least=1)


def main(world):
    ready = world.signals(1)
    ready.fill_(0)
    world.barrier()
    exchange[(1,)](world.arg, ready)
""",
    "a token that a stream takes, and that is set again": """
@triton.jit
def produce(world, rows, token):
    tl.store(rows, 1.0)
    wl.notify(world, token, 1, to=wl.rank(world), op=wl.SignalOp.SET)


def main(world, rows, there):
    token = world.signals(1, torch.int64)
    for _ in range(3):
        produce[(1,)](world.arg, rows, token)
        world.take_token(token)
        world.copy(there, rows)
""",
    "sums of tiles by atomics": """
@triton.jit
def split_k(c, x):
    i = tl.arange(0, 64)
    tl.store(x + i, 1.0)
    tl.atomic_add(c + i, tl.load(x + i))
""",
}


@pytest.mark.parametrize("what", list(CASES))
def test_it_is_silent_about(what: str):
    assert [str(p) for p in lint_text(CASES[what]).problems] == []


def rules_of(text: str) -> list[tuple[str, int]]:
    return [(p.rule, p.line) for p in lint_text(text).problems]


def test_a_helper_is_followed_and_named():
    text = """
@triton.jit
def raise_word(word):
    tl.atomic_xchg(word, 1, sem="release", scope="gpu")

@triton.jit
def kernel(world, ready, peer):
    raise_word(wl.at(world, ready, peer))
"""
    (problem,) = lint_text(text).problems
    assert (problem.rule, problem.line) == ("device-scope", 4)
    assert "raise_word() in line 8" in problem.via


def test_a_helper_of_another_file_is_followed(tmp_path: Path):
    header = "import triton\nimport triton.language as tl\nimport weft.language as wl\n"
    (tmp_path / "words.py").write_text(
        header + "@triton.jit\ndef spin(p):\n    while tl.load(p) < 1:\n        pass\n"
    )
    user = tmp_path / "user.py"
    user.write_text(
        header + "from words import spin\n@triton.jit\ndef kernel(p, x):\n    spin(p)\n"
    )
    (problem,) = lint_file(user).problems
    assert (problem.rule, problem.line) == ("plain-load-wait", 7)


def test_a_spin_that_reads_in_its_body():
    text = """
@triton.jit
def take(x, ready, out):
    seen = 0
    while seen < 1:
        seen = tl.atomic_add(ready, 0, sem="relaxed", scope="sys")
    tl.store(out, tl.load(x))
"""
    assert rules_of(text) == [("spin-without-acquire", 6)]


def test_a_spin_on_what_an_entry_of_a_table_points_to():
    text = """
@triton.jit
def word(table, rank):
    return tl.load(table + rank).to(tl.pointer_type(tl.int32))

@triton.jit
def take(x, table, rank, out):
    while tl.atomic_add(word(table, rank), 0, sem="acquire", scope="sys") != 1:
        pass
    while tl.load(tl.load(table + rank).to(tl.pointer_type(tl.int32))) != 2:
        pass
    tl.store(out, tl.load(x))
"""
    assert rules_of(text) == [("plain-load-wait", 10)]


def test_a_table_of_addresses_is_the_peers():
    text = """
@triton.jit
def push(flags, rank, ranks):
    flag = tl.load(flags + (rank + 1) % ranks).to(tl.pointer_type(tl.int32))
    tl.atomic_add(flag, 1, sem="release")
    wrong = tl.load(flags + rank + 1).to(tl.pointer_type(tl.int32))
    tl.store(wrong, 1)
"""
    assert rules_of(text) == [("device-scope", 5), ("peer-unmasked", 6)]


def test_what_a_launch_passes_is_known():
    text = """
@triton.jit
def add(word):
    tl.atomic_add(word, 1)

def main(world):
    words = world.signals(1)
    add[(1,)](world.peer(words, 1))
"""
    assert ("device-scope", 4) in rules_of(text)


def test_loads_of_a_loop_that_asks_for_stages_itself():
    text = """
@triton.jit
def add(x, ready, out, n):
    total = 0.0
    for i in tl.range(0, n, num_stages=4):
        wl.wait(ready + i, at_least=1)
        total += tl.load(x + i)
    tl.store(out, total)
"""
    assert rules_of(text) == [("wait-in-pipelined-loop", 6)]


def test_tables_as_torch_hands_them_out():
    text = """
@triton.jit
def push(tables, rank: tl.constexpr, world_size: tl.constexpr):
    tables = tables.to(tl.pointer_type(tl.uint64))
    for step in tl.static_range(world_size):
        theirs = tl.load(tables + (rank + step) % world_size).to(tl.pointer_type(tl.int32))
        tl.atomic_add(theirs, 1, sem="relaxed")


def main(tensor, group):
    handle = symm_mem.rendezvous(tensor, group)
    push[(1,)](handle.buffer_ptrs_dev, handle.rank, handle.world_size)
"""
    assert rules_of(text) == [("device-scope", 7), ("rank-as-constexpr", 12)]
