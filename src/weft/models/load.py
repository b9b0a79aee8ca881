"""A model of transformers, spread over the ranks, of whose weights each rank reads its part.

    config.json -> the model's class, on the meta device -> weft.parallelize -> own parts of weights

There is no definition of a model here: what its class computes is what runs, by weft's layers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.base.errors import UnsupportedError, UsageError
from weft.base.parts import part_of
from weft.layers.attention import PROJECTIONS
from weft.layers.mlp import NAMES
from weft.layers.moe import COLUMNS
from weft.layers.parallelize import parallelize, ties_of
from weft.layers.shards import seat_of
from weft.layers.transformers_plans import KNOWN
from weft.models.checkpoint import Stored, tensors_of
from weft.models.needed import needed
from weft.runtime.world import World

# Modules whose names in checkpoints are not those in models.
RENAMED = {".mlp.": ".block_sparse_moe."}
# Of older checkpoints; a model computes them.
COMPUTED = "rotary_emb.inv_freq"
# So many mistakes of a kind are listed.
LISTED = 20


def load(
    folder: str | Path, world: World, *, dtype: torch.dtype | None = None,
    split_from: float | None = None, experts: str = COLUMNS, random: bool = False,
) -> Any:  # fmt: skip
    """The causal language model in `folder`, this rank's part, on the world's device. Collective.

    It is transformers' own model, made parallel by its plan: called and configured as it is.

    dtype       of the weights, by default the configuration's
    split_from, experts  as `weft.parallelize` takes them
    random      only config.json is read, and weights are drawn: the same on any number of ranks
                whose devices are of one kind
    Raises      UsageError: a folder without these files, a model of a type that has no plan, or all
                tensors that are missing, not expected or of other sizes
                ShapeError: ranks that do not divide what they must
    """
    model = _ordinary(Path(folder), dtype)
    whole = {name: tuple(one.shape) for name, one in model.state_dict().items()}
    ties = [set(names) for names in ties_of(model)]
    parallelize(model, world, split_from=split_from, experts=experts)
    _materialise(model, world.device)
    own = model.state_dict()
    if random:
        _draw(own, whole, world, model.config)
    else:
        _read(Path(folder), own, whole, world, ties)
    return model.requires_grad_(False).eval()


def load_config(folder: str | Path) -> Any:
    """The configuration in `folder`.

    Raises  UsageError: there is none, or one of a type that has no plan
    """
    if not (Path(folder) / "config.json").is_file():
        raise UsageError(
            f"{folder}: has no config.json; pass a folder with a model as transformers writes it, "
            "or make one: weft make-tiny DIR"
        )
    config = needed("transformers").AutoConfig.from_pretrained(str(folder))
    if config.model_type not in KNOWN:
        raise UsageError(
            f"{folder}: a model of type {config.model_type!r}; there are plans for "
            f"{', '.join(KNOWN)}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"{folder}: its weights are quantised ({config.quantization_config}); pass a "
            "checkpoint in bfloat16, float16 or float32"
        )
    return config


def _ordinary(folder: Path, dtype: torch.dtype | None) -> Any:
    """The whole model, without memory but for its buffers."""
    config, transformers = load_config(folder), needed("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype or config.dtype or torch.float32, attn_implementation="sdpa"
        )
    # What a module computes of the configuration, such as a rotation's frequencies.
    for name, module in list(model.named_modules()):
        if any(True for _ in module.buffers(recurse=False)):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, type(module)(config))
    return model


def _materialise(model: nn.Module, device: torch.device | str) -> None:
    """Memory for parameters on the meta device; those that are one stay one."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, one in module.named_parameters(recurse=False):
            if one.is_meta and id(one) not in made:
                made[id(one)] = nn.Parameter(torch.empty_like(one, device=device))
            module.register_parameter(name, made.get(id(one), one))
    model.to(device)


# ---------------------------------------------------------------------------------------------
# Which part of which tensor goes where


@dataclass(frozen=True)
class Part:
    """`own` is made of `index` of a checkpoint's tensor `name`, which has the sizes `whole`."""

    name: str
    whole: tuple[int, ...]
    index: tuple[slice, ...]
    own: Tensor


def _part(name: str, own: Tensor, whole: Sequence[int], world: World) -> Part:
    """Cut where sizes differ, as the layers cut: torch.chunk, or keys by their heads."""
    seat = (world.rank, world.num_ranks)
    if name.rpartition(".")[0].endswith(PROJECTIONS[1:]):
        seat = seat_of(whole[0] // own.shape[0], world)
    index = [
        slice(None) if size == there else slice(*part_of(there, *seat))
        for size, there in zip(own.shape, whole)
    ]
    return Part(name, tuple(whole), tuple(index), own)


def _parts(name: str, own: Tensor, whole: Sequence[int], world: World) -> Iterator[Part]:
    """Of a tensor that is stored under its name in the model."""
    if not name.endswith("gate_up_proj"):
        yield _part(name, own, whole, world)
        return
    experts, rows, hidden = whole  # gate over up: both are spread over the ranks
    for i, half in enumerate(own.chunk(2, 1)):
        part = _part(name, half, (experts, rows // 2, hidden), world)
        first, end, _ = part.index[1].indices(rows // 2)
        moved = slice(first + i * rows // 2, end + i * rows // 2)
        yield Part(name, tuple(whole), (part.index[0], moved, part.index[2]), half)


def _by_expert(name: str, own: Tensor, whole: Sequence[int], world: World) -> list[list[Part]]:
    """Of a tensor that stacks experts', stored one by one under either of two sets of names."""
    prefix, _, kind = name.rpartition(".")
    if not prefix.endswith(".experts"):
        return []
    _, rows, columns = whole
    found = []
    for gate, up, down in NAMES[:2]:
        names = (gate, up) if kind == "gate_up_proj" else (down,)
        sizes = (rows // len(names), columns)
        found.append([
            _of_expert(f"{prefix}.{e}.{one}.weight", part, e, whole[0], sizes, world)
            for one, part in zip(names, own.chunk(len(names), 1))
            for e in range(whole[0])
        ])  # fmt: skip
    return found


def _of_expert(
    name: str, own: Tensor, expert: int, experts: int, sizes: Sequence[int], world: World
) -> Part:
    """One of them in what a rank has of all, parts or whole ones: nothing if it is another's."""
    first = 0
    if len(own) != experts:
        first, _ = part_of(experts, world.rank, world.num_ranks)
    if 0 <= expert - first < len(own):
        return _part(name, own[expert - first], sizes, world)
    return Part(name, tuple(sizes), (slice(0), slice(None)), own.new_empty(0, sizes[1]))


def _ways(name: str, own: Tensor, whole: Sequence[int], world: World) -> Iterator[list[Part]]:
    """All ways in which a tensor of the model may be stored."""
    for new, old in (("", ""), *RENAMED.items()):
        stored = name.replace(new, old) if new else name
        yield from _by_expert(stored, own, whole, world)
        yield list(_parts(stored, own, whole, world))


# ---------------------------------------------------------------------------------------------
# Filling them


def _read(
    folder: Path, own: Mapping[str, Tensor], whole: Mapping[str, Sequence[int]], world: World,
    ties: Sequence[set[str]],
) -> None:  # fmt: skip
    stored = tensors_of(folder)
    parts: list[Part] = []
    missing, found = [], set()
    for name, tensor in own.items():
        ways = list(_ways(name, tensor, whole[name], world))
        way = next((one for one in ways if any(part.name in stored for part in one)), ways[0])
        if any(part.name in stored for part in way):
            found.add(name)
            parts += way
        else:
            missing.append((name, way))
    tied = set().union(*(names for names in ties if names & found))
    parts += [part for name, way in missing if name not in tied for part in way]
    _check(folder, parts, stored)
    for part in parts:
        part.own.copy_(stored[part.name].read(part.index))


def _check(folder: Path, parts: Sequence[Part], stored: Mapping[str, Stored]) -> None:
    """Raises  UsageError: all that is not as the configuration says"""
    expected = {part.name: part for part in parts}
    wrong = {
        "missing": [
            f"{name} {list(part.whole)}" for name, part in expected.items() if name not in stored
        ],
        "not expected": [
            f"{name} {list(one.shape)} in {one.file}" for name, one in stored.items()
            if name not in expected and not name.endswith(COMPUTED)
        ],
        "of other sizes": [
            f"{name} {list(one.shape)} in {one.file}, not {list(expected[name].whole)}"
            for name, one in stored.items()
            if name in expected and one.shape != expected[name].whole
        ],
    }  # fmt: skip
    lines = []
    for kind, found in wrong.items():
        rest = [f"  and {len(found) - LISTED} more"] if len(found) > LISTED else []
        lines += [f"{len(found)} {kind}:", *(f"  {one}" for one in found[:LISTED]), *rest]
        lines = lines if found else lines[:-1]
    if lines:
        raise UsageError("\n".join([
            f"{folder}: its tensors are not those of the model in its config.json; pass a whole "
            "checkpoint of that model", *lines,
        ]))  # fmt: skip


def _draw(
    own: Mapping[str, Tensor], whole: Mapping[str, Sequence[int]], world: World, config: Any
) -> None:
    """Norms are ones and biases zeros; all else is normal, and a tensor's name is its seed."""
    drawn: set[int] = set()
    for name, tensor in own.items():
        if tensor.data_ptr() in drawn and tensor.numel():
            continue
        drawn.add(tensor.data_ptr())
        if tensor.dim() == 1:
            tensor.fill_(0 if name.endswith("bias") else 1)
            continue
        generator = torch.Generator(world.device).manual_seed(zlib.crc32(name.encode()))
        numbers = torch.empty(tuple(whole[name]), dtype=tensor.dtype, device=world.device)
        numbers.normal_(0, config.initializer_range, generator=generator)
        for part in _parts(name, tensor, whole[name], world):
            part.own.copy_(numbers[part.index])
