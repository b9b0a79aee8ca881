"""Walks a kernel's text once, from the top, and writes down what it does: a list of `Op`.

Calls of the file's own device functions are followed; both sides of a branch are; a loop's body is
walked once. What a call means is in `calls.py`, which is handed over.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from weft.verify.lint.source import Device, Source, fold
from weft.verify.lint.values import (
    NOTHING,
    NUM_RANKS,
    OFFSET_RANK,
    RANK,
    UNCHECKED,
    Frame,
    Op,
    Value,
    exactly,
    join,
    known,
    plain,
)

MAX_DEPTH = 8
MAX_OPS = 4000
RANK_NAMES = {"rank", "my_rank", "cur_rank", "this_rank", "rank_id", "my_pe", "me", "RANK"}
COUNT_NAMES = {"num_ranks", "world_size", "ranks", "n_ranks", "nranks", "npes", "WORLD_SIZE"}


def parameter(name: str) -> Value:
    if name in RANK_NAMES:
        return Value(form=RANK, traits=frozenset({RANK}), params=frozenset({name}))
    if name in COUNT_NAMES:
        return Value(form=NUM_RANKS, traits=frozenset({NUM_RANKS}), params=frozenset({name}))
    return Value(roots=frozenset({name}), params=frozenset({name}))


class Walker:
    """Walks one kernel; `env` holds the variables of the function that it is in.

    `call` evaluates a call, as `calls.call` does.
    """

    def __init__(self, source: Source, call: Callable[[Walker, ast.Call], Value]) -> None:
        self.source = source
        self.call = call
        self.ops: list[Op] = []
        self.path: list[Frame] = []
        self.env: dict[str, Value] = {}
        self.returned: list[Value] = []
        self.within: list[Device] = []
        self.visited: set[str] = set()
        self.compared: dict[int, tuple[Value, ...]] = {}

    def enter(self, device: Device, given: Mapping[str, Value]) -> list[Op]:
        self.env = {name: given.get(name, parameter(name)) for name in device.names}
        self.within = [device]
        self.visited.add(device.name)
        self.block(device.node.body)
        return self.ops

    # -- statements ---------------------------------------------------------------------------

    def block(self, statements: Sequence[ast.stmt]) -> None:
        depth = len(self.path)
        for statement in statements:
            getattr(self, f"do_{type(statement).__name__}", self.do_other)(statement)
        del self.path[depth:]  # what an early return has guarded ends with the block

    def do_other(self, statement: ast.stmt) -> None:
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.expr):
                self.eval(child)

    def do_Expr(self, statement: ast.Expr) -> None:
        before = len(self.ops)
        self.eval(statement.value)
        for op in self.ops[before:]:
            if op.node is statement.value:
                op.used = False

    def do_Assign(self, statement: ast.Assign) -> None:
        value = self.eval(statement.value)
        for target in statement.targets:
            self.bind(target, value)

    def do_AnnAssign(self, statement: ast.AnnAssign) -> None:
        if statement.value is not None:
            self.bind(statement.target, self.eval(statement.value))

    def do_AugAssign(self, statement: ast.AugAssign) -> None:
        old, change = self.eval(statement.target), self.eval(statement.value)
        self.bind(statement.target, self.arithmetic(statement.op, old, change))

    def bind(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self.env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for index, part in enumerate(target.elts):
                inside = value.items[index] if index < len(value.items) else plain(value)
                self.bind(part, inside)

    def do_Return(self, statement: ast.Return) -> None:
        self.returned.append(self.eval(statement.value) if statement.value else NOTHING)

    def do_If(self, statement: ast.If) -> None:
        test = self.eval(statement.test)
        if isinstance(test.number, bool):
            # Decided while compiling.
            self.block(statement.body if test.number else statement.orelse)
            return
        before = dict(self.env)
        with self.frame("if", statement, test, own=self._rank_that(statement.test)):
            self.block(statement.body)
        after_if, self.env = self.env, before
        with self.frame("else", statement, test):
            self.block(statement.orelse)
        if _leaves(statement.body):
            self.path.append(Frame("else", statement, test))
        elif statement.orelse and _leaves(statement.orelse):
            self.env = after_if
            self.path.append(Frame("if", statement, test))
        else:
            self.env = _joined(after_if, self.env)
        if test.has(OFFSET_RANK):  # `if peer >= n: peer = 0` brings it back
            for name in _assigned([*statement.body, *statement.orelse]) & self.env.keys():
                self.env[name] = self.env[name].without(OFFSET_RANK)

    def _rank_that(self, test: ast.expr) -> int | None:
        """K, where the test says that the own rank is K."""
        sides = self.compared.get(id(test), ())
        if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq)):
            return None
        numbers = [side.number for side in sides if isinstance(side.number, int)]
        return numbers[0] if numbers and any(side.form == RANK for side in sides) else None

    def own_rank(self) -> int | None:
        """The own rank's number, where a branch around this place has asked for it."""
        found = [frame.own for frame in self.path if frame.own is not None]
        return found[-1] if found else None

    def do_For(self, statement: ast.For) -> None:
        options: dict[str, Value] = {}
        if isinstance(statement.iter, ast.Call):
            positional = [self.eval(argument) for argument in statement.iter.args]
            options = {w.arg: self.eval(w.value) for w in statement.iter.keywords if w.arg}
            reach = plain(*positional)
            options["end"] = positional[1 if len(positional) > 1 else 0] if positional else NOTHING
        else:
            reach = self.eval(statement.iter)
        # The end of a range goes into none of its numbers.
        variable = plain(reach).without(NUM_RANKS, OFFSET_RANK)
        before = dict(self.env)
        self._forget(statement.body)
        self.bind(statement.target, variable)
        with self.frame("for", statement, variable, options):
            self.block(statement.body)
        self.env = _joined(before, self.env)

    def do_While(self, statement: ast.While) -> None:
        first = len(self.ops)
        self._forget(statement.body)
        test = self.eval(statement.test)
        in_test = self.ops[first:]
        before = dict(self.env)
        with self.frame("while", statement, test):
            self.block(statement.body)
        self.env = _joined(before, self.env)
        self._find_polls(statement, in_test, self.ops[first + len(in_test) :])

    def _forget(self, body: Sequence[ast.stmt]) -> None:
        """What a loop changes is not, in its body, exactly what it was before."""
        for name in _assigned(body) & self.env.keys():
            self.env[name] = replace(self.env[name], number=None, form="")

    def _find_polls(self, loop: ast.While, in_test: list[Op], in_body: list[Op]) -> None:
        """Mark the reads that the loop repeats until another program changes what they see."""
        changed = _assigned(loop.body)
        steering = {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)}
        fed = [
            statement.value
            for statement in loop.body
            if isinstance(statement, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id in steering for t in statement.targets)
        ]
        again = {id(node) for value in fed for node in ast.walk(value)}
        candidates = in_test + [op for op in in_body if id(op.node) in again]
        read = {root for op in candidates for root in op.pointer.roots}
        for op in candidates:
            names = {n.id for n in ast.walk(op.node) if isinstance(n, ast.Name)}
            if op.kind == "load" and any(f"{root}[]" in read for root in op.pointer.roots):
                continue  # the entry of a table: the address of what the loop looks at
            if op.can_poll and not names & changed and not _stores_to(op.pointer, in_body):
                op.poll = loop

    def do_With(self, statement: ast.With) -> None:
        self.block(statement.body)

    def do_FunctionDef(self, statement: ast.FunctionDef) -> None:
        pass

    @contextmanager
    def frame(
        self, kind: str, node: ast.AST, test: Value, options: dict[str, Value] | None = None,
        own: int | None = None,
    ) -> Iterator[None]:  # fmt: skip
        depth = len(self.path)
        self.path.append(Frame(kind, node, test, options or {}, own=own))
        yield
        del self.path[depth:]

    # -- expressions --------------------------------------------------------------------------

    def eval(self, node: ast.expr | None) -> Value:
        if node is None:
            return NOTHING
        return getattr(self, f"eval_{type(node).__name__}", self.eval_other)(node)

    def eval_other(self, node: ast.expr) -> Value:
        children = [self.eval(c) for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr)]
        return plain(*children)

    def eval_Constant(self, node: ast.Constant) -> Value:
        return known(node.value)

    def eval_Name(self, node: ast.Name) -> Value:
        if node.id in self.env:
            return self.env[node.id]
        if device := self.source.device(self.source.spelling(node)):
            return known(device)  # a hook: called where it arrives
        constant = self.source.constants.get(node.id)
        return NOTHING if constant is None else known(constant)

    def eval_Tuple(self, node: ast.Tuple) -> Value:
        return Value(items=tuple(self.eval(item) for item in node.elts))

    def eval_IfExp(self, node: ast.IfExp) -> Value:
        self.eval(node.test)
        return join(self.eval(node.body), self.eval(node.orelse)).without(OFFSET_RANK, UNCHECKED)

    def eval_Compare(self, node: ast.Compare) -> Value:
        left, parts = self.eval(node.left), [self.eval(part) for part in node.comparators]
        self.compared[id(node)] = (left, *parts)
        if len(parts) == 1 and left.number is not None and parts[0].number is not None:
            if isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
                return known((left.number == parts[0].number) == isinstance(node.ops[0], ast.Eq))
        return plain(left, *parts)

    def eval_UnaryOp(self, node: ast.UnaryOp) -> Value:
        value = self.eval(node.operand)
        if isinstance(node.op, ast.USub) and isinstance(value.number, (int, float)):
            return known(-value.number)
        if isinstance(node.op, ast.Not) and isinstance(value.number, bool):
            return known(not value.number)
        return plain(value)

    def eval_Subscript(self, node: ast.Subscript) -> Value:
        value = self.eval(node.value)
        index = node.slice
        if isinstance(index, ast.Constant) and isinstance(index.value, int):
            if index.value < len(value.items):
                return value.items[index.value]
        self.eval(index)
        return value

    def eval_Attribute(self, node: ast.Attribute) -> Value:
        spelling = self.source.spelling(node)
        if spelling.startswith(("wl.", "tl.")):
            return NOTHING
        if device := self.source.device(spelling):
            return known(device)
        value = self.eval(node.value)
        if node.attr in value.fields:
            return value.items[value.fields.index(node.attr)]
        if node.attr in ("num_ranks", "world_size"):
            return exactly(NUM_RANKS)
        if node.attr in ("rank", "cur_rank"):
            return exactly(RANK)
        if value.roots and value.offset is None:
            roots = frozenset(f"{root}.{node.attr}" for root in value.roots)
            return Value(roots=roots, params=value.params)
        return NOTHING

    def eval_BinOp(self, node: ast.BinOp) -> Value:
        return self.arithmetic(node.op, self.eval(node.left), self.eval(node.right))

    def arithmetic(self, op: ast.operator, left: Value, right: Value) -> Value:
        if isinstance(left.number, int) and isinstance(right.number, int):
            folded = fold(op, left.number, right.number)
            if folded is not None:
                return known(folded)
        if not isinstance(op, (ast.Add, ast.Sub)):
            # What % & and the like make of a rank's neighbour may be a rank again.
            return plain(left, right).without(OFFSET_RANK, *_masked(op))
        if left.number == 0 and isinstance(op, ast.Add):
            return right
        if right.number == 0:
            return left
        # n - 1 - rank is a mirror image, and stays within.
        is_offset = left.form == RANK or (right.form == RANK and isinstance(op, ast.Add))
        is_offset = is_offset or OFFSET_RANK in left.traits | right.traits
        extra = frozenset({OFFSET_RANK}) if is_offset else frozenset()
        total = plain(left, right)
        total = Value(traits=total.traits | extra, params=total.params)
        for address, index in ((left, right), (right, left)):
            if address.roots:
                moved = address.at(index)
                return Value(
                    roots=moved.roots,
                    remote=moved.remote,
                    offset=moved.offset,
                    traits=moved.traits | extra | index.traits,
                    params=moved.params | index.params,
                )
        return total

    def eval_Call(self, node: ast.Call) -> Value:
        return self.call(self, node)

    def follow(self, device: Device, node: ast.Call, arguments: Mapping[str, Value]) -> Value:
        """Walk a device function that is called, in its own variables."""
        if device in self.within or len(self.within) > MAX_DEPTH or len(self.ops) > MAX_OPS:
            return NOTHING
        env, returned, source = self.env, self.returned, self.source
        self.env = {name: arguments.get(name, _default(device, name)) for name in device.names}
        self.returned = []
        self.within.append(device)
        self.visited.add(device.name)
        self.source = device.source
        foreign = device.source is not self.within[0].source
        self.path.append(Frame("call", node, call=device.name, foreign=foreign))
        depth = len(self.path)
        self.block(device.node.body)
        del self.path[depth - 1 :]
        self.within.pop()
        results, self.env, self.returned, self.source = self.returned, env, returned, source
        if not results:
            return NOTHING
        total = results[0]
        for other in results[1:]:
            total = join(total, other)
        return total

    def emit(self, kind: str, name: str, node: ast.AST, **what: object) -> Op:
        op = Op(kind, name, node, tuple(self.path), **what)  # type: ignore[arg-type]
        self.ops.append(op)
        return op


def _masked(op: ast.operator) -> list[str]:
    return [UNCHECKED] if isinstance(op, (ast.Mod, ast.BitAnd)) else []


def _default(device: Device, name: str) -> Value:
    args = device.node.args
    positional = [*args.posonlyargs, *args.args]
    for arg, default in zip(reversed(positional), reversed(args.defaults)):
        if arg.arg == name and isinstance(default, ast.Constant):
            return known(default.value)
    return NOTHING


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], (ast.Return, ast.Continue, ast.Break))


def _joined(one: Mapping[str, Value], other: Mapping[str, Value]) -> dict[str, Value]:
    names = {**one, **other}
    return {
        name: join(one[name], other[name]) if name in one and name in other else value
        for name, value in names.items()
    }


def _assigned(body: Sequence[ast.stmt]) -> set[str]:
    return {
        node.id
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _stores_to(pointer: Value, ops: Sequence[Op]) -> bool:
    """Does the loop itself change what it looks at, or may it?"""
    return any(
        (op.kind in ("store", "notify", "put") and op.pointer.roots & pointer.roots)
        or (op.kind == "opaque" and op.pointer.roots & pointer.roots)
        for op in ops
    )
