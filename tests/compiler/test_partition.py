"""Programs of kernels, SMs that are left, and tiles that do not fit."""

from __future__ import annotations

import operators
import pytest
from operators import compiled, placed

from weft.base.errors import ConfigError
from weft.base.target import Target
from weft.compiler.facts import Facts, Settings
from weft.compiler.pipeline import overlap


def test_an_sm_is_left_for_what_announces_copies():
    multiply = compiled(operators.ag_gemm).program.task("product")
    assert (multiply.programs, multiply.spare) == ("resident", 1)
    pushed = compiled(operators.ag_gemm, engines={"gathered": "sm_push"}).program
    assert pushed.task("product").spare == 0 and pushed.task("gathered").programs == "pieces"


def test_few_tiles_share_their_sums():
    program = compiled(operators.gemm_ar, m=16, engines={"reduced": "one_shot_ll"}).program
    assert program.task("product").split_k > 1
    assert compiled(operators.gemm_rs).program.task("product").split_k == 1


@pytest.mark.parametrize(
    ("tile", "told"),
    [
        ((256, 256, 64), r"product: a tile of 256 x 256 x 64 in bfloat16 needs 296 registers of "
                         r"each of 256 threads, 41 more than there are"),
        ((128, 256, 256), r"needs 393216 bytes of shared memory for 2 stages, 160768 more than "
                          r"cuda:90 has"),
    ],
)  # fmt: skip
def test_a_tile_that_does_not_fit_says_by_how_much(tile, told: str):
    with pytest.raises(ConfigError, match=told) as caught:
        compiled(operators.gemm_rs, tiles={"product": tile})
    frame = caught.value.place.outermost
    assert frame is not None and frame.file == operators.__file__


def test_a_target_without_an_sm_to_spare():
    small = Facts({"m": 8192}, target=Target("cuda", 90, num_sms=1, has_tma=True))
    with pytest.raises(ConfigError, match="engine=ce_push; here it can have .*sm_push"):
        overlap(placed(operators.ag_gemm), small, Settings(engines={"gathered": "ce_push"}))


def test_beside_copy_engines_an_sm_is_left():
    program = compiled(operators.ag_gemm, engines={"gathered": "ce_push"}).program
    assert program.task("product").spare == 1
