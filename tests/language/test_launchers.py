"""Kernels launched again by addresses: Triton's launchers take what they take in two forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.language import triton_api

PLACE = (4, 1, 1, "stream of 3", "function", "cooperative", "dependent")
HOOKS = ("metadata", None, None, None)


class Launcher:
    """Triton 3.6's of a kernel without scratch memory and descriptors."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = "cooperative", "dependent"

    def __init__(self) -> None:
        self.given: list[tuple] = []
        self.launch = Taking(self.given)

    def __call__(self, *given: Any) -> None:
        self.given.append(("by Triton", *given))


class Taking:
    """A function of C's: it has no closure."""

    def __init__(self, given: list[tuple]) -> None:
        self._given = given

    def __call__(self, *given: Any) -> None:
        self._given.append(given)


class Newer(Launcher):
    """3.7's."""

    arg_annotations, kernel_signature = "annotations", "signature"


class WithScratch(Launcher):
    global_scratch_size = 128


class Watched(Newer):
    """3.9's where it checks what kernels access."""

    gsan_enabled = True


class Kernel:
    function, packed_metadata = "function", "metadata"

    def __init__(self, run: Any) -> None:
        self.run = run

    def _init_handles(self) -> None:
        pass


class Driver:
    def get_current_device(self) -> int:
        return 3

    def get_current_stream(self, device: int) -> str:
        return f"stream of {device}"


@pytest.fixture
def again(monkeypatch):
    monkeypatch.setattr(triton_api.driver_config, "_active", Driver())

    def launched(launcher: Launcher) -> list[tuple]:
        launch = triton_api.relauncher(Kernel(launcher), (4, 1, 1), (7, 8))
        launch(16, 32)
        return launcher.given

    return launched


def test_scratch_memory_lies_before_the_hooks_and_arguments_follow(again):
    assert again(Launcher()) == [(*PLACE, None, None, *HOOKS, 16, 32, 7, 8)]


def test_from_3_7_on_it_lies_behind_them_and_arguments_are_one(again):
    known = ("annotations", "signature")
    assert again(Newer()) == [(*PLACE, *HOOKS, None, None, *known, (16, 32, 7, 8))]


@pytest.mark.parametrize("kind", [WithScratch, Watched])
def test_where_it_needs_more_triton_launches_it(again, kind):
    assert again(kind()) == [("by Triton", *PLACE[:5], *HOOKS, 16, 32, 7, 8)]


@pytest.mark.parametrize(("kind", "args"), [
    (Launcher, (None, None, *HOOKS, 116, 32, 7)), (Newer, (*HOOKS, None, None, "annotations",
                                                           "signature", (116, 32, 7))),
])  # fmt: skip
def test_lists_of_launches_are_of_either_form(kind, args):
    launcher = kind()
    found = triton_api.bound_launch(
        Kernel(launcher), None, (4, 1, 1), (Pointer(16), Pointer(32), 7), {},
        lambda address: (1, 6) if address == 16 else (0, 0),
    )  # fmt: skip
    assert found is not None
    found.run([0, 110], "stream of 3")
    assert launcher.given == [(*PLACE, *args)]


class Pointer:
    """Memory by its address."""

    def __init__(self, address: int) -> None:
        self._address = address
        self.dtype = torch.float32

    def data_ptr(self) -> int:
        return self._address
