"""Calls of an artefact in a process that cannot import Triton, on a machine with no device.

python without_triton.py DIR                  DIR: all_reduce on 2 ranks, at 1, 7 and 64 rows
"""

import sys

sys.modules["triton"] = None  # to import it is an ImportError from here on

import fake_machine  # noqa: E402
import torch  # noqa: E402
import written_launches  # noqa: E402

import weft.runtime  # noqa: E402
from weft.runtime import artefact  # noqa: E402

DRIVER = written_launches.modules("cuda")


def main(world):
    written_launches.NOW.log = world.backend.log
    for rows in (1, 7, 64):
        x = torch.zeros(rows, 256, dtype=torch.bfloat16)
        assert compiled(x, world=world).shape == x.shape
        with world.record():
            compiled(x, world=world)
    return sum(one[0] == "launch" for one in world.backend.log)


artefact.modules = lambda backend: DRIVER
compiled = weft.runtime.load(sys.argv[1])
found = fake_machine.run_ranks(main, heap_bytes=1 << 26, kind=fake_machine.WritingBackend)
loaded = [name for name in sys.modules if name.split(".")[0] == "triton"]
assert loaded == ["triton"] and sys.modules["triton"] is None, loaded
print(f"{len(found)} ranks, {sum(found)} launches")
