"""Templates that say when their tiles waited and ended: not one instruction where nobody asks."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import types

import pytest
import triton
from test_gemm_sm90 import plain_gemm, record_of
from triton.experimental import gluon

from weft.base.target import TARGETS
from weft.language import triton_api
from weft.language.world_arg import WorldArg, language_version, traced_version
from weft.ops import cards
from weft.tiles import gemm, gemm_sm90
from weft.tools.binaries import build
from weft.verify.compiled import compiled


class _WithoutStamps(ast.NodeTransformer):
    """A template as it would be had nobody thought of stamps."""

    def visit_If(self, node):
        if ast.unparse(node.test) == "traced is not None":
            return None
        return self.generic_visit(node)

    def visit_Assign(self, node):
        return None if ast.unparse(node.targets[0]) == "traced" else self.generic_visit(node)

    def visit_FunctionDef(self, node):
        names = [one.arg for one in node.args.args]
        if "traced" in names:
            dropped = len(names) - names.index("traced")
            del node.args.args[-dropped:]
            if node.args.defaults:
                del node.args.defaults[-dropped:]
        return self.generic_visit(node)

    def visit_Call(self, node):
        given = [ast.unparse(one) for one in node.args]
        if "traced" in given:
            del node.args[given.index("traced") :]
        return self.generic_visit(node)

    def visit_Tuple(self, node):
        node.elts = [one for one in node.elts if "tile_trace.kept" not in ast.unparse(one)
                     or isinstance(one, ast.Tuple)]  # fmt: skip
        return self.generic_visit(node)


def without_stamps(module, folder):
    tree = _WithoutStamps().visit(ast.parse(inspect.getsource(module)))
    text = ast.unparse(ast.fix_missing_locations(tree))
    left = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not left & {"traced", "tile_trace"}
    path = folder / f"{module.__name__.rsplit('.', 1)[-1]}_without_stamps.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def kernel_with(kernel, decorate, **modules):
    """The same kernel, whose modules of these names are others."""
    fn = kernel.fn
    made = types.FunctionType(fn.__code__, {**fn.__globals__, **modules}, fn.__name__)
    made.__annotations__, made.__defaults__ = fn.__annotations__, fn.__defaults__
    made.__module__ = fn.__module__
    return decorate(made)


def code_of(kernel, record, target):
    """Triton's IR and the machine's code, without places in source files."""
    made = triton_api.compile_kernel(kernel, record, TARGETS[target])
    texts = [str(made.asm[stage]).split(".section")[0]
             for stage in ("ttir", "ptx") if stage in made.asm]  # fmt: skip
    return [
        [re.sub(r"\s*(loc\(.*|//.*)$", "", line) for line in text.splitlines()
         if not line.strip().startswith(("#loc", ".loc", ".file", "//", "$L__tmp"))]
        for text in texts
    ]  # fmt: skip


def kernel_of(target, template, world_version=None, op="ag_gemm", transport="sm_push"):
    """The operator's product, and the record that it is compiled by."""
    card = cards()[op]
    problem = card.make_problem(2, {"m": 4096, "n": 4096, "k": 256}, "bfloat16")
    config = next(one for one in card.candidates(problem, TARGETS[target])
                  if (one.template, one.transport) == (template, transport))  # fmt: skip
    kernels = card.kernels(problem, config, TARGETS[target])
    fn, record = next(pair for pair in kernels if "multiply" in pair[1].name)
    if world_version is not None:
        record.constants["world"] = WorldArg(None, 2, world_version)
    return fn, record


@pytest.mark.parametrize("target", ["emu", pytest.param("cuda:90", marks=pytest.mark.slow)])
def test_where_no_trace_is_kept_the_plain_template_is_the_same(target, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    fn, record = kernel_of(target, "plain")
    other = kernel_with(fn, triton.jit, gemm=without_stamps(gemm, tmp_path))
    assert code_of(other, record, target) == code_of(fn, record, target)
    traced = kernel_of(target, "plain", traced_version(language_version()))
    assert code_of(*traced, target) != code_of(fn, record, target)


@pytest.mark.slow
def test_and_so_is_that_for_hopper(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    record = record_of(gemm_sm90.TURNS, "bf16", False)
    other = kernel_with(plain_gemm, gluon.jit, gemm_sm90=without_stamps(gemm_sm90, tmp_path))
    assert code_of(other, record, "cuda:90") == code_of(plain_gemm, record, "cuda:90")


@pytest.mark.slow
@pytest.mark.parametrize("target, template", [
    ("cuda:90", "plain"),
    *(pytest.param(*one, marks=pytest.mark.slow)
      for one in (("cuda:90", "sm90"), ("cuda:100", "plain"), ("hip:gfx942", "plain"))),
])  # fmt: skip
def test_each_template_says_when_on_every_target(target, template):
    fn, record = kernel_of(target, template, traced_version(language_version()))
    binary = build(fn, record, TARGETS[target])
    reads = re.findall(r"%globaltimer|s_memrealtime", binary.assembly)
    waits = len(re.findall(r"%globaltimer|s_memrealtime", build(
        *kernel_of(target, template), TARGETS[target]).assembly))  # fmt: skip
    # Before the wait, behind it, behind the products, at the end; on Hopper both consumers say when
    # they begin, have multiplied and end.
    assert len(reads) - waits == (2 + 2 * 3 if template == "sm90" else 4)
    assert binary.stack_bytes in (0, None), "nothing is spilled"
    report = compiled(fn, TARGETS[target], record)
    assert report.ok, str(report)


@pytest.mark.slow
def test_on_hopper_a_tile_is_combined_with_its_first_chunk():
    """Each consumer says so once, however many chunks its part of a tile has."""
    version = traced_version(language_version())
    counts = []
    for one in (None, version):
        fn, record = kernel_of("cuda:90", "sm90", one, op="gemm_rs", transport="sm_push")
        made = triton_api.compile_kernel(fn, record, TARGETS["cuda:90"])
        counts.append(made.asm["ptx"].count("%globaltimer"))
    assert counts[1] - counts[0] == 2 + 2 * 4
