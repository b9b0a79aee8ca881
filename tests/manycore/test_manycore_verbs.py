"""`--target manycore` of run, explain and compile, and what doctor says of the C compiler."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from weft.manycore import build
from weft.tools.doctor import MANY_CORES, many_cores
from weft.tools.main import main

MLP = """
import weft
from weft.compiler import Shard, Tensor, all_gather, reduce_scatter, silu_mul

@weft.program(mesh="tp", x=Tensor("float32", ("m", 32), Shard(0)),
              w1=Tensor("float32", (32, 64), Shard(1)), w2=Tensor("float32", (32, 32), Shard(0)))
def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)
"""

needs_cc = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler"
)


@pytest.fixture
def mlp(tmp_path):
    (tmp_path / "mlp.py").write_text(MLP)
    return str(tmp_path / "mlp.py")


@needs_cc
@pytest.mark.parametrize(("op", "shape"), [
    (None, "m=97"), pytest.param("ag_gemm", "m=37,n=32,k=48", marks=pytest.mark.slow),
    pytest.param("gemm_rs", "m=37,n=32,k=48", marks=pytest.mark.slow),
    pytest.param("all_reduce", "m=37,n=50", marks=pytest.mark.slow),
])  # fmt: skip
def test_run_compares_with_the_reference(op, shape, mlp, capsys):
    words = ["run", op or mlp, "--target", "manycore", "--ranks", "2", "--shape", shape]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["machine"] == "small" and found["transfers"] > 0
    assert found["predicted_us"] == pytest.approx(found["us"], rel=0.2)


def test_explain_shows_the_plan_and_the_c(mlp, capsys):
    assert main(["explain", mlp, "--target", "manycore:sw26010", "--ranks", "2"]) == 0
    shown = capsys.readouterr().out
    assert "scratchpad [" in shown and "static void make_product(mc_core *core)" in shown
    assert "of 65536 bytes" in shown


@needs_cc
def test_what_compile_writes_is_compiled_by_hand(mlp, tmp_path, capsys):
    folder = tmp_path / "out"
    words = ["compile", f"{mlp}:mlp", "--target", "manycore", "--shape", "m=9", "-o", str(folder)]
    assert main(words) == 0
    assert {one.name for one in folder.iterdir()} == {"manycore.h", "mlp.c", "mlp"}
    command = [build.find_compiler(), *build.FLAGS, "-Werror", "mlp.c", "-o", "again", "-lm"]
    assert subprocess.run(command, cwd=folder).returncode == 0


@pytest.mark.parametrize(("words", "message", "code"), [
    (["ag_moe"], "b: .*takes matrices of", 1), (["flash_decode"], "written by hand", 1),
    (["ag_gemm", "--nodes", "2"], "one scale-up domain", 2),
    (["ag_gemm", "--target", "manycore:abacus"], "manycore:sw26010", 2),
])  # fmt: skip
def test_what_cannot_be_is_told(words, message, code, capsys):
    target = [] if "--target" in words else ["--target", "manycore"]
    assert main(["run", *words, *target]) == code
    assert re.search(message, capsys.readouterr().err)


def test_doctor_names_the_compiler_or_the_remedy(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = many_cores()
    assert (found.name, found.ok) == (MANY_CORES, False) and "apt install gcc" in found.remedy
