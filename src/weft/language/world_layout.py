"""Where things lie in a world's device table, and in the buffer that expired waits write to.

The runtime fills both, device code reads and writes them, by these numbers alone.
"""

from __future__ import annotations

# The table: int64 words. Fixed ones first, then three blocks of `num_ranks` words, one per peer.
RANK = 0
NUM_RANKS = 1
NODE = 3
ABORT_PTR = 4  # address of the world's abort word: int32, not zero once something went wrong
TIMEOUT_NS = 5  # how long a wait may take
REPORT_PTR = 6  # address of this rank's wait reports; 0: none are kept
HEAP_BASE = 7  # of this rank
BARRIER_ARRIVALS = 8  # address of int32[NUM_CHANNELS], symmetric
BARRIER_GENERATIONS = 9  # address of int32[NUM_CHANNELS], local
STAGE_PTR = 10  # address of the stage, symmetric; 0 where there are no far peers
STAGE_LOCKS = 11  # address of int32[STAGE_SLOTS], local
TRACE_PTR = 12  # address of int64[TRACE_TILES, TRACE_WORDS], local; 0: no trace is kept
TRACE_TILES = 13
HEADER_WORDS = 16

PEER_BASES = HEADER_WORDS  # + peer: its heap base; 0 when it is far
# + num_ranks + peer: its node; + 2 num_ranks + peer: its global rank

NUM_CHANNELS = 64

# The stage: where data lies on its way to a far peer; behind its slots a word that holds nothing.
STAGE_SLOTS = 256
STAGE_SLOT_BYTES = 1 << 16
STAGE_BYTES = STAGE_SLOTS * STAGE_SLOT_BYTES
STAGE_SPARE_BYTES = 256

NEVER_NS = 1 << 62  # as TIMEOUT_NS: waits have no deadline, but still look at the abort word

# A wait report: int64 words. Slots are picked by program and call site, not claimed, so two waits
# may meet in one slot: REPORT_CHECK tells a whole record from a garbled or half-written one.
REPORT_CHECK = 0  # REPORT_MAGIC + the sum of all other words, modulo 2**64
REPORT_RANK = 1
REPORT_SIGNAL = 2  # address of the signal word
REPORT_EXPECTED = 3
REPORT_SEEN = 4
REPORT_PROGRAM = 5  # and 6, 7: program ids x, y, z
REPORT_NAME = 8  # and 9, 10, 11: first 32 bytes of the device function's name, little end first
REPORT_LINE = 12  # of the source file
REPORT_REASON = 13
REPORT_WORDS = 16

REPORT_MAGIC = 0x776566742D776169  # "weft-wai"
NUM_REPORTS = 256
REPORT_BYTES = NUM_REPORTS * REPORT_WORDS * 8

# What a product leaves of one of its tiles, int64: when things happened by the program's clock, in
# nanoseconds, 0 where they did not. From TRACE_BEGUN on once for each consumer of two.
TRACE_TILE = 0  # row of tiles << 32 | column of tiles
TRACE_PROGRAM = 1
TRACE_START = 2  # before it waits for its operands; 0: nothing is known of this tile
TRACE_WAITED = 3  # how long it did, of all its segments
TRACE_BEGUN = 4  # where others than those that wait multiply: before their first product
TRACE_SUMMED = 5  # the last product is there
TRACE_COMBINED = 6  # with what else belongs to the sums
TRACE_END = 7  # stored and announced
TRACE_EACH = 4  # words of one consumer
TRACE_WORDS = 12

REASON_DEADLINE = 1  # the wait's own time was up
REASON_ABORT = 2  # another wait of this world had given up


def table_words(num_ranks: int) -> int:
    """The length of a world's table."""
    return HEADER_WORDS + 3 * num_ranks


def peer_base(peer: int) -> int:
    return PEER_BASES + peer


def peer_node(peer: int, num_ranks: int) -> int:
    return PEER_BASES + num_ranks + peer


def peer_global_rank(peer: int, num_ranks: int) -> int:
    return PEER_BASES + 2 * num_ranks + peer
