"""Device IR: what each rank's streams do, in the order in which the host queues it.

    program(ag_gemm, mesh=tp, results=(c,))
    x = buffer(bfloat16, (Part(m), 64), role=shared)
    x_ready = channel(x)
    notify(x_ready, stream=copy)

All ranks run the same plan. Within a stream statements follow each other; between streams `after`
orders, between ranks a channel alone: its words are announced by `notify`, `copy` or `launch` and
waited for by `wait` or `launch`. On one rank a copy of what tiles leave takes their tokens, which
are a channel too. What reaches another rank's memory is ordered with what that rank does only by a
path over a channel; the rules look for one.

A call uses one slot: its symmetric buffers and the words of all its channels. What `takes` credits
waits until all ranks have given back what the slot held before; what `gives` them ends the call.
A plan passes three stages: drawn (what moves and what runs), signalled (in which order), allocated
(which memory); a plan that says none has passed them all.

This is the page that others import. The statements are in `device_statements.py`, the plan and
the order of what it does in `device_moments.py`, and what is legal in `device_rules.py`.
"""

from __future__ import annotations

from weft.ir import text
from weft.ir.choice import Choice
from weft.ir.device_moments import Access, Moments, Plan, accesses, announced, are_apart, awaited
from weft.ir.device_rules import RULES
from weft.ir.device_statements import (
    GIVEN,
    NO_MEMORY,
    NUM_RANKS,
    ON_HEAP,
    OWN_ROWS,
    PROGRAMS,
    ROLES,
    STAGES,
    TEMPLATES,
    After,
    Buffer,
    Call,
    Channel,
    Copy,
    Do,
    Launch,
    Notify,
    Part,
    Statement,
    Step,
    Take,
    Tiles,
    Wait,
    scales_of,
)
from weft.ir.legality import Violation, illegal, run
from weft.ir.tensor import Times

__all__ = [  # the statements, their order and the rules are this page's too
    "GIVEN", "NO_MEMORY", "NUM_RANKS", "ON_HEAP", "OWN_ROWS", "PROGRAMS", "RECORDS",
    "ROLES", "RULES", "STAGES", "TEMPLATES", "Access", "After", "Buffer", "Call", "Channel",
    "Choice", "Copy", "Do", "Launch", "Moments", "Notify", "Part", "Plan", "Statement",
    "Step", "Take", "Tiles", "Times", "Wait", "accesses", "announced", "are_apart", "awaited",
    "check", "parse", "require", "scales_of", "show",
]  # fmt: skip


RECORDS = {
    **text.words(Buffer, Channel, Call, Copy, Launch, Notify, Wait, Take, After, Choice),
    "Part": Part,
    "Tiles": Tiles,
    "Times": Times,
    "Do": Do,
}


def show(plan: Plan, *, places: bool = True) -> str:
    """The plan as text; `parse` takes it back."""
    header = text.Header(plan.name, plan.mesh, plan.stage, plan.results, plan.place)
    return text.show([header, *plan.statements], places=places)


def parse(source: str) -> Plan:
    """Raises  UsageError: with the line"""
    header, statements = text.read(source, RECORDS)
    return Plan(header.title, header.mesh, statements, header.results, header.stage, header.place)


# Rules are run stage by stage: those that ask for an order once names and signals make sense.
_CHECKED = {"drawn": ("drawn", "body"), "signalled": ("drawn", "body", "signalled", "order"),
            "allocated": ("drawn", "body", "signalled", "order", "allocated")}  # fmt: skip


def check(plan: Plan) -> list[Violation]:
    """Every breach of the rules that hold at the plan's stage."""
    stage = plan.stage or STAGES[-1]
    if stage not in STAGES:
        message = f"{plan.name} is at stage {stage}; there are {', '.join(STAGES)}"
        return [Violation("stage", message, plan.place)]
    return run(RULES, plan, _CHECKED[stage])


def require(plan: Plan) -> Plan:
    """The plan itself. Raises  IllegalError: with all breaches, and the user's lines"""
    if violations := check(plan):
        raise illegal(f"Device IR of {plan.name}", violations)
    return plan
