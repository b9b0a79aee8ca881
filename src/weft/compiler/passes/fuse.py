"""Say which tasks become one kernel; the others stay calls of libraries.

    gathered = all_gather(a)                 ->    all_gather(a, dim=0, kernel=p_gather)
    product = matmul(gathered, b)                  matmul(gathered, b, kernel=p_multiply)
    gated = silu_mul(product)                      silu_mul(product, kernel=p_multiply)

A kernel is worth its while where it hides communication: a product of gathered rows, a product
whose sums are scattered or summed over ranks, or a sum over ranks with what is done to its rows.
Grouped products are the same, with gather_rows between. Behind scatter_rows a token's sum is no
tile's of the product: its rows are added up by the kernel that sums over ranks, so that one row
travels for each token, and not one for each of its choices.
What follows a product element by element is done in registers, where a tile of it needs no other
tile of the product. A product alone is the library's: nothing is faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from weft.ir.choice import Choice
from weft.ir.kinds import ELEMENTWISE, KINDS, OF_ONE_WIDTH
from weft.ir.shapes import ACTIVATIONS, GATED, ROUTERS
from weft.ir.task import ENGINES, TRAVELLING, Program, Task, arrives, cycle_of
from weft.ir.tensor import Replicate

# Verbs of kernels: PROGRAM_VERB, numbered from the second on.
VERBS = {"all_gather": "gather", "matmul": "multiply", "matmul_tn": "multiply",
         "all_reduce": "reduce", "scatter_rows": "reduce", "all_to_all": "exchange",
         "gather_rows": "multiply", "grouped_matmul": "multiply"}  # fmt: skip
# What kernels do to a grouped product in registers.
GROUPED_EPILOGUES = (*ACTIVATIONS, *GATED)
# What may follow a sum over ranks in the kernel that has whole rows: it leaves their width.
ROW_WISE = (*OF_ONE_WIDTH, "rms_norm")


def fuse(program: Program) -> Program:
    """The program with `kernel` given to the tasks that run as kernels, and why."""
    kernels: dict[str, str] = {}
    choices: list[Choice] = []
    numbers: Counter[str] = Counter()

    def claim(tasks: Sequence[Task], why: str) -> bool:
        nonlocal kernels
        verb = VERBS[tasks[0].kind]
        number = numbers[verb] + 1
        name = f"{program.name}_{verb}" + (f"_{number}" if number > 1 else "")
        claimed = kernels | {task.name: name for task in tasks}
        if cycle_of(program, claimed):  # another kernel stands between its tasks
            return False
        kernels, numbers[verb] = claimed, number
        message = ", ".join(task.name for task in tasks)
        choices.append(Choice(message, "kernel", name, why, tasks[0].place))
        return True

    gathers = {task.name for task in program.tasks if _is_hidden_gather(program, task)}
    for task in program.tasks:
        if task.name in kernels:
            continue
        if task.name in gathers:
            claim([task], "its rows arrive while tiles of others are multiplied")
        elif task.kind == "matmul_tn":
            if behind := gathers & {*task.operands}:
                claim([task], f"adds up products of rows of {', '.join(behind)} as they arrive")
        elif task.kind == "matmul":
            group = _of_product(program, task, kernels)
            is_behind = task.operands[0] in gathers
            if group[-1].kind in TRAVELLING and not is_behind:
                what = "tiles" if group[-1].kind == "all_to_all" else "sums of tiles"
                claim(group, f"{what} travel while others are multiplied")
            elif is_behind:
                group = [one for one in group if not KINDS[one.kind].is_collective]
                why = f"multiplies rows of {task.operands[0]} as they arrive"
                _ = claim(group, why) or claim([task], why)
        elif task.kind == "grouped_matmul":
            if found := _gathered_by_table(program, task, kernels):
                gather, group = found
                why = f"multiplies rows of {gather.name} as they arrive"
                if claim(group, why):
                    claim([gather], "its rows arrive while tiles of others are multiplied")
            elif group := _scattered_by_table(program, task, kernels):
                if claim(group, "a token's rows are added up before they travel"):
                    claim([task], "its rows lie by slot, for the kernel that adds them up")
        elif task.kind == "all_reduce":
            group = _of_sum(program, task, kernels)
            if len(group) > 1 and _has_width(task):
                claim(group, "rows are worked on where they are summed")
    tasks = tuple(replace(one, kernel=kernels.get(one.name, "")) for one in program.tasks)
    fused = replace(program, tasks=tasks, stage="fused")
    return replace(fused, choices=(*program.choices, *choices, *_left(fused)))


def _is_hidden_gather(program: Program, task: Task) -> bool:
    """Rows that products alone read, each row by tiles of its own; or one that sums over them."""
    users = program.users(task.name)
    is_summed = task.kind == "all_gather" and [one.kind for one in users] == ["matmul_tn"]
    return (
        arrives(task) and task.dim == 0 and task.name not in program.results and bool(users)
        and all(
            one.operands.count(task.name) == 1
            and (is_summed or (one.kind == "matmul" and one.operands[0] == task.name))
            for one in users
        )
    )  # fmt: skip


def _gathered_by_table(
    program: Program, task: Task, kernels: dict[str, str]
) -> tuple[Task, list[Task]] | None:
    """A gather of tokens that a grouped product alone reads, and the product with its rows."""
    rows = program.task(task.operands[0])
    if rows.kind != "gather_rows" or not _is_only_for(program, rows, task):
        return None
    gather = program.task(rows.operands[0])
    if gather.kind != "all_gather" or gather.dim != 0 or not _is_only_for(program, gather, rows):
        return None
    product = grown(
        program, [task], GROUPED_EPILOGUES, kernels, ends=lambda one: _is_end(program, one)
    )
    return gather, [rows, *product]


def _scattered_by_table(program: Program, product: Task, kernels: dict[str, str]) -> list[Task]:
    """What brings the rows of a grouped product back to their tokens, sums them over ranks, and is
    done to the sums."""
    scatter = _only_user(program, product)
    if scatter is None or scatter.kind != "scatter_rows":
        return []
    total = _only_user(program, scatter)
    if total is None or product.operands[2] != scatter.operands[1]:
        return []
    if total.kind == "reduce_scatter" and total.dim == 0:
        return [scatter, total]
    if total.kind == "all_reduce" and _has_width(total):
        return [scatter, *_of_sum(program, total, kernels)]
    return []


def _only_user(program: Program, task: Task) -> Task | None:
    users = program.users(task.name)
    is_only = len(users) == 1 and _is_only_for(program, task, users[0])
    return users[0] if is_only else None


def _has_width(task: Task) -> bool:
    """Is a row as long at all sizes?"""
    return task.type is not None and isinstance(task.type.sizes[1], int)


def _is_only_for(program: Program, task: Task, user: Task) -> bool:
    return program.users(task.name) == (user,) and task.name not in program.results


def _of_product(program: Program, task: Task, kernels: dict[str, str]) -> list[Task]:
    """A product, what is done to it in registers, and the collective that ends it."""
    group = grown(program, [task], ELEMENTWISE, kernels, ends=lambda one: _is_end(program, one))
    last = group[-1]
    users = program.users(last.name)
    if len(users) == 1 and last.name not in program.results and _can_scatter(users[0]):
        return [*group, users[0]]
    return group


def _can_scatter(task: Task) -> bool:
    """Do tiles go to owners: of rows that are summed, or of columns?"""
    dim = {"reduce_scatter": 0, "all_to_all": 1}.get(task.kind)
    return task.kind == "all_reduce" or (dim is not None and task.dim == dim)


def _of_sum(program: Program, task: Task, kernels: dict[str, str]) -> list[Task]:
    """A sum over ranks, and what is done to its rows: any of its values may be used elsewhere."""

    def fits(one: Task, group: Sequence[Task]) -> bool:
        # A row is worked on by the rank that sums it: what it meets there must be the same on all.
        operands = [program.task(name).type for name in one.operands]
        is_whole = all(kind is not None and kind.placement == Replicate() for kind in operands)
        row, *others = one.operands
        made = {each.name for each in group}
        is_row = one.kind != "rms_norm" or (row in made and not made & {*others})
        return is_whole and is_row

    return grown(program, [task], ROW_WISE, kernels, fits=fits, ends=lambda group: True)


def grown(
    program: Program, group: list[Task], kinds: Sequence[str], kernels: Mapping[str, str], *,
    fits: Callable[[Task, Sequence[Task]], bool] = lambda task, group: True,
    ends: Callable[[Sequence[Task]], bool],
) -> list[Task]:  # fmt: skip
    """`group` and the tasks behind it that can follow, cut where it `ends` well."""
    best = list(group)
    place = program.tasks.index(group[0])
    behind = {group[0].name}  # values that are there only when the group has run
    for task in program.tasks[place + 1 :]:
        inner = [name for name in task.operands if name in {one.name for one in group}]
        outer = [name for name in task.operands if name not in inner]
        follows = task.kind in kinds and inner and not kernels.get(task.name)
        if follows and not behind & set(outer) and fits(task, group):
            group = [*group, task]
            if ends(group):
                best = group
        if behind & set(task.operands):
            behind.add(task.name)
    return best


def _is_end(program: Program, group: Sequence[Task]) -> bool:
    """Is the last value of the group the only one that is used outside?"""
    names = {one.name for one in group}
    for one in group[:-1]:
        if one.name in program.results:
            return False
        if any(user.name not in names for user in program.users(one.name)):
            return False
    return True


def _left(program: Program) -> Iterator[Choice]:
    """Collectives that nothing hides, and why."""
    for task in program.tasks:
        if KINDS[task.kind].is_collective and not task.kernel:
            yield Choice(task.name, "kernel", "library", _reason(program, task), task.place)


def _reason(program: Program, task: Task) -> str:
    users, source = program.users(task.name), program.task(task.operands[0])
    if task.kind in ROUTERS:
        return "its tables are for whoever works by them"
    if task.kind not in ENGINES:
        return f"no kernel is generated for {task.kind}"
    if task.kind == "all_to_all":
        where = "behind it that reads its rows" if arrives(task) else "before it whose tiles travel"
        return f"there is no product {where}, and nothing else does"
    if task.dim == 1:
        return "it works along columns; rows alone are overlapped"
    if task.kind == "all_gather":
        if task.name in program.results or not users:
            return "it is a result: its rows must outlive the call"
        others = [one.name for one in users if one.kind != "matmul" or one.operands[1] == task.name]
        return f"{', '.join(others)} reads it otherwise than as rows of a product"
    if source.kind == "input" or not source.kernel:
        return f"there is no product behind it to hide it: {source.name} is of {source.kind}"
    return f"{source.name} is used elsewhere too, or waits for rows itself"
