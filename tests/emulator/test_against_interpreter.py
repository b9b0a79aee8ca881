"""Op by op: the emulator's results beside those of Triton's own interpreter, in another process.

bf16 is left out: the interpreter computes on its raw bits.
"""

import os
import pathlib
import subprocess
import sys

import interpreter_ops
import numpy as np
import pytest

import weft

FILE = pathlib.Path(interpreter_ops.__file__)
EXACT = ("integer_pairs", "counts", "shapes", "atomics", "atomics_old", "random_whole")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    path = tmp_path_factory.mktemp("interpreter") / "results.npz"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(FILE), str(path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with weft.emulated(ranks=1) as session:
        (ours,) = session.run(interpreter_ops.results)
    assert session.report.ok
    with np.load(path) as theirs:
        return ours, dict(theirs)


@pytest.mark.slow
def test_the_same_is_computed(both):
    ours, theirs = both
    assert set(ours) == set(theirs)


@pytest.mark.parametrize("name", [
    "float_functions", "float_pairs_float32", "float_pairs_float16", "integer_pairs", "reductions",
    "counts", "shapes", "products", "atomics", "atomics_old", "random", "random_whole", "control",
])  # fmt: skip
def test_op_by_op(both, name):
    ours, theirs = (side[name] for side in both)
    assert ours.dtype == theirs.dtype
    for row, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        if name in EXACT:
            np.testing.assert_array_equal(own, other, err_msg=f"row {row} of {name}")
            continue
        # The interpreter rounds a * b + c in fp16 twice, the emulator once, as GPUs do.
        rtol, atol = (1e-3, 1e-3) if ours.dtype == np.float16 else (1e-5, 1e-6)
        np.testing.assert_allclose(own, other, rtol, atol, err_msg=f"row {row} of {name}")
