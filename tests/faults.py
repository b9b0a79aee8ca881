"""Faults planted in a copy of the source, one at a time: do the tests nearest to them notice?

    python tests/faults.py [WORD ...]     those whose file or words hold one of these; all, without

A fault is one text of one file replaced by another that still runs: a comparison turned round, a
part of a key left out, a check that is gone. It is killed if one of its tests fails, and survives
if all pass. The list below grows with what users found that no test had held: plant it, see it
survive, write the test. `tests/test_faults.py` runs all of it; the working tree is never changed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT_S = 120


@dataclass(frozen=True)
class Fault:
    """`old` occurs once in `file` (below src/weft) and becomes `new`; `breaks` is what is wrong
    then; `tests` are the nodes (below tests) of which one must fail."""

    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]

    def __init__(self, file: str, old: str, new: str, breaks: str, *tests: str) -> None:
        for name, value in zip(self.__annotations__, (file, old, new, breaks, tests)):
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        return re.sub(r"\W+", "-", f"{Path(self.file).stem} {self.breaks}").strip("-")


class CannotPlant(Exception):
    """The fault does not fit the source any more, or the tests could not be run with it."""


@dataclass(frozen=True)
class Verdict:
    killed: bool
    seconds: float
    output: str


class Copy:
    """A copy of the source tree in `folder`, in which one fault is planted at a time."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "src"
        shutil.copytree(ROOT / "src" / "weft", self.source / "weft")

    def run(self, *tests: str) -> Verdict:
        """Run these tests with the copy's source, until one fails."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
                   "-p", "no:xdist", f"--timeout={LIMIT_S}"]  # fmt: skip
        # Compiled modules are known by size and second: a fault could be taken for what it mends.
        environment = {**os.environ, "PYTHONPATH": str(self.source), "PYTHONDONTWRITEBYTECODE": "1"}
        start = time.monotonic()
        done = subprocess.run(
            [*command, *(str(ROOT / "tests" / test) for test in tests)],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S * 5,
        )  # fmt: skip
        output = done.stdout + done.stderr
        ran = re.search(r"\b(\d+) (passed|failed)\b", output)
        if done.returncode not in (0, 1) or not ran:
            raise CannotPlant(f"the tests did not run (pytest ended with {done.returncode}; name "
                              f"tests that exist, are not skipped, and a fault that can be "
                              f"imported):\n{output[-3000:]}")  # fmt: skip
        return Verdict(done.returncode == 1, time.monotonic() - start, output)

    def try_fault(self, fault: Fault) -> Verdict:
        path = self.source / "weft" / fault.file
        text, status = path.read_text(), path.stat()
        if (count := text.count(fault.old)) != 1:
            raise CannotPlant(
                f"src/weft/{fault.file} holds {fault.old!r} {count} times, not once: "
                "give the fault its new text, or drop it if it cannot happen any more"
            )
        changed = text.replace(fault.old, fault.new)
        try:
            compile(changed, str(path), "exec")
        except SyntaxError as error:
            raise CannotPlant(
                f"src/weft/{fault.file} with the fault is no Python: {error}"
            ) from error
        for stale in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            stale.unlink()
        path.write_text(changed)
        try:
            return self.run(*fault.tests)
        finally:
            path.write_text(text)
            os.utime(path, (status.st_atime, status.st_mtime))


WRONG, RIGHT = "verify/test_wrong.py::test_found", "verify/test_right.py::test_silent"
SHADOW = "emulator/test_shadow.py::test_the_one_access_that_is_not_ordered_is_found_whichever_it_is"
MACHINE = "emulator/test_machine.py::"
DISTRIBUTED = "emulator/test_host_distributed.py::"
SEARCH = "verify/exploration/test_exploration_search.py::"
BLOCKS = "verify/exploration/test_exploration_blocks.py::test_counted_by_hand"
LEGALITY = "ir/test_legality.py::"
REMOVALS = "compiler/test_core_removals.py::"
COST = (
    "compiler/test_engines.py::test_each_number_of_the_machine_counts_and_a_worse_one_never_helps"
)
ENGINES = "compiler/test_engines.py::"
MEMORY = "compiler/test_allocate.py::"
ARTEFACT = "runtime/test_artefact.py::"
REPLAYS = "runtime/test_replays.py::"
LISTS = "runtime/test_command_list.py::test_a_list_queues_what_a_call_queues"
WORLD = "runtime/test_world.py::"
REPLAYED = (
    "ops/test_replayed_calls.py::test_a_replay_has_the_operands_and_the_result_of_its_own_call"
)
PROGRAMS = "plan/test_runner.py::test_calls_that_come_again_have_their_own_operands_and_layouts"
PROTOCOL = "tune/test_protocol.py::"
PERSISTENT = "megakernel/test_check.py::test_breaches_are_found"
PARTS = "megakernel/test_split_k.py::"
OWN_ROWS = "compiler/test_own_rows.py::test"
WORDS = "compiler/test_model_words.py::test_it_is_its_meaning"

FAULTS = [
    # ---- the emulator: accesses, their order, and what ranks exchange
    Fault("emulator/shadow.py", "if reads is not None and modifies:", "if False and modifies:",
          "an addition behind a plain read is not checked", f"{WRONG}[word_read_plainly]"),
    Fault("emulator/clocks.py", "return same_device and Scope.BLOCK not in (first, second)",
          "return same_device", "block scope taken for device scope",
          f"{WRONG}[block_scoped_counter]"),
    Fault("emulator/shadow.py",
          "unordered = self._unordered(accesses, access)\n        if len(unordered)",
          "unordered = self._unordered(accesses, access)[:1]\n        if len(unordered)",
          "of several unordered reads the latest alone is kept", f"{SHADOW}[3-False]"),
    Fault("emulator/accesses.py", "if replaces:\n            word.published.clear()",
          "if False:\n            word.published.clear()",
          "a store to a word does not end what releases of it publish",
          f"{WRONG}[set_over_a_release]"),
    Fault("emulator/clocks.py", "if first is Scope.SYSTEM and second is Scope.SYSTEM:",
          "if Scope.BLOCK not in (first, second):", "device scope reaches other ranks",
          f"{WRONG}[gpu_scoped_signal]"),
    Fault("emulator/memory.py", "if earlier is not None:\n            # Not",
          "if False:\n            # Not", "a release forgets what its rank had published there",
          f"{RIGHT}[programs_of_one_rank_share_a_counter]"),
    Fault("emulator/memory.py", "self.sync = {cell * factor: word", "self.sync = {cell: word",
          "what words have published is elsewhere when cells shrink",
          f"{RIGHT}[word_beside_halves_of_words]"),
    Fault("emulator/memory.py", "return allocation if address < allocation.end else None",
          "return allocation if address <= allocation.end else None",
          "the byte behind an allocation is its own",
          "emulator/test_memory.py::test_the_bytes_around_a_range_are_not_its_own"),
    Fault("emulator/clocks.py", "(self.stream[agent], -1) >= self.position[agent]",
          "(self.stream[agent], -1) > self.position[agent]",
          "the last work that a stream waited for is not known",
          f"{MACHINE}test_streams_order_and_events_order_streams"),
    Fault("emulator/clocks.py", "clock.agents.get(agent, -1) >= self.segment_clock[segment]",
          "clock.agents.get(agent, -1) > self.segment_clock[segment]",
          "a release publishes all but the last", f"{RIGHT}[barrier_by_counters]"),
    Fault("emulator/packets.py", "same = old >> FLAG_SHIFT == new >> FLAG_SHIFT",
          "same = old >> FLAG_SHIFT > new >> FLAG_SHIFT", "a repeated flag passes",
          f"{WRONG}[packet_flag_repeated]"),
    Fault("emulator/packets.py", "if self._is_unwritten(allocation, number):", "if False:",
          "packets in memory that nobody has written", f"{WRONG}[packets_in_fresh_memory]"),
    Fault("emulator/packets.py", "if self._positions[-1:] != [position]:",
          "if not self._positions:", "what later works read is read by the first",
          f"{WRONG}[credit_for_the_buffer_before]"),
    Fault("emulator/meetings.py", "if self.left == len(self.members):", "if False:",
          "all that ranks ever exchanged is kept",
          f"{DISTRIBUTED}test_what_ranks_have_exchanged_is_not_kept"),
    Fault("emulator/meetings.py", "if what != self.what:", "if False:",
          "ranks meet in different collectives",
          f"{DISTRIBUTED}test_ranks_that_call_different_collectives"),
    Fault("emulator/meetings.py", "needed = range(len(self.members)) if",
          "needed = range(len(self.members) - 1) if", "the last rank is not waited for",
          f"{DISTRIBUTED}test_who_comes_last_is_waited_for"),
    Fault("emulator/ledger.py",
          "return (value - other + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))",
          "return value - other", "counters that pass their largest value go back",
          f"{WRONG}[doubled_signal_past_the_largest_value]"),
    Fault("emulator/isolation.py", "seed * 65537 + rank)", "seed * 65537)",
          "all ranks draw the same random numbers",
          "emulator/test_host_session.py::test_the_same_seed_is_the_same_random_numbers"),
    # ---- the verifier: which orders are tried, what is told
    Fault("verify/exploration/partial_order.py", "gone = ends or not passes",
          "gone = not passes", "a store to a word before or behind a wait is one case",
          f"{SEARCH}test_a_store_to_a_word_ends_what_its_releases_hand_on"),
    Fault("verify/exploration/partial_order.py", "self._instead.add(i)", "pass",
          "an addition that could stand in for another is not tried",
          f"{SEARCH}test_counted_by_hand[two of three signals are enough]"),
    Fault("verify/exploration/partial_order.py",
          "if number != second and self._knows(step.past, first):",
          "if self._knows(step.past, first):", "the second of a race may not go first",
          f"{SEARCH}test_counted_by_hand[two tickets twice, of different words]"),
    Fault("verify/exploration/partial_order.py",
          "if earlier.before == access.expected:", "if False:",
          "a wait at an mbarrier never goes on a round too early",
          f"{BLOCKS}[a wait that is reached late]"),
    Fault("verify/exploration/partial_order.py",
          "elif not is_meeting and earlier.before != access.before:", "elif False:",
          "who arrives in which phase of an mbarrier is one case",
          "verify/exploration/test_exploration_blocks.py::test_random_blocks"),
    Fault("verify/exploration/words.py",
          'if access.after == access.before else "update"', 'if True else "update"',
          "an arrival that ends its phase leaves room beside it",
          "verify/exploration/test_exploration_blocks.py::test_random_blocks"),
    Fault("verify/exploration/execution.py",
          "self.visibility.unordered.add(barrier.word)", "pass",
          "arrivals beyond what a phase has commute with those that it has",
          "verify/exploration/test_exploration_blocks.py::test_random_blocks"),
    Fault("verify/exploration/search.py",
          "result.outcomes.setdefault(ran.outcome, choices)", "pass",
          "results of different orders are not compared",
          f"{SEARCH}test_a_result_that_depends_on_the_schedule"),
    Fault("verify/exploration/words.py",
          "return (seen - expected) & ((1 << bits) - 1) < 1 << (bits - 1)",
          "return seen >= expected", "an explored wait does not wrap around",
          f"{SEARCH}test_a_wait_passes_modulo_its_word"),
    Fault("verify/exploration/execution.py", "if at_once > device.num_sms:",
          "if at_once > device.num_sms + 1:", "a device that is one place short is roomy",
          f"{SEARCH}test_which_of_two_kernels_takes_the_room"),
    Fault("verify/mutants/search.py", "yield runs[i % len(runs)], (i + 1) % seeds",
          "yield runs[0], (i + 1) % seeds", "mutants of one argument stay with one run",
          "verify/mutants/test_mutant_search.py::test_mutants_of_one_argument_go_round_all_runs"),
    Fault("verify/mutants/search.py", "if report.of(NOT_RUN):", "if False:",
          "a limit that was reached is not told",
          "verify/mutants/test_mutant_search.py::test_a_bound_on_time_is_kept_and_told"),
    Fault("verify/lint/launches.py",
          "is_constant = value.number is not None and", "is_constant = False and",
          "what a launch passes for a constexpr decides nothing",
          "verify/lint/test_launched_constants.py::test_options_that_a_launch_decides"),
    # ---- the IR's rules
    Fault("ir/device_rules.py", "joins.get(stream, -1) < i:", "stream not in joins:",
          "a join before a stream's last step is enough",
          f"{LEGALITY}test_a_copy_takes_tokens_of_the_kernel_that_it_is_queued_behind"),
    Fault("ir/device_rules.py", "if len(steps) > 1:", "if len(steps) > 2:",
          "a token is taken twice",
          f"{LEGALITY}test_a_copy_takes_tokens_of_the_kernel_that_it_is_queued_behind"),
    Fault("ir/core_rules.py", "one.unless in may and not one.by", "one.unless in may",
          "one program's wait guards what all read",
          f"{LEGALITY}test_each_rule_finds_its_breach"),
    Fault("ir/core_rules.py", '_COMPLETE = ("all",', '_COMPLETE = ("all", "tile",',
          "an engine writes words of chunks without rows when the call is over",
          f"{LEGALITY}test_each_rule_finds_its_breach"),
    Fault("ir/core_rules.py", 'isinstance(one, Notify) and one.to == "engine"', "False",
          "an engine writes before credits have come", f"{REMOVALS}test_operators_kernels_are_"
          "refused_without_one_of_their_signals"),
    Fault("ir/core_in_plan.py", "if (by, to) != (one.by, one.to):", "if by != one.by:",
          "a kernel forgets who waits for its signals",
          f"{REMOVALS}test_programs_kernels_are_refused_without_one_of_their_signals"),
    Fault("ir/shapes.py", "return cache // sequences if cache % sequences == 0 else None",
          "return cache // sequences", "a cache that its sequences do not divide",
          f"{LEGALITY}test_a_cache_has_as_many_rows_for_each_sequence"),
    Fault("ir/shapes.py", "if not isinstance(experts, int) or experts < top_k:",
          "if not isinstance(experts, int) or experts <= top_k:",
          "all experts chosen is one too many", f"{LEGALITY}test_all_experts_may_be_chosen"),
    # ---- the compiler: costs, memory, tiles
    Fault("compiler/cost/products.py",
          "return end + reread_us(product, machine) + machine.end_us",
          "return end + machine.end_us", "B that is read again costs nothing",
          f"{ENGINES}test_what_a_gathered_product_loses_to_readings_of_b_is_in_its_time"),
    Fault("compiler/cost/products.py",
          "return leaving / machine.num_sms * held_us + machine.sums_us",
          "return machine.sums_us",
          "tiles that leave hold nobody up", f"{COST}[wide_leave_us]"),
    Fault("compiler/cost/products.py", "near_us = near * part_bytes / near_gbps / 1e3",
          "near_us = part_bytes / near_gbps / 1e3", "rows go to one peer only",
          f"{ENGINES}test_a_thin_product_takes_as_long_as_its_rows_to_arrive[sm_push]"),
    Fault("compiler/cost/products.py", "if b_bytes > machine.cached_bytes else 1",
          "if False else 1",
          "B is read once however large it is",
          f"{ENGINES}test_b_is_read_for_each_group_of_rows_unless_it_stays_in_l2"),
    Fault("compiler/cost/products.py", "copy_us = machine.token_us + machine.copy_us",
          "copy_us = machine.copy_us", "tokens are there at once", f"{COST}[token_us]"),
    Fault("compiler/cost/libraries.py",
          "shards = (num_ranks - 1) / (machine.library_ranks - 1)",
          "shards = 1", "libraries gather as on four ranks",
          f"{ENGINES}test_more_ranks_or_wider_products_never_end_sooner[library's all_gather]"),
    Fault("compiler/cost/libraries.py", "return last_us * num_bytes / last", "return last_us",
          "beyond the last reading nothing takes longer",
          f"{ENGINES}test_a_curve_is_linear_between_what_was_read"),
    Fault("compiler/cost/choose.py", 'if engine in LL and shape.m > PACKET_ROWS:',
          "if False:",
          "packets for any number of rows", f"{ENGINES}test_packets_are_for_few_rows"),
    Fault("compiler/cost/choose.py", 'if (engine in ("sm_put", "relay")) != is_far:',
          'if engine in ("sm_put", "relay") and not is_far:', "stores and copies reach other nodes",
          f"{ENGINES}test_other_nodes_are_reached_by_puts"),
    Fault("compiler/cost/choose.py", "(m, n), k = held.extents,",
          "(m, n), k = (held.end_row // facts.num_ranks, held.end_column),",
          "a product is predicted with one rank's rows",
          f"{ENGINES}test_a_product_is_predicted_with_all_ranks_rows_and_its_own_columns"),
    Fault("compiler/cost/choose.py", "(m, n), k = held.extents, part",
          "(m, n), k = (held.end_row * facts.num_ranks, held.end_column), part",
          "rows of all ranks are counted for each rank",
          f"{ENGINES}test_a_product_is_predicted_with_all_ranks_rows_and_its_own_columns"),
    Fault("compiler/cost/choose.py", "or facts.target.num_sms < 2):", "):",
          "copy engines where no SM can be left for what announces copies",
          "compiler/test_partition.py::test_a_target_without_an_sm_to_spare"),
    Fault("compiler/passes/partition.py", "spare = SPARE_SMS", "spare = 0",
          "no SM is left for what announces copies",
          "compiler/test_partition.py::test_an_sm_is_left_for_what_announces_copies"),
    Fault("compiler/cost/libraries.py",
          "return low_us + (high_us - low_us) * (num_bytes - low) / (high - low)",
          "return low_us", "between two readings nothing takes longer",
          f"{ENGINES}test_a_curve_is_linear_between_what_was_read"),
    Fault("ir/device.py", "(0, 0))[0], len(self.steps) + 1)",
          "(0, 0))[0], len(self.steps))", "a result is over with the last step",
          f"{MEMORY}test_what_is_over_makes_room"),
    Fault("compiler/passes/allocate.py",
          "return all(device.are_apart(plan, name, buffer.name) for name in there)",
          "return device.are_apart(plan, home.name, buffer.name)",
          "a third buffer shares with a second that is in use",
          f"{MEMORY}test_of_three_that_share_all_are_asked"),
    Fault("compiler/passes/allocate.py",
          "homes[home] = max(homes.get(home, 0), needed[name])",
          "homes.setdefault(home, needed[name])", "memory is as large as its first user needs",
          f"{MEMORY}test_shared_memory_is_as_large_as_the_largest_needs"),
    Fault("compiler/passes/tile.py", "bounds += (first * axis.times, end * axis.times)",
          "bounds += (first, end * axis.times)", "a tile of pairs needs columns from too early on",
          "compiler/test_tile.py::test_dependencies_by_hand"),
    Fault("compiler/passes/insert_signals.py",
          "is_staged = isinstance(step, Launch) and tokens & {*step.announces}",
          "is_staged = False", "what engines carry takes no credit",
          "compiler/test_staged_sums.py::test_a_plan_is_shown_and_read_back"),
    Fault("language/mapping.py",
          "(row - r * mapping.rank_rows) // mapping.chunk_rows",
          "row // mapping.chunk_rows % mapping.chunks",
          "chunks that are counted across shards",
          "language/test_mapping.py::test_ranks_and_channels_split_the_rows"),
    # ---- the runtime: memory, recordings, and what a wait in vain leaves behind
    Fault("runtime/slots.py", " or as_dtype != dtype", "",
          "words of 32 bits serve for 64",
          "runtime/test_slots.py::test_words_of_another_size_are_other_words"),
    Fault("runtime/heap.py", "if self.signal_bottom - size < self.data_top:",
          "if self.signal_bottom - size < 0:", "signals grow into data",
          "runtime/test_heap.py::test_blocks_never_overlap_and_signals_are_never_reused"),
    Fault("runtime/heap.py", "if merged and merged[-1][0] + merged[-1][1] == start:", "if False:",
          "freed neighbours stay apart",
          "runtime/test_heap.py::test_freed_data_is_merged_and_used_again"),
    Fault("language/portable/give_up.py", "tl.atomic_xchg(abort, 1,", "tl.atomic_xchg(abort, 0,",
          "a wait that gives up does not tell others to",
          "language/test_give_up.py::test_who_gives_up_says_so_and_ends_every_other_wait"),
    Fault("runtime/replays.py", "if len(kept.recorded) > kept.most:", "if False:",
          "recordings are kept for ever", f"{REPLAYS}test_the_latest_used_are_kept"),
    Fault("runtime/replays.py", "kept.recorded.move_to_end(of_all)", "pass",
          "the oldest recording goes, be it the latest used",
          f"{REPLAYS}test_the_latest_used_are_kept"),
    Fault("runtime/replays.py", "if not recording.is_current:",
          "if False:", "memory that went back is copied to by old recordings",
          f"{REPLAYS}test_a_recording_whose_memory_is_gone_is_not_replayed_but_made_anew"),
    Fault("runtime/call_log.py", "hashlib.blake2b(name.encode(), digest_size=8)",
          "hashlib.blake2b(name.encode()[:512], digest_size=8)",
          "long names that differ at their end are alike",
          f"{WORLD}test_a_call_that_the_log_has_no_room_for_is_cut_short"),
    Fault("runtime/symmetric_memory.py", "seen[0] = 0\n                yield explain(word)",
          "yield explain(word)", "what a kernel says is raised again and again",
          f"{WORLD}test_what_a_kernel_says_is_raised_once_by_the_next_call_and_by_check"),
    Fault("runtime/symmetric_memory.py", "if dst.shape != src.shape:",
          "if dst.numel() != src.numel():", "copies between shapes",
          f"{WORLD}test_copies_convert_and_broadcast_nothing"),
    Fault("runtime/compiled_ahead.py", "divisible_by_16 and value % 16:",
          "divisible_by_16 and value % 8:",
          "8 bytes do where 16 were compiled for",
          "runtime/test_compiled_ahead.py::test_what_does_not_fit_is_refused"),
    Fault("runtime/artefact.py", "distance + (0 if peer < 0 else self._distances[peer])",
          "distance", "what goes to a peer stays here",
          f"{ARTEFACT}test_it_queues_what_the_call_queues[gathered by engines-eager]"),
    Fault("runtime/artefact.py", "one.clone() if one.data_ptr() % ALIGN else one", "one",
          "tensors at odd addresses go to kernels of aligned ones",
          f"{ARTEFACT}test_shards_that_differ_ask_for_m"),
    Fault("runtime/backends/modules.py", "*reversed(descriptor.shape)", "*descriptor.shape",
          "tensor maps have rows for columns",
          f"{ARTEFACT}test_it_queues_what_the_call_queues[summed by SMs-eager]"),
    Fault("base/columns.py", "return value + step * (i - begin)", "return value",
          "all sizes of a run have the first one's numbers",
          f"{ARTEFACT}test_what_is_merged_comes_out_as_it_was"),
    Fault("base/artefacts.py", '(found := digest(content)) != entry["sha256"]',
          '(found := digest(content)) != found', "kernels that were changed are launched",
          f"{ARTEFACT}test_every_file_is_checked"),
    Fault("plan/queued.py", 'self.steps.append(["token"', 'print(["token"',
          "engines do not wait for tiles",
          f"{ARTEFACT}test_it_queues_what_the_call_queues[summed by engines-eager]"),
    Fault("runtime/replays.py", "if len(seen) > SEEN_OF_EACH * self._of_all.most:", "if False:",
          "keys are remembered for ever",
          f"{REPLAYS}test_keys_that_never_come_again_are_forgotten"),
    Fault("runtime/replays.py", "kept, of_all = self._of_all, (self._number, key)",
          "kept, of_all = self._of_all, (0, key)", "one operator replays another's call",
          f"{REPLAYS}test_callers_share_what_a_world_keeps_and_take_theirs_along"),
    Fault("runtime/call_log.py",
          "if numbers[word] != number + 1 or numbers[word + 1] == digest:", "if True:",
          "what ranks call is not compared",
          f"{WORLD}test_a_call_that_the_log_has_no_room_for_is_cut_short"),
    # ---- operators: the keys by which calls are replayed, shards, shapes
    Fault("runtime/calls.py", "sizes[name] <= largest[name]", "largest[name]",
          "larger calls taken for prepared once smaller ones are",
          "plan/test_runner.py::test_what_was_prepared_for_larger_calls_is_there_for_smaller_ones"),
    Fault("plan/summed.py",
          "self._prepare(recorded, tensors, make)",
          "pass", "an unfused product that is recorded before its memory is there",
          "ops/test_gemm_rs.py::test_a_recorded_call_takes_another_way_for_which_all_is_there"),
    Fault("plan/exchanges.py", "return (*needs, power_of_two(channels), is_on_all)", "return needs",
          "a mailbox of fewer programs is taken for one that is there",
          "ops/test_gemm_rs.py::test_a_recorded_call_takes_another_way_for_which_all_is_there"),
    Fault("plan/summed.py", 'dtypes += f" to {out_dtype}"', "pass",
          "ranks that round shares otherwise are not told",
          "ops/test_summed_scales.py::test_ranks_that_round_otherwise_are_told"),
    Fault("plan/launches.py", "is_shared = gemm_sm90.chunk_rows(tile_m, tile_n, sized.itemsize)",
          "is_shared = gemm_sm90.chunk_rows(tile_m, tile_n)",
          "one word for the halves that two consumers have of a tile of fp8",
          "ops/test_sm90_emulated.py::test_is_right_and_clean[gemm_rs of fp8]"),
    Fault("tiles/hooks/scales.py", "row = tl.cast(at.owner, tl.int64) * parts.rows + at.row",
          "row = tl.cast(at.row, tl.int64)", "scales of the first rank's rows for every owner's",
          "ops/test_summed_scales.py::test_every_way_of_calling"),
    Fault("compiler/buckets.py", '*getattr(problem, "unsaid", ()))', ")",
          "measured choices of 16 bits that are not found again",
          "ops/test_summed_scales.py::test_choices_of_16_bits_keep_their_keys"),
    Fault("plan/gathered.py", "self._prepare(recorded, tensors, make)", "pass",
          "a gather that is recorded before its memory is there",
          "ops/test_ag_gemm.py::"
          "test_what_a_recorded_call_leaves_to_the_gather_is_there_when_it_is_recorded"),
    Fault("emulator/hosts.py", "baton.acquire(timeout=LOOK_S)", "baton.acquire()",
          "an interrupt that ends no wait is lost",
          "emulator/test_whereabouts.py::test_ctrl_c_is_not_lost_where_it_ends_no_wait"),
    Fault("plan/runner.py", "key = (own, *places)", "key = (own, *places[1:])",
          "a product's replays without a's address", f"{REPLAYED}[ag_gemm-sm_push]"),
    Fault("plan/runner.py", "key = (own, *places)", "key = own",
          "a program's replays without the addresses of what it is given", f"{PROGRAMS}[ag_gemm]"),
    Fault("plan/call_cache.py", "one.shape, one.stride(), one.dtype, one.get_device())",
          "one.shape, one.dtype, one.get_device())", "a program is one for all strides",
          f"{PROGRAMS}[gemm_rs]"),
    Fault("ops/flash_decode.py", "config, problem.scale if scale is None else scale)",
          "config, problem.scale)", "a decoding call without the scale",
          "ops/test_replayed_calls.py::test_a_replay_has_the_scale_of_its_own_call"),
    Fault("plan/vectors.py",
          "begins += (tensor.data_ptr(), tensor.storage_offset() * tensor.element_size())",
          "begins += (tensor.storage_offset() * tensor.element_size() * 0,)",
          "accesses as wide as if all began at 16 bytes",
          "ops/test_all_gather.py::test_one_rank_whose_tensors_begin_elsewhere[1-sm_push]"),
    Fault("plan/call_cache.py", "one.shape, one.dtype, one.stride(), one.get_device(), offset",
          "one.shape, one.dtype, one.get_device(), offset",
          "kept calls of products are for all strides",
          "test_bad_input.py::test_what_is_kept_of_a_call_does_not_take_other_strides"),
    Fault("plan/call_cache.py", "if rows == end - first:\n        return",
          "if rows <= end - first:\n        return", "fewer rows than a shard has",
          "ops/test_all_gather.py::test_tensors_that_do_not_fit"),
    Fault("compiler/schedules.py", "if self.transport not in FAR and num_nodes > 1:",
          "if False:", "copy engines between nodes",
          "ops/test_ag_gemm.py::test_configurations_for_several_nodes"),
    Fault("tune/machine.py", "pace = start_us / READ[one.start]", "pace = 1.0",
          "starts of calls, at the pace of the machine that was read by hand",
          "tune/test_probed_machine.py::test_the_fit_finds_the_rates_of_a_known_machine"),
    Fault("compiler/compiled.py", "choices = self.is_free and id(world.choices)",
          "choices = id(world.choices)", "a program that says its lowering, run as was measured",
          "tune/test_choosing.py::test_a_program_is_run_as_was_measured"),
    Fault("compiler/schedules.py",
          "is_larger = BLOCK_K % self.tile_n or BLOCK_K % self.tile_k",
          "is_larger = BLOCK_K % self.tile_k", "tiles wider than a block of scales",
          "ops/test_ag_gemm_scales.py::test_configurations_that_fp8_cannot_have"),
    Fault("ops/all_gather.py", "copier.wait(main)\n        with copier:", "with copier:",
          "engines begin before the rows are there", f"{REPLAYED}[all_gather-ce_pull]"),
    # ---- measuring
    Fault("tune/protocol.py", "run.burst = min(burst for _, burst in of_all)",
          "run.burst = of_all[-1][1]", "ranks time bursts of different lengths",
          f"{PROTOCOL}test_all_ranks_time_bursts_of_the_shortest_length"),
    Fault("tune/protocol.py", "if runs[name].turn > WARM_UP_ROUNDS and us == us:", "if us == us:",
          "warm-up counts", f"{PROTOCOL}test_warm_up_is_not_in_the_times_and_the_slowest_rank_is"),
    Fault("tune/protocol.py", "worst = max(device.agree(worst))", "worst = device.agree(worst)[0]",
          "the first rank's error stands for all",
          f"{PROTOCOL}test_a_wrong_answer_of_any_rank_is_found"),
    Fault("tune/clocks.py", "key=lambda one: one[0][1] - one[0][0])", "key=lambda one: one[0][1])",
          "the first question, not the one that was answered first",
          "tune/test_clocks.py::test_the_question_that_was_answered_first_counts"),
    # ---- how launches specialise
    Fault("language/triton_api/specialising.py", "if name in run_time:", "if name in ():",
          "a kernel is compiled anew for each m that is 1, or that 16 divides",
          "language/test_specialising.py::test_kernels_of_weft_have_one_binary_for_all_m"),
    # ---- the persistent kernel
    Fault("megakernel/check.py", "if one.at_least != total:", "if one.at_least > total:",
          "a wait that passes too early is sound", f"{PERSISTENT}"),
    Fault("megakernel/check.py", "return mine[2] < theirs[3] and theirs[2] < mine[3]",
          "return mine[2] < theirs[3] - 1 and theirs[2] < mine[3] - 1",
          "tiles that share one column do not meet",
          "megakernel/test_check.py::test_tiles_that_share_one_column_meet"),
    Fault("megakernel/check.py",
          "open_ones = [other for other in open_ones if other.end > one.first]",
          "open_ones = open_ones[-1:]", "of all that lie over a row one is looked at",
          "megakernel/test_check.py::test_graphs_of_random_programs_are_sound[1]"),
    Fault("megakernel/check.py", "i - graph.num_workers for i", "i - 1 for i",
          "one worker does what others do, too",
          "megakernel/test_check.py::test_a_worker_need_not_wait_for_itself"),
    Fault("megakernel/tasks/parts.py", "value = total.to(x.dtype)", "value = total",
          "a sum of parts is not rounded as a whole product is",
          f"{PARTS}test_of_whole_numbers_parts_give_the_bits_of_whole_products"),
    Fault("megakernel/tasks/matmul.py", "k = tl.minimum(shape.k - first, most)", "k = most",
          "the last part along k reads behind its rows",
          f"{PARTS}test_of_whole_numbers_parts_give_the_bits_of_whole_products"),
    Fault("megakernel/tiles.py", "slab = rank * task.split_k + max(part, 0)",
          "slab = rank * task.split_k", "each part of a summand goes to the first one's place",
          f"{PARTS}test_graphs_are_sound_and_no_wait_is_idle[2-3]"),
    Fault("megakernel/bodies.py", 'attributes["parts"] = splits[place], product',
          'attributes["parts"] = splits[place] - 1, product', "the last part is not added",
          f"{PARTS}test_of_whole_numbers_parts_give_the_bits_of_whole_products"),
    # ---- layers
    Fault("layers/activations.py", "return all_reduce(gradient.contiguous(), world=ctx.world)",
          "return gradient", "each rank has its own share of what all have alike",
          "layers/test_mlp.py::test_as_the_ordinary_module[2-MLP-shape0-False]"),
    Fault("layers/activations.py", "self.world.num_ranks > 1 and self.m >= self.split_from",
          "self.m > 0 == self.split_from", "rows are split always or never",
          "layers/test_parallelize.py::test_rows_are_split_from_where_it_is_predicted"),
    Fault("layers/linear.py", "bias = None if bias is None else shared(bias, self.world)",
          "bias = None if bias is None else bias", "a bias learns from own rows alone",
          "layers/test_linear.py::test_as_torchs[3-shape5-True]"),
    Fault("layers/moe.py", 'shared(self.gate["weight"], world)', 'self.gate["weight"]',
          "a router learns from own rows alone",
          "layers/test_parallel_moe.py::test_as_the_ordinary_module[2-MoE-shape0-True]"),
    Fault("layers/activations.py", "summed = all_reduce(parts, world=ctx.world)[mine]",
          "summed = own", "a head of keys that several ranks have learns from one's queries alone",
          "layers/test_parallel_attention.py::test_as_the_ordinary_module[3-make2-2-2-False]"),
    Fault("layers/split_rows.py", "if apart > ROUNDINGS * eps * largest:", "if False:",
          "rows of each rank's own are taken for rows of all",
          "layers/test_split_rows.py::test_rows_that_ranks_have_of_their_own_are_refused"),
    Fault("layers/split_rows.py",
          "total = to.collective(c10d.all_reduce.default, total, \"sum\", part.group)", "pass",
          "a norm's weight learns from own rows alone",
          "layers/test_split_rows.py::test_a_llama_of_dtensors[2-0-expected0]"),
    Fault("layers/graphs.py", "is_node and value_of(one).numel() == value_of(summed).numel()",
          "is_node", "a row that is added to all rows is one of several products",
          "layers/test_inductor_pass.py::test_what_is_left_says_why"),
    Fault("layers/norm.py", "self.activations is None or self.activations.is_split", "False",
          "a norm learns from own rows alone",
          "layers/test_embedding.py::test_as_torchs[2-10-shape0-RMSNorm-True]"),
    Fault("layers/cache.py", "layer, self.lengths + q.shape[2], self",
          "layer, self.lengths, self", "a token does not see itself",
          "layers/test_parallel_attention.py::test_prompt_then_tokens[paged-False]"),
    Fault("layers/cache.py", ".tril(keys - tokens)", ".tril()",
          "a chunk does not see what came before it",
          "serve/test_serve_runner.py::test_tokens_are_those_of_transformers[qwen3-4]"),
    Fault("layers/ring.py", "self.stream.wait(self.main)", "pass",
          "keys go on before they are there, and over those that are worked on",
          "layers/test_ring.py::test_half_precision[True]"),
    Fault("layers/ring.py", "self.main.wait(self.stream)", "pass",
          "keys are worked on before they have come",
          "layers/test_ring.py::test_half_precision[True]"),
    Fault("layers/ring.py", "blocks.queries(given, dq, adds=step > 0)\n        ring.end()",
          "blocks.queries(given, dq, adds=step > 0)",
          "gradients are added to before they have come",
          "layers/test_ring.py::test_half_precision[True]"),
    Fault("plan/sequence_shards.py", "back = (some - front).flip(0)", "back = some - front",
          "second parts go to ranks in the order of the first",
          "plan/test_sequence_shards.py::"
          "test_every_token_is_on_one_rank_in_the_order_of_its_sequence"),
    Fault("tiles/attention_blocks.py", "is_of_none = (i == 0) | (i == columns - 2)",
          "is_of_none = i < 0", "tokens of no sequence see each other",
          "tiles/test_attention_blocks.py::"
          "test_rows_that_queries_see_are_those_that_they_may"),
    # ---- models and steps of an engine
    Fault("models/load.py", "slice(first + i * rows // 2, end + i * rows // 2)",
          "slice(first, end)", "half of a stacked tensor is read twice",
          "models/test_load.py::test_experts_that_are_stacked_in_a_checkpoint"),
    Fault("models/load.py", "made.get(id(one), one)",
          "nn.Parameter(made.get(id(one), one).clone())",
          "an embedding and its logits become two",
          "models/test_load.py::test_as_transformers_loads_it[2-qwen3]"),
    Fault("models/load.py", "and not name.endswith(COMPUTED)", "and name.endswith(COMPUTED)",
          "what nobody expects is read past",
          "models/test_load.py::test_all_that_is_wrong_with_tensors_is_said_at_once"),
    Fault("serve/sampling.py", "ranked >= top_k", "ranked > top_k", "one more than top_k",
          "serve/test_serve_runner.py::test_sampling_has_the_models_probabilities"),
    Fault("serve/sampling.py", "number(one.seed, position)", "number(one.seed, 0)",
          "the same number at each position",
          "serve/test_serve_runner.py::test_a_row_is_drawn_by_its_seed_and_position"),
    Fault("serve/runner.py", "found[order[i]] = token", "found[i] = token",
          "tokens of a mixed step go to others",
          "serve/test_serve_runner.py::test_a_mixture_is_each_alone[inf-False]"),
    Fault("serve/runner.py", "if self.in_table[row] != part.pages:",
          "if not self.in_table[row]:", "a row keeps the pages of the sequence before",
          "serve/test_serve_runner.py::test_a_mixture_is_each_alone[inf-False]"),
    Fault("serve/runner.py", "return Part((0,), 0, (self.num_pages,))",
          "return Part((0,), 0, (self.num_pages - 1,))",
          "what fills a bucket up has a page of others",
          "serve/test_serve_runner.py::test_decode_steps_are_recorded_once_for_a_bucket"),
    # ---- the command line
    Fault("tools/words.py", "if int(value) < 0 and int(value) != default[name]:", "if False:",
          "sizes below zero",
          "tools/test_words.py::test_a_shape_that_is_none_is_told_what_one_looks_like"),
    Fault("tools/words.py", "if not isinstance(known, int) and ranks not in (None, sum(known)):",
          "if not isinstance(known, int) and ranks is not None and ranks > sum(known):",
          "fewer ranks than the nodes hold",
          "tools/test_words.py::test_ranks_and_nodes_that_cannot_be"),
    Fault("tools/doctor.py", "return tuple(int(word) for word in words if word.isdigit())",
          "return tuple(int(word) for word in words[:1] if word.isdigit())",
          "any version of the same first number will do",
          "tools/test_doctor.py::test_a_library_that_is_too_old_is_named_with_the_remedy"),
    Fault("base/report.py", "self.complete = self.complete and other.complete",
          "self.complete = self.complete or other.complete", "one complete search speaks for all",
          "base/test_report.py::"
          "test_merge_adds_schedules_and_keeps_complete_only_where_both_say_so"),
    Fault("tiles/hooks/order.py", "at.row, rows_of(args.rank, args.parts))",
          "at.row, rows_of(at.owner, args.parts))",
          "a rank's rows for another are as many as the other's own",
          "compiler/test_exchanged_products.py::test_any_number_of_rows_and_columns[3-20]"),
    Fault("tiles/hooks/scatter.py", "at.row, rows_of(at.owner, parts))", "at.row, at.end)",
          "as many rows of another rank are unpacked as this one has",
          "compiler/test_exchanged_products.py::test_any_number_of_rows_and_columns[3-20]"),
    Fault("tiles/hooks/slices.py",
          "count = (min(row + tile.m, shape.m) - 1) // split.chunk_rows - chunk + 1", "count = 1",
          "a tile waits for one chunk of a slice, and reads two",
          "compiler/test_exchanged_products.py::test_any_number_of_rows_from_all_ranks[3-20-ce_push-2]"),
    Fault("plan/product_launches.py", "tensor = tensor[: self.m]  # no others are sent", "pass",
          "rows that nobody sends are read",
          "compiler/test_exchanged_products.py::test_any_number_of_rows_from_all_ranks[2-32-sm_push-3]"),
    Fault("plan/product_launches.py", "self.tma = self.tma and self.k % self.tile[2] == 0", "pass",
          "TMA reads steps of k that reach into another rank's columns",
          "compiler/test_exchanged_products.py::test_any_number_of_rows_from_all_ranks[3-20-ce_push-2]"),
    Fault("compiler/cost/choose.py", "columns > 0 and columns % num_ranks == 0", "columns > 0",
          "columns that ranks do not divide are exchanged by kernels",
          "compiler/test_exchanged_products.py::test_what_is_left_to_libraries"),
    Fault("layers/ulysses.py", "if self._kept[0] != of:", "if self._kept[1] is None:",
          "the weight by ranks is that of the first call for ever",
          "layers/test_ulysses.py::test_with_projections[2-3-5-4-4-True-False]"),
    Fault("tiles/hooks/epilogue.py", "    j = cells.column + fragments.index(value, 1)\n    return",
          "    j = fragments.index(value, 1)\n    return",
          "every tile takes the row's first columns",
          "tiles/hooks/test_epilogue.py::test_a_ragged_tile_is_what_torch_makes_of_it"),
    Fault("runtime/commands.py", "places[source] + behind, nbytes", "places[source], nbytes",
          "chunks of rows are all the first one's", LISTS),
    Fault("plan/mixed_list.py", "places.append(result.data_ptr())", "places.append(0)",
          "kernels read what a library gave elsewhere",
          "runtime/test_command_list.py::"
          "test_calls_of_a_plan_with_libraries_in_it_are_queued_by_lists"),
    Fault("plan/kept_launches.py", "self._listed.run(places)",
          "self._listed.run([0, begin, *given[:1] * len(given), *there])",
          "a persistent kernel's tensors, or those of experts, are taken for each other",
          "runtime/test_command_list.py::test_a_persistent_kernels_calls_are_queued_by_a_list_too"),
    Fault("language/triton_api/launching.py", "given[at] = places[place] + distance",
          "given[at] = places[place]", "own rows are read from the first rank's", LISTS),
    Fault("language/triton_api/launching.py", "found = kept.get(address)",
          "found = next(iter(kept.values()), None)",
          "descriptors stay those of the first tensors", LISTS),
    Fault("language/triton_api/specialising.py", "(width, value == 1, value % 16 == 0)", "width",
          "strides that 16 does not divide are read 16 bytes at a time",
          "plan/test_prepare.py::test_kinds_tell_apart_what_is_compiled_apart"),
    Fault("language/triton_api/specialising.py",
          "return known == (value.dtype, value.data_ptr() % 16 == 0)", "return True",
          "rows that begin anywhere are read 16 bytes at a time, where others' were",
          "plan/test_prepare.py::test_kinds_tell_apart_what_is_compiled_apart"),
    Fault("language/triton_api/launching.py", "map(is_not, args, self.known))]", "())]",
          "a new m has the grids' sizes and the rows of the last one",
          "runtime/test_command_list.py::"
          "test_lists_like_those_of_other_m_queue_what_a_call_queues"),
    Fault("plan/sizes.py", "(first // num_ranks, end // num_ranks)", "(first, end)",
          "a rank takes a piece's columns as if it had all", f"{WORDS}[overlapped-pieces]"),
    Fault("plan/calls.py", "return libraries.embedding(*operands, first=first)",
          "return libraries.embedding(*operands, first=first and 0)",
          "every rank has the vocabulary's first rows", f"{WORDS}[unfused-vocabulary]"),
    Fault("megakernel/forms.py", '"rank * {part}"', '"0"',
          "every rank's task has the vocabulary's first rows", f"{WORDS}[persistent-vocabulary]"),
    Fault("megakernel/tasks/norm.py", "tl.load(weight + j % head,", "tl.load(weight + j // head,",
          "a head's columns have weights of others", f"{WORDS}[persistent-heads]"),
    Fault("compiler/leading.py", "leading[_rows(kind)]", "leading[_rows(kind)][::-1]",
          "results have their leading dimensions in another order",
          "compiler/test_model_blocks.py::test_activations_of_more_dimensions_are_rows"),
    Fault("ir/task.py", "task.between in pieces.bounds", "pieces.bounds",
          "any columns of pieces are taken for one",
          "compiler/test_frontend.py::test_pieces_are_taken_whole"),
    # ---- serving
    Fault("serve/scheduler.py", "self._find_pages(one, len(one.tokens) + 1)",
          "self._find_pages(one, 1)",
          "what is admitted has a page for its first tokens alone",
          "serve/test_serve_scheduler.py::"
          "test_requests_of_all_kinds_end_with_their_own_tokens"),
    Fault("serve/scheduler.py", "if self._by_id.get(request.id) is not one:", "if False:",
          "a request that was ended gets the token of the step that was run",
          "serve/test_serve_scheduler.py::"
          "test_requests_of_all_kinds_end_with_their_own_tokens"),
    Fault("serve/scheduler.py", "one.pages, one.computed = [], 0", "one.pages = []",
          "a preempted sequence reads keys of others' pages",
          "serve/test_serve_scheduler.py::"
          "test_requests_of_all_kinds_end_with_their_own_tokens"),
    Fault("serve/text.py", "num_open = min(num_open, OPEN)", "num_open = 0",
          "half a character is said behind a run of none",
          "serve/test_serve_text.py::test_all_that_is_said_is_the_text_of_all_tokens"),
    Fault("serve/text.py", "most = min(len(stop) - 1, len(text))", "most = 0",
          "a stop string that two tokens share is said by half",
          "serve/test_serve_text.py::test_stop_strings_are_found_however_tokens_cut_them"),
    Fault("serve/link.py", "kept = len(old) if pages[: len(old)] == old else 0",
          "kept = len(old)", "a page's next owner is taken for the one before it",
          "serve/test_serve_engine.py::test_steps_survive_their_way"),
    Fault("serve/link.py", "if rest := numbers[HEAD - 1 :]:", "if False:",
          "of a long step all but the first numbers are lost",
          "serve/test_serve_processes.py::test_all_processes_get_all_steps"),
    Fault("serve/api.py", "            self.at_end()\n", "            pass\n",
          "a client that leaves a stream keeps its pages",
          "serve/test_serve_api.py::test_a_client_that_leaves_frees_its_pages[True]"),
    Fault("serve/engine.py", "if self.ended is None:\n", "if True:\n",
          "a request to an engine that has ended is never answered",
          "serve/test_serve_engine.py::"
          "test_a_runner_that_raises_ends_all_requests_with_its_error"),
    # ---- messages between two ranks, and stages that they join
    Fault("plan/messages.py", "hop = (peer - rank if is_to else rank - peer) % n",
          "hop = (peer - rank) % n", "a message is looked for in the boxes of another sender",
          "ops/test_send.py::test_all_to_one_and_one_to_all"),
    Fault("plan/messages.py", "        self.begin()\n        self._take(", "        self._take(",
          "messages of one rank on two streams are taken at once",
          "ops/test_send.py::test_messages_of_one_rank_on_two_streams_come_in_order[sm_push]"),
    Fault("tiles/messages.py",
          "tl.where(num_bytes == room_bytes, room_bytes // item // vec * vec, 0)",
          "room_bytes // item // vec * vec", "a message of another length is written into `out`",
          "ops/test_send.py::"
          "test_a_message_of_another_length_is_an_error_of_its_receiver[sm_push]"),
    Fault("layers/pipeline.py", "        self._sends.wait(self.world.current_stream())\n", "",
          "a result is sent before it is made",
          "layers/test_pipeline.py::test_stages_whose_results_kernels_make"),
    Fault("layers/pipeline.py", "        self.world.current_stream().wait(self._receives)\n", "",
          "a pass begins before its message has come",
          "layers/test_pipeline.py::test_losses_and_gradients_of_one_process[2-2-2-2]"),
    Fault("layers/pipeline.py", "        self._going = x\n", "        self._going = None\n",
          "what is sent is freed before it is away",
          "layers/test_pipeline.py::test_what_is_sent_is_kept_until_it_is_away"),
    Fault("layers/stages.py", "2 * behind + (self.chunks - 1)", "behind + (self.chunks - 1)",
          "interleaved stages begin with too few passes, and wait longer",
          "layers/test_pipeline.py::test_no_rank_waits_in_a_circle[4-2-8]"),
    Fault("layers/stages.py", "i, chunk if what == FORWARD else self.chunks - 1 - chunk)",
          "i, chunk)", "gradients go through a rank's stages as results do",
          "layers/test_pipeline.py::test_no_rank_waits_in_a_circle[2-2-2]"),
    # ---- kernels of rows that this rank has alone
    Fault("tiles/own_rows.py", "(i // cut.heads).to(tl.int64) * view.pitch", "i * view.pitch",
          "heads of wider rows are read where other rows lie",
          f"{OWN_ROWS}_gates_and_heads_on_ranks"),
    Fault("plan/row_launches.py", "self._view(of, by, bound)[:, self.n :]",
          "self._view(of, by, bound)", "a gate is multiplied by itself, not by its value",
          f"{OWN_ROWS}_gates_and_heads_on_ranks"),
    Fault("compiler/passes/fuse_rows.py", "is_next = is_next and len(units) < 2", "pass",
          "what is done to heads and to whole rows is one kernel",
          f"{OWN_ROWS}_heads_and_whole_rows_are_kernels_of_their_own"),
    Fault("plan/launches.py", "return self.launch.reads", "return ()",
          "a view is taken for rows that lie one behind the other",
          f"{OWN_ROWS}_columns_that_a_product_takes_are_packed"),
    # ---- relays beside rows
    Fault("plan/row_launches.py", "self.grid(sized, target, spare) + spare",
          "self.grid(sized, target, spare)", "rows have the registers that a relay waits for",
          "plan/test_plan_launches.py::test_rows_leave_a_relay_its_places_on_sms"),
    Fault("tiles/relay.py", "range(at.i_n * parts.tile_n, n, block_n)",
          "range(at.i_n * parts.tile_n, at.i_n * parts.tile_n + 1, block_n)",
          "a relay adds up the first columns of a wide row alone",
          "ops/test_experts_between_nodes.py::"
          "test_sums_over_experts_cross_once[moe_rs 2+2 skewed]"),
    Fault("plan/table_launches.py", "plan.shape(weights, 0), plan.shape(weights)",
          "plan.shape(weights, 0), plan.shape(weights, 0)",
          "a rank with fewer columns than others reads as many",
          "compiler/test_experts_overlapped.py::"
          "test_ranks_with_fewer_columns_than_others_read_no_more"),
    # ---- sums in parts
    Fault("tiles/epilogue_sm90.py", "own_row, inside == begins),", "own_row, inside == 0),",
          "of a tile that two programs store the right half waits for nobody",
          "ops/test_sm90_emulated.py::test_is_right_and_clean[gemm_rs in parts]"),
    Fault("plan/product_launches.py", "return words[place * each : (place + 1) * each]",
          "return words[:each]", "one launch takes another one's sums for its own",
          "ops/test_sm90_emulated.py::test_is_right_and_clean[gemm_rs in parts]"),
    Fault("plan/product_launches.py", "return tensor.view(chunks, -1, self.n)[chunk]",
          "return tensor.view(chunks, -1, self.n)[0]", "all chunks are stored in one place",
          "compiler/test_staged_sums.py::test_products_of_any_number_of_rows[4-2-ce_parts]"),
    Fault("ir/device_rules.py", "isinstance(steps[i - 1], Launch | Take) and not",
          "isinstance(steps[i - 1], Launch) and not",
          "what looks for credits beside a call may do so before it",
          "compiler/test_staged_sums.py::"
          "test_pieces_are_copied_behind_their_launches_and_looked_for_ahead_of_them"),
    Fault("ops/gemm_rs.py", "if is_recorded and choose(problem, target).transport == CE_PUSH:",
          "if is_recorded:", "a recorded call asks for memory that no call before it has had",
          "ops/test_gemm_rs.py::"
          "test_launches_in_parts_are_recorded_behind_calls_by_engines_alone[2]"),
]  # fmt: skip


def chosen(words: list[str]) -> Iterator[Fault]:
    for fault in FAULTS:
        if not words or any(word in f"{fault.file} {fault.name}" for word in words):
            yield fault


def main(words: list[str]) -> int:
    survived = 0
    with tempfile.TemporaryDirectory(prefix="weft-faults-") as folder:
        copy = Copy(Path(folder))
        for fault in chosen(words):
            try:
                verdict = copy.try_fault(fault)
                said = "killed  " if verdict.killed else "SURVIVED"
                seconds = f"{verdict.seconds:5.1f} s"
            except CannotPlant as error:
                verdict, said, seconds = None, "NO RUN  ", f"\n{error}\n"
            survived += verdict is None or not verdict.killed
            print(f"{said} {seconds}  {fault.file}: {fault.breaks}", flush=True)
    print(f"{sum(1 for _ in chosen(words))} faults, {survived} not killed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
