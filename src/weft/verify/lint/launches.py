"""The launches of a file: `kernel[grid](...)`, with what they pass to which parameter."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.verify.lint.source import Device, Source
from weft.verify.lint.values import NOTHING, NUM_RANKS, RANK, Value, exactly

# What an attribute of the host's world, or a call of torch.distributed, says of a number.
FORMS = {"rank": RANK, "num_ranks": NUM_RANKS, "world_size": NUM_RANKS,
         "get_rank": RANK, "get_world_size": NUM_RANKS}  # fmt: skip
# Calls that give memory of a peer.
OF_PEERS = ("peer", "get_buffer", "get_remote_tensor", "get_signal_pad")


@dataclass(frozen=True, eq=False)
class Launch:
    """`arguments` by parameter; `bound` is what the function around it binds names to."""

    source: Source
    device: Device
    arguments: Mapping[str, ast.expr]
    options: Mapping[str, ast.expr]
    bound: Mapping[str, ast.expr]

    def made(self, name: str) -> ast.expr:
        """The expression that an argument was made by, as far as that stands in one place."""
        node = self.arguments[name]
        return self.bound.get(node.id, node) if isinstance(node, ast.Name) else node

    def option(self, name: str) -> object:
        node = self.options.get(name)
        return node.value if isinstance(node, ast.Constant) else None


def launches_in(source: Source) -> Iterator[Launch]:
    """Every launch of a device function that the file knows, in the order of its text."""
    for node in source.nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
            continue
        kernel = node.func.value
        device = source.device(kernel.id) if isinstance(kernel, ast.Name) else None
        if device is None:
            continue
        arguments: dict[str, ast.expr] = {}
        for name, argument in zip(device.names, node.args):
            if isinstance(argument, ast.Starred):
                break
            arguments[name] = argument
        options = {word.arg: word.value for word in node.keywords if word.arg}
        arguments |= {name: options.pop(name) for name in device.names if name in options}
        yield Launch(source, device, arguments, options, _bound_around(source, node))


def _bound_around(source: Source, node: ast.AST) -> dict[str, ast.expr]:
    """What the statements of the function around `node` bind to names, once each."""
    while node in source.parents and not isinstance(node, ast.FunctionDef):
        node = source.parents[node]
    found: dict[str, ast.expr] = {}
    several = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
            name = one.targets[0].id
            several |= {name} & found.keys()
            found[name] = one.value
    return {name: value for name, value in found.items() if name not in several}


def given(launches: Sequence[Launch]) -> dict[str, Value]:
    """What launches of a kernel say of its parameters: what all say that pass one.

    A constexpr has its number; of others it is said whether it is the rank, or a peer's memory.
    """
    found: dict[str, Value] = {}
    for name in {name for launch in launches for name in launch.arguments}:
        values = {passed(launch, name) for launch in launches if name in launch.arguments}
        value = next(iter(values)) if len(values) == 1 else NOTHING
        is_constant = value.number is not None and launches[0].device.is_constexpr(name)
        if value.form or value.remote or is_constant:
            found[name] = replace(value, params=frozenset({name}))
    return found


def passed(launch: Launch, name: str) -> Value:
    """What lint knows of an argument, before it arrives."""
    node = launch.made(name)
    called = isinstance(node, ast.Call)
    what = node.func if isinstance(node, ast.Call) else node
    last = what.attr if isinstance(what, ast.Attribute) else ""
    if last in FORMS and called == last.startswith("get_"):
        return exactly(FORMS[last])
    if called and last in OF_PEERS:
        return Value(roots=frozenset({name}), remote=True)
    return Value(number=launch.source.constant(node, launch.source.constants))
