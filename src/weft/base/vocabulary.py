"""The words every room shares: memory orders, scopes, and what a notify does to a signal."""

from __future__ import annotations

import enum


class Order(enum.Enum):
    """Memory order of an access, with PTX's meaning and Triton's spelling."""

    RELAXED = "relaxed"
    ACQUIRE = "acquire"
    RELEASE = "release"
    ACQ_REL = "acq_rel"

    @property
    def acquires(self) -> bool:
        return self in (Order.ACQUIRE, Order.ACQ_REL)

    @property
    def releases(self) -> bool:
        return self in (Order.RELEASE, Order.ACQ_REL)


class Scope(enum.Enum):
    """The programs that an ordered access includes: one block, one GPU, or every rank."""

    BLOCK = "cta"
    DEVICE = "gpu"
    SYSTEM = "sys"


class SignalOp(enum.Enum):
    """What a notify does to the signal word: add to it, or store over it."""

    ADD = "add"
    SET = "set"
