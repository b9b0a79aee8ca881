"""The host's part of a file: what is launched with what, in which order; and its signals."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from weft.verify.lint.source import Device, Source

MAKES = {
    "signals": "signals",
    "empty": "symmetric",
    "zeros": "symmetric",
    "peer": "peer",
    "pointers": "table",
    "workspace": "workspace",
    "channel": "channel",
    "get_buffer": "peer",
    "get_remote_tensor": "peer",
    "get_signal_pad": "peer",
}
ATTRIBUTES = {
    "arg": "arg",
    "rank": "rank",
    "num_ranks": "num_ranks",
    "world_size": "num_ranks",
    "buffer_ptrs_dev": "table",
    "signal_pad_ptrs_dev": "table",
    "buffer_ptrs": "table",
    "signal_pad_ptrs": "table",
}
RESETS = {"zero_", "fill_", "copy_"}
MEETINGS = ("barrier", "all_reduce", "all_gather", "all_to_all", "meet")
RECORDS = ("record", "graph", "capture")


@dataclass(frozen=True)
class HostValue:
    """What a host expression gives. `origin` names the object: aliases share it.

    kind: world, arg, signals, symmetric, peer, table, workspace, channel, rank, num_ranks,
    number, counter (changes from call to call), loop (the variable of a host loop), or "".
    """

    kind: str = ""
    origin: str = ""
    number: object = None


@dataclass(eq=False)
class Signal:
    """An array that `world.signals` gave, or a workspace was told to have."""

    origin: str
    name: str
    node: ast.AST
    escapes: bool = False
    is_written: bool = False  # by the host or a copy
    takes: list[ast.AST] = field(default_factory=list)  # where a stream waits, and stores 0
    bound: list[tuple[Launch, str]] = field(default_factory=list)  # launch, root in the kernel


@dataclass(eq=False)
class Step:
    """Something the host does: "launch", "reset" or "meet", with the loops around it.

    `anchor` is the call in this file, where another file's function does it.
    """

    kind: str
    node: ast.AST
    loops: tuple[ast.AST, ...]
    function: str
    recorded: bool = False
    origin: str = ""
    anchor: ast.AST | None = None

    def place(self, node: ast.AST | None = None) -> ast.AST:
        """Where a finding about it, or about `node` of it, stands in this file."""
        return self.anchor or node or self.node


@dataclass(eq=False)
class Launch(Step):
    """`kernel[grid](...)`; `device` is None where the kernel is another file's."""

    device: Device | None = None
    grid: ast.AST | None = None
    arguments: dict[str, ast.expr] = field(default_factory=dict)
    values: dict[str, HostValue] = field(default_factory=dict)
    options: dict[str, ast.expr] = field(default_factory=dict)
    scope: dict[str, ast.expr] = field(default_factory=dict)

    def option(self, name: str) -> object:
        node = self.options.get(name)
        return node.value if isinstance(node, ast.Constant) else None


class Host:
    """All host functions of a file, each walked once from its top."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.steps: list[Step] = []
        self.signals: dict[str, Signal] = {}
        self.parents: dict[ast.AST, ast.AST] = {}
        self.device_nodes = {id(device.node) for device in source.devices.values()}
        self.recorded_calls: set[str] = set()
        self._counters: set[str] = set()
        if not source.launches and not source.devices:
            return  # nothing that kernels are given
        self.parents.update(source.parents)
        self._counters = _counters(source)
        self._scope(source.tree.body, {}, "", {})
        self._spread_recording()

    @property
    def launches(self) -> list[Launch]:
        return [step for step in self.steps if isinstance(step, Launch)]

    def launches_of(self, name: str) -> list[Launch]:
        return [one for one in self.launches if one.device and one.device.name == name]

    def _spread_recording(self) -> None:
        """What is called within a recording is recorded too."""
        for step in self.steps:
            step.recorded = step.recorded or step.function.split(".")[-1] in self.recorded_calls

    def _scope(self, body: list[ast.stmt], env: dict[str, HostValue], name: str,
               bound: dict[str, ast.expr]) -> None:  # fmt: skip
        _Function(self, dict(env), name, dict(bound)).block(body)


class _Function:
    """One host function: `env` is what its variables hold, `bound` how they were assigned."""

    def __init__(
        self, host: Host, env: dict[str, HostValue], name: str, bound: dict[str, ast.expr]
    ) -> None:
        self.host, self.env, self.name, self.bound = host, env, name, bound
        self.loops: list[ast.AST] = []
        self.recording = 0
        self.devices: dict[str, Device] = {}  # parameters that are kernels
        self.anchor: ast.AST | None = None  # the call in the file, where this stands in another
        self.handed_over = False

    def block(self, body: list[ast.stmt]) -> None:
        later = []
        for statement in body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                later.append(statement)
            elif isinstance(statement, ast.ClassDef):
                self.host._scope(statement.body, self.env, statement.name, self.bound)
            else:
                self.statement(statement)
        for statement in later:  # they see what the function around them has by then
            if id(statement) not in self.host.device_nodes:
                name = f"{self.name}.{statement.name}" if self.name else statement.name
                env = {**self.env}
                for arg in (*statement.args.args, *statement.args.kwonlyargs):
                    env.pop(arg.arg, None)
                    if arg.arg == "world":
                        env["world"] = HostValue("world", "world")
                self.host._scope(statement.body, env, name, self.bound)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.For, ast.While)):
            self.expressions(node.iter if isinstance(node, ast.For) else node.test)
            self.loops.append(node)
            if isinstance(node, ast.For):
                for target in _names(node.target):
                    self.env[target] = HostValue("loop", target)
            self.block(node.body)
            self.loops.pop()
            self.block(node.orelse)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            is_recording = any(_is_recording(item.context_expr) for item in node.items)
            for item in node.items:
                self.expressions(item.context_expr)
                if item.optional_vars is not None:
                    value = self.value(item.context_expr)
                    for name in _names(item.optional_vars):
                        self.env[name] = value
            self.recording += is_recording
            self.block(node.body)
            self.recording -= is_recording
        elif isinstance(node, ast.If):
            self.expressions(node.test)
            self.block(node.body)
            self.block(node.orelse)
        elif isinstance(node, ast.Try):
            for part in (node.body, *(h.body for h in node.handlers), node.orelse, node.finalbody):
                self.block(part)
        else:
            self.expressions(node)
            self.assign(node)

    def assign(self, node: ast.stmt) -> None:
        if isinstance(node, ast.AugAssign):
            for name in _names(node.target):
                self.env[name] = HostValue("counter", name)
            return
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        elif isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        else:
            return
        for target in targets:
            if isinstance(target, ast.Name):
                self.env[target.id] = self.value(value, target.id)
                self.bound[target.id] = value
            elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                for part, inner in zip(target.elts, value.elts):
                    if isinstance(part, ast.Name):
                        self.env[part.id] = self.value(inner, part.id)
                        self.bound[part.id] = inner
            else:
                for name in _names(target):
                    self.env[name] = HostValue()
                    self.bound.pop(name, None)

    # -- values -------------------------------------------------------------------------------

    def value(self, node: ast.AST, name: str = "") -> HostValue:
        """What an expression gives; `name` is the variable it is bound to."""
        if isinstance(node, ast.Name):
            if node.id in self.env:
                return self.env[node.id]
            number = self.host.source.constants.get(node.id)
            return HostValue("number" if number is not None else "", node.id, number=number)
        if isinstance(node, ast.Constant):
            return HostValue("number", number=node.value)
        if isinstance(node, ast.Attribute):
            return self.attribute(node)
        if isinstance(node, ast.Subscript):
            return self.value(node.value)
        if isinstance(node, ast.Call):
            return self.made(node, name)
        if isinstance(node, ast.BinOp):
            sides = [self.value(node.left), self.value(node.right)]
            for kind in ("counter", "loop", "rank"):
                for side in sides:
                    if side.kind == kind:
                        return HostValue("" if kind == "rank" else kind, side.origin)
            number = self.host.source.constant(node, self.host.source.constants)
            return HostValue("number" if number is not None else "", number=number)
        return HostValue()

    def attribute(self, node: ast.Attribute) -> HostValue:
        text = ast.unparse(node)
        base = self.value(node.value)
        if base.kind == "workspace" and f"{base.origin}.{node.attr}" in self.host.signals:
            return HostValue("signals", f"{base.origin}.{node.attr}")
        if text in self.host._counters:
            return HostValue("counter", text)
        if node.attr in ATTRIBUTES and not (base.kind in ("workspace",) and node.attr == "rank"):
            kind = ATTRIBUTES[node.attr]
            if kind == "table":
                return HostValue("table", f"{ast.unparse(node.value)}.buffers")
            return HostValue(kind, base.origin or ast.unparse(node.value))
        if text == "self.world" or node.attr == "world":
            return HostValue("world", text)
        return HostValue("", text)

    def made(self, node: ast.Call, name: str) -> HostValue:
        """What a call makes."""
        func = node.func
        if not isinstance(func, ast.Attribute):
            return HostValue()
        spelled = self.host.source.spelling(func)
        base = self.value(func.value)
        if spelled in ("weft.init",) or spelled.endswith(".world"):
            return HostValue("world", name or "world")
        if func.attr in ("view", "reshape", "flatten", "narrow", "view_as", "contiguous", "to"):
            return base
        if func.attr == "get_rank":
            return HostValue("rank", "rank")
        if func.attr == "get_world_size":
            return HostValue("num_ranks", "num_ranks")
        is_symmetric = base.kind == "world" or "symm" in spelled or base.kind == "symmetric"
        if func.attr == "rendezvous" and node.args:
            return HostValue("symmetric", self.value(node.args[0]).origin)
        if func.attr in MAKES and (is_symmetric or func.attr in ("get_buffer", "get_signal_pad")):
            return self._symmetric(node, func.attr, name)
        return HostValue()

    def _symmetric(self, node: ast.Call, what: str, name: str) -> HostValue:
        kind = MAKES[what]
        origin = f"{self.name}:{name or '?'}:{node.lineno}:{node.col_offset}"
        if kind == "signals":
            if origin not in self.host.signals:
                self.host.signals[origin] = Signal(
                    origin, name or _called(node), self.anchor or node
                )
        elif kind in ("peer", "table") and node.args:
            origin = self.value(node.args[0]).origin or origin
        elif kind == "workspace":
            given = [word.value for word in node.keywords if word.arg == "signals"]
            for table in [*given, *node.args[2:3]]:
                for key in table.keys if isinstance(table, ast.Dict) else ():
                    if isinstance(key, ast.Constant):
                        one = f"{origin}.{key.value}"
                        self.host.signals[one] = Signal(one, str(key.value), self.anchor or key)
        return HostValue(kind, origin)

    # -- what is done -------------------------------------------------------------------------

    def expressions(self, node: ast.AST | None) -> None:
        """Calls within a statement, innermost last; and what is done to signals there."""
        if node is None:
            return
        calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
        # By where they end: arguments come before the call that takes them.
        for call in sorted(calls, key=lambda c: (c.end_lineno, c.end_col_offset)):
            self.call(call)
        for name in ast.walk(node):
            if isinstance(name, (ast.Name, ast.Attribute)):
                self.use(name)

    def step(self, kind: str, node: ast.AST, origin: str = "") -> None:
        self.host.steps.append(
            Step(
                kind, node, tuple(self.loops), self.name, bool(self.recording), origin, self.anchor
            )  # fmt: skip
        )

    def call(self, node: ast.Call) -> None:
        func = node.func
        if isinstance(func, ast.Subscript):
            self.launch(node, func)
            return
        if any(isinstance(a, ast.Name) and a.id in self.host.source.devices for a in node.args):
            self.hand_over(node)
        name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        if self.recording and name:
            self.host.recorded_calls.add(name)
        if any(word in name for word in MEETINGS):
            self.step("meet", node)
        if isinstance(func, ast.Attribute) and name in RESETS:
            value = self.value(func.value)
            if value.kind == "signals":
                self.step("reset", node, value.origin)
        if name in ("copy", "copy_word"):
            for argument in node.args[:1]:
                self._written(argument)
        if name == "take_token":
            for argument in node.args[:1]:
                origin = self.value(argument).origin
                if origin in self.host.signals:
                    self.host.signals[origin].takes.append(self.anchor or node)

    def hand_over(self, node: ast.Call) -> None:
        """A kernel is given to a function: walk it, if it is known and launches its parameter."""
        source, spelling = self.host.source, self.host.source.spelling(node.func)
        found = (source, spelling) if "." not in spelling else source.elsewhere(spelling)
        if found is None or self.handed_over:
            return
        where, name = found
        for function in where.tree.body:
            if isinstance(function, ast.FunctionDef) and function.name == name:
                inner = _Function(self.host, {}, self.name, {})
                for parameter, argument in zip(function.args.args, node.args):
                    inner.env[parameter.arg] = self.value(argument)
                    if isinstance(argument, ast.Name) and argument.id in source.devices:
                        inner.devices[parameter.arg] = source.devices[argument.id]
                inner.loops, inner.recording, inner.handed_over = self.loops, self.recording, True
                inner.anchor = node if where is not source else None
                self.host.parents.update(
                    {c: p for p in ast.walk(function) for c in ast.iter_child_nodes(p)}
                )
                inner.block(function.body)

    def _written(self, node: ast.expr) -> None:
        origin = self.value(node).origin
        if origin in self.host.signals:
            self.host.signals[origin].is_written = True

    def launch(self, node: ast.Call, func: ast.Subscript) -> None:
        name = func.value.id if isinstance(func.value, ast.Name) else ""
        device = self.devices.get(name) or self.host.source.device(name)
        launch = Launch(
            "launch", node, tuple(self.loops), self.name, bool(self.recording), device=device,
            anchor=self.anchor, grid=func.slice, scope=dict(self.bound),
        )  # fmt: skip
        if device is not None:
            arguments = _arguments(node, self.bound)
            for parameter, argument in zip(device.names, arguments):
                if argument is None:
                    break
                launch.arguments[parameter] = argument
            for word in node.keywords:
                if word.arg in device.names:
                    launch.arguments[word.arg] = word.value
                elif word.arg:
                    launch.options[word.arg] = word.value
            launch.values = {p: self.value(a) for p, a in launch.arguments.items()}
            for parameter, value in launch.values.items():
                if value.origin in self.host.signals:
                    root = f"{parameter}[]" if value.kind == "table" else parameter
                    self.host.signals[value.origin].bound.append((launch, root))
        self.host.steps.append(launch)

    def use(self, node: ast.Name | ast.Attribute) -> None:
        """Note when a signal goes where lint does not follow it, or the host writes it."""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            return
        value = self.value(node)
        signal = self.host.signals.get(value.origin)
        if signal is None or value.kind not in ("signals", "table", "peer"):
            return
        kind, where = self._how(node)
        if kind == "reset":
            signal.is_written = True
            if isinstance(where, (ast.Assign, ast.AugAssign)):
                self.step("reset", where, value.origin)
        elif kind == "unknown":
            signal.escapes = True

    def _how(self, node: ast.AST) -> tuple[str, ast.AST]:
        """(how a signal is used, the statement or call): launch, alias, reset or unknown."""
        parents = self.host.parents
        inner, outer = node, parents.get(node)
        while isinstance(outer, (ast.Subscript, ast.Starred, ast.Tuple)) or (
            isinstance(outer, ast.Call) and inner is outer.func
            and isinstance(inner, ast.Attribute) and inner.attr in ("view", "reshape", "flatten")
        ):  # fmt: skip
            if isinstance(outer, ast.Subscript) and outer.slice is inner:
                return "unknown", outer
            inner, outer = outer, parents.get(outer)
        if isinstance(outer, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            targets = outer.targets if isinstance(outer, ast.Assign) else [outer.target]
            is_target = any(inner is target for target in targets)
            return ("reset" if is_target else "alias"), outer
        if isinstance(outer, ast.Attribute):
            call = parents.get(outer)
            if outer.attr in RESETS and isinstance(call, ast.Call):
                return "reset", call
            return "unknown", outer
        if isinstance(outer, ast.keyword):
            inner, outer = outer, parents.get(outer)
        if isinstance(outer, ast.Call):
            if isinstance(outer.func, ast.Subscript):
                bound = any(
                    launch.node is outer and launch.device is not None
                    and any(_holds(argument, node) for argument in launch.arguments.values())
                    for launch in self.host.launches
                )  # fmt: skip
                return ("launch" if bound else "unknown"), outer
            name = getattr(outer.func, "attr", "")
            if name in ("pointers", "peer", "free", "load", "copy_word", "copy", "take_token"):
                return "alias", outer
        return "unknown", outer or node


def _holds(outer: ast.AST, inner: ast.AST) -> bool:
    return any(node is inner for node in ast.walk(outer))


def _names(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            yield one.id


def _arguments(node: ast.Call, bound: dict[str, ast.expr]) -> list[ast.expr | None]:
    """Positional arguments, tuples written out; None from where they cannot be counted."""
    found: list[ast.expr | None] = []
    for argument in node.args:
        inner = argument.value if isinstance(argument, ast.Starred) else argument
        if isinstance(argument, ast.Starred) and isinstance(inner, ast.Name):
            inner = bound.get(inner.id, inner)
        if not isinstance(argument, ast.Starred):
            found.append(argument)
        elif isinstance(inner, (ast.Tuple, ast.List)):
            found.extend(inner.elts)
        else:
            found.append(None)
    return found


def _called(node: ast.Call) -> str:
    """The name that a signal is given, as reports will show it."""
    for word in node.keywords:
        if word.arg == "name" and isinstance(word.value, ast.Constant):
            return str(word.value.value)
    return "the signal"


def _is_recording(node: ast.expr) -> bool:
    name = ""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return name in RECORDS


def _counters(source: Source) -> set[str]:
    """Attributes that are counted up: `self.epoch += 1`; they last from call to call."""
    return {
        ast.unparse(node.target)
        for node in source.nodes
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute)
    }
