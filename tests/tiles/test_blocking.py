"""What a target can run is taken, what it cannot run is refused with the reason."""

from __future__ import annotations

import pytest

from weft.base.errors import ConfigError
from weft.base.target import TARGETS
from weft.tiles.blocking import Blocking, can_use_tma, candidates

SHAPES = [(8192, 2560, 8192), (64, 2560, 8192), (1, 16, 16), (291, 70, 50), (0, 16, 16)]


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_candidate_fits_its_target(target, dtype, shape):
    itemsize = 4 if dtype == "float32" else 2
    tma = can_use_tma(target, [extent * itemsize for extent in shape[1:]])
    found = list(candidates(*shape, dtype, target))
    assert found
    for blocking in found:
        blocking.check("gemm", dtype, dtype, tma, target)


@pytest.mark.parametrize(
    ("blocking", "words"),
    [
        (Blocking(48, 64, 64, 4, 3), "tile_m=48; it must be a power of two from 16"),
        (Blocking(64, 8, 64, 4, 3), "tile_n=8"),
        (Blocking(64, 64, 64, 3, 3), "num_warps=3"),
        (Blocking(64, 64, 64, 4, 0), "num_stages=0"),
        (Blocking(256, 256, 128, 8, 4), "needs 655360 bytes of shared memory, cuda:90 has 232448"),
        (Blocking(512, 64, 64, 8, 2), "tile_m=512; TMA moves tiles up to 256"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_values(blocking, words):
    with pytest.raises(ConfigError, match=words):
        blocking.check("gemm", "bfloat16", "bfloat16", True, TARGETS["cuda:90"])


def test_rows_that_do_not_begin_at_16_bytes_are_not_for_tma():
    assert can_use_tma(TARGETS["cuda:90"], [64, 128])
    assert not can_use_tma(TARGETS["cuda:90"], [64, 100])
    assert not can_use_tma(TARGETS["cuda:80"], [64, 128])
    assert not can_use_tma(TARGETS["cuda:90"], [64, 0])
