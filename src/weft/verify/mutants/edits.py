"""Changes of a TTIR module: the same tree but for what is replaced. Nothing is changed in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from weft.ir.ttir import Block, Function, Module, Op, Region, Value
from weft.ir.ttir_parser import parse_statements

# What stands in an operation's place; an operation that is not named stays.
Changes = Mapping[Op, Sequence[Op]]


def edited(module: Module, changes: Changes) -> Module:
    """`module` with each operation of `changes` replaced by those it maps to.

    Values keep their identity: what stands in the place of an operation must define its results.
    """
    functions = {name: _function(one, changes) for name, one in module.functions.items()}
    return replace(module, functions=functions)


def _function(function: Function, changes: Changes) -> Function:
    body = _region(function.body, changes)
    return function if body is function.body else replace(function, body=body)


def _region(region: Region, changes: Changes) -> Region:
    blocks = [_block(block, changes) for block in region.blocks]
    same = all(new is old for new, old in zip(blocks, region.blocks, strict=True))
    return region if same else Region(blocks)


def _block(block: Block, changes: Changes) -> Block:
    ops: list[Op] = []
    for op in block.ops:
        ops += [_within(one, changes) for one in changes[op]] if op in changes else [
            _within(op, changes)
        ]  # fmt: skip
    same = len(ops) == len(block.ops) and all(map(lambda a, b: a is b, ops, block.ops))
    return block if same else Block(block.label, block.args, ops)


def _within(op: Op, changes: Changes) -> Op:
    if not op.regions:
        return op
    regions = [_region(region, changes) for region in op.regions]
    same = all(new is old for new, old in zip(regions, op.regions, strict=True))
    return op if same else replace(op, regions=regions)


def operations(module: Module) -> Iterator[Op]:
    """Every operation of a module, in the order of the text."""
    for function in module.functions.values():
        yield from function.body.walk()


def constant_for(op: Op, word: str = "0") -> list[Op]:
    """Constants in the place of `op`'s results: zeros, or `word` for a scalar."""
    found = []
    for result in op.results:
        text = f"dense<{word}>" if result.type.is_tensor else word
        (constant,) = parse_statements(f"%x = arith.constant {text} : {result.type}", {}, op.place)
        found.append(replace(constant, results=[result]))
    return found


def with_operand(op: Op, index: int, before: Sequence[Op], value: Value) -> list[Op]:
    """`before`, then `op` with another operand number `index`."""
    operands = [*op.operands]
    operands[index] = value
    return [*before, replace(op, operands=operands)]
