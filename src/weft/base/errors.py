"""Every error weft raises. Each message carries the values, the place and the remedy."""

from __future__ import annotations

from weft.base.place import UNKNOWN, Place


class WeftError(Exception):
    """Root of weft's errors. `place` is the user's line where one is known."""

    def __init__(self, message: str, *, place: Place = UNKNOWN):
        super().__init__(message if not place.frames else f"{message}\n  at {place}")
        self.message = message
        self.place = place


class ShapeError(WeftError, ValueError):
    """Shapes that do not fit together."""


class DtypeError(WeftError, TypeError):
    """A dtype that an operation does not take, or two that differ."""


class ConfigError(WeftError, ValueError):
    """A configuration that does not fit the problem or the target."""


class UsageError(WeftError, ValueError):
    """A call that weft does not understand: the message names what it takes."""


class PlacementError(WeftError, ValueError):
    """Tensors of a program, or DTensors, that do not lie where an operation needs them."""


class IllegalError(WeftError, ValueError):
    """A program in the IR that breaks rules of its level; `violations` are all of them."""

    def __init__(self, message: str, *, place: Place = UNKNOWN, violations: tuple = ()):
        super().__init__(message, place=place)
        self.violations = violations


class CapacityError(WeftError, ValueError):
    """More rows than a call was given room for, found on the device: the message says how many."""


class NotSymmetricError(WeftError, ValueError):
    """A pointer or tensor that is not on the symmetric heap, where one is needed."""


class PeerError(WeftError, IndexError):
    """A rank outside 0 .. num_ranks - 1."""


class FarPointerError(WeftError):
    """Direct access to a peer in another scale-up domain; use put, get or put_signal."""


class OutOfMemoryError(WeftError, MemoryError):
    """The symmetric heap is full."""


class AllocationOrderError(WeftError):
    """Ranks that allocate different things in their n-th symmetric allocation."""


class CallOrderError(WeftError):
    """Ranks that call collective operations in different order."""


class CompileError(WeftError):
    """A kernel that Triton cannot compile; the place is the user's line."""


class NotPreparedError(WeftError):
    """A kernel that a call would compile, in a world that compiles none: see weft.prepare."""


class UnsupportedError(WeftError, NotImplementedError):
    """Something this target, or the emulator, does not do; the message says why."""


class ResidencyError(WeftError):
    """A grid whose programs wait for each other and cannot all be resident."""


class OutOfResourcesError(WeftError):
    """A kernel that asks for more memory, registers or warps than a block of threads has."""


class TimeoutError(WeftError, TimeoutError):  # the field's word for it
    """A bounded wait reached its deadline; the message is the table of waits."""


class PoisonedError(WeftError):
    """The world met a timeout or an abort: only close() works."""


class FindingError(WeftError):
    """Root of what the emulator finds while a program runs; `finding` is its record."""

    def __init__(self, message: str, *, place: Place = UNKNOWN, finding: object = None):
        super().__init__(message, place=place)
        self.finding = finding


class RaceError(FindingError):
    """Two accesses to one location, at least one a write, that nothing orders."""


class DeadlockError(FindingError):
    """Every program that is left waits for a signal that nobody can give."""


class OutOfBoundsError(FindingError, IndexError):
    """An access outside every allocation."""


class EndlessLoopError(FindingError):
    """A loop of a kernel that computes on and on without touching memory."""


class UninitializedError(FindingError):
    """A read of memory that nothing has written."""


class SignalError(FindingError):
    """A lost or doubled signal, or an epoch that did not advance."""


class DeterminismError(FindingError):
    """Results that differ between schedules where they are said to be equal."""
