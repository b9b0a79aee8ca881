"""A user's tensor program by the verbs that take operators: run, verify, bench, compile."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

import weft
from weft.base.target import TARGETS
from weft.compiler import libraries
from weft.plan.program_cards import Config
from weft.runtime import load
from weft.tools.check import Work, check_on_gpus
from weft.tools.main import main
from weft.tools.programs import card_of, find_op

PROGRAM = '''"""An MLP, and programs that no verb can make up values for."""
import weft
from weft.compiler import Settings, Shard, Tensor, all_gather, reduce_scatter, silu_mul

ROWS, COLUMNS = (Tensor("DTYPE", (16, 16), Shard(dim)) for dim in (0, 1))

@weft.program(
    mesh="tp",
    settings=Settings(tiles={"product": (16, 32, 16), "product_2": (16, 16, 16)}),
    x=Tensor("DTYPE", ("m", 16), Shard(0)),
    w1=Tensor("DTYPE", (16, 64), Shard(1)),
    w2=Tensor("DTYPE", (32, 16), Shard(0)),
)
def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)

@weft.program(mesh="tp", x=COLUMNS, w=ROWS)
def summand(x, w):
    return x @ w

@weft.program(mesh="tp", x=ROWS, w=COLUMNS)
def sizeless(x, w):
    return all_gather(x) @ w
'''


@pytest.fixture(params=["float32"])
def model(tmp_path: Path, request) -> str:
    path = tmp_path / "model.py"
    path.write_text(PROGRAM.replace("DTYPE", request.param))
    return str(path)


SMALL = ["--ranks", "2", "--shape", "m=37"]


@pytest.mark.parametrize("model", ["float32", "bfloat16"], indirect=True)
def test_a_program_is_run_against_what_it_means(model, capsys):
    assert main(["run", f"{model}:mlp", *SMALL, "--target", "emu", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["ok"] and 0 < values["rel_err"] < values["tolerance"]
    assert values["shape"] == {"m": 37} and values["op"] == f"{model}:mlp"
    assert values["dtype"] == card_of(f"{model}:mlp").dtypes[0]


def test_a_wrong_answer_is_told(model, capsys, monkeypatch):
    monkeypatch.setitem(libraries.MEANINGS, "silu_mul", lambda h: h[:, 0::2] * h[:, 1::2])
    assert main(["run", f"{model}:mlp", *SMALL, "--target", "emu"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_program_without_sizes_of_its_own(model, capsys):
    assert main(["run", f"{model}:sizeless", "--ranks", "2", "--target", "emu"]) == 0
    assert "another shape" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, told",
    [
        (["run", "MODEL:summand"], "return all_reduce(product)"),
        (["run", "MODEL:nobody"], "it has mlp, summand, sizeless"),
        (["run", "MODEL"], "name a program of it"),
        (["run", "MODEL:mlp", "--dtype", "fp16"], "takes float32, not float16"),
        (["run", "MODEL:mlp", "--shape", "n=3"], "write --shape m=97"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_misuse(model, words, told, capsys):
    assert main([word.replace("MODEL", model) for word in words]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_every_lowering_is_right(model):
    """What `weft bench` measures: candidates, and the baseline that only calls libraries."""
    card = find_op(f"{model}:mlp")
    work = Work(card, 2, {"m": 37}, "float32", (2,))
    lowerings = [one.transport for one in card.candidates(work.problem(), TARGETS["cuda:90"])]
    assert lowerings == ["overlapped", "persistent"] and list(card.baselines) == ["unfused"]

    def main():
        world = weft.init()
        inputs = work.inputs(world.rank, 3)
        outs = [
            card.run(world, work.problem(), inputs, Config(one)) for one in (*lowerings, "unfused")
        ]
        return world.rank, outs

    with weft.emulated(2) as ranks:
        for rank, outs in ranks.run(main):
            wanted = work.reference(3)[rank]
            assert wanted.shape[0] == (19, 18)[rank]
            for out in outs:
                assert out.shape == wanted.shape
                assert float((out - wanted).norm() / wanted.norm()) < work.tolerance()


def test_a_program_is_verified(model, capsys):
    words = ["verify", f"{model}:mlp", *SMALL, "--schedules", "4", "--json"]
    assert main(words) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["ok"] and values["executions"] == 4


def test_a_program_is_compiled_ahead(model, capsys):
    assert main(["compile", f"{model}:mlp", "--target", "cuda:90", "--ranks", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"]


@pytest.mark.slow
def test_a_decode_step_is_compiled_into_an_artefact(tmp_path, capsys):
    """Of integers nobody makes up values, and nobody has to; its options are the file's."""
    step = Path(__file__).parents[2] / "examples" / "16_megakernel.py"
    words = f"compile {step}:one_kernel --target cuda:90 --ranks 2 --shape b=1..2 --json -o".split()
    assert main([*words, str(tmp_path)]) == 0
    values, compiled = json.loads(capsys.readouterr().out), load(tmp_path)
    assert {one["name"].partition("-")[0] for one in values["kernels"]} == {"layer_persistent"}
    assert compiled.sizes == "b=1/2"


@pytest.mark.slow
def test_a_programs_calls_are_compiled_into_an_artefact(model, tmp_path, capsys):
    words = f"compile {model}:mlp --target cuda:90 --ranks 2 --shape m=8..9 --json -o".split()
    assert main([*words, str(tmp_path)]) == 0
    values, compiled = json.loads(capsys.readouterr().out), load(tmp_path)
    assert values["ok"] and values["kernels"] and compiled.op.endswith(":mlp")
    assert compiled.sizes == "m=8/9" and compiled.num_ranks == 2
    assert main([*words, str(tmp_path), "--nodes", "2"]) == 2
    assert "an artefact is for ranks of one node" in capsys.readouterr().err


def test_work_travels_to_the_processes_of_ranks(model):
    """By name: a card holds functions that no pickle does."""
    for name, shape in (("ag_gemm", {"m": 8, "n": 4, "k": 4}), (f"{model}:mlp", {"m": 9})):
        work = Work(find_op(name), 3, shape, "float32", (2, 1))
        there = pickle.loads(pickle.dumps(work))
        assert there == work and there.op is work.op


@pytest.mark.gpu(2)
@pytest.mark.parametrize("model", ["bfloat16"], indirect=True)
def test_a_program_on_gpus(model):
    work = Work(find_op(f"{model}:mlp"), 2, {"m": 999}, "bfloat16", (2,))
    steps = check_on_gpus(work)
    assert all(step.ok for step in steps), steps


@pytest.mark.gpu(2)
@pytest.mark.parametrize("model", ["bfloat16"], indirect=True)
def test_a_program_is_timed_beside_its_library_calls(model, capsys):
    words = ["bench", f"{model}:mlp", "--ranks", "2", "--shape", "m=999", "--modes", "queued"]
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["variant"] for row in rows} == {"weft", "unfused"}
    assert all(row["checked"] and row["median_us"] > 0 for row in rows)
