/* The runtime of programs for a many-core machine: cores, scratchpads, DMA, signals between ranks.
 *
 * A core is a thread with a scratchpad of its own; the DMA engine of each core group is a thread that
 * moves what its cores have posted. A rank's main memory is a part of one shared mapping, so that
 * ranks may be processes, or threads of one process for ThreadSanitizer.
 *
 * Time is simulated: each core has a clock, and the engine a channel for each core, to which the
 * machine's bandwidth is dealt out in equal shares. A clock moves by the machine's record alone, and
 * a signal is awaited at its full count alone, so that times are the same in every run.
 *
 * MC_BF16 before the include: elements are bfloat16, sums are fp32 all the same.
 */
#ifndef WEFT_MANYCORE_H
#define WEFT_MANYCORE_H

#define _GNU_SOURCE
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MC_RING = 64, MC_PAGE = 4096 };

/* ------------------------------------------------------------------------------------------------
 * Elements
 */

#ifdef MC_BF16
typedef uint16_t mc_elem;

static inline float mc_load(mc_elem x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* To the nearest, ties to even; a NaN stays one. */
static inline mc_elem mc_store(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value)
        return (mc_elem)((bits >> 16) | 0x40);
    return (mc_elem)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#else
typedef float mc_elem;
static inline float mc_load(mc_elem x) { return x; }
static inline mc_elem mc_store(float value) { return value; }
#endif

/* What a value is once it has been stored. */
static inline float mc_round(float value) { return mc_load(mc_store(value)); }

/* ------------------------------------------------------------------------------------------------
 * The machine, a program, and what one run counts
 */

typedef struct {
    int groups, cores; /* cores of all groups */
    size_t scratchpad_bytes, align;
    uint64_t latency_ps, startup_ps, block_ps, link_latency_ps, signal_ps, barrier_ps;
    double dma_ps_per_byte, link_ps_per_byte, flop_ps; /* of a group, of a rank, of a core */
} mc_machine;

/* Of one kernel on one rank. Sends go to other ranks; end_ps is when the last core was through. */
typedef struct {
    uint64_t end_ps, transfers, blocks, bytes, sends, send_bytes;
} mc_counters;

typedef struct {
    _Atomic uint64_t count, time_ps;
} mc_signal;

/* A matrix in the main memory of every rank, at the same place. */
typedef struct {
    size_t offset, pitch;
} mc_value;

struct mc_core;

typedef struct {
    const char *name;
    mc_machine machine;
    int ranks, kernels;
    size_t header_bytes, rank_bytes; /* counters and signals, and values behind them */
    void (*body)(struct mc_core *);
} mc_program;

/* ------------------------------------------------------------------------------------------------
 * A rank and its cores
 */

typedef struct {
    char *to;
    const char *from;
    size_t rows, row_bytes, to_pitch, from_pitch;
    mc_signal *signal; /* notified once the data is there; may be NULL */
    uint64_t time_ps;
} mc_transfer;

typedef struct {
    uint64_t number, time_ps;
} mc_ticket;

typedef struct mc_rank {
    const mc_program *program;
    int rank;
    char *memory; /* of all ranks */
    struct mc_core *cores;
    _Atomic int stop;
    _Atomic uint64_t arrived, round, meeting_ps[2];
} mc_rank;

typedef struct mc_core {
    mc_rank *home;
    int index, rank, ranks, kernel;
    char *scratchpad;
    uint64_t clock_ps, dma_free_ps, link_free_ps;
    double dma_ps_per_byte, link_ps_per_byte; /* this core's share */
    uint64_t dma_done_ps, link_done_ps;
    mc_ticket last; /* of all that it has posted */
    mc_counters *all_counters, *counters; /* of each kernel, and of this one */
    _Atomic uint64_t posted, done;
    mc_transfer ring[MC_RING];
} mc_core;

/* ------------------------------------------------------------------------------------------------
 * Waiting: bounded, so that a signal that never comes is told and not waited for
 */

typedef struct {
    int spins;
    time_t since;
} mc_patience;

#ifndef MC_SECONDS
#define MC_SECONDS 60
#endif

static inline void mc_pause(mc_patience *waited, const mc_core *core, const char *what, uint64_t wanted,
                     uint64_t seen)
{
    struct timespec now;
    if (++waited->spins < 200) {
        sched_yield();
        return;
    }
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!waited->since)
        waited->since = now.tv_sec;
    if (core && now.tv_sec - waited->since > MC_SECONDS) {
        fprintf(stderr, "rank %d, core %d, kernel %d waits for %s: %llu of %llu\n", core->rank,
                core->index, core->kernel, what, (unsigned long long)seen,
                (unsigned long long)wanted);
        _exit(3);
    }
    nanosleep(&(struct timespec){0, 20000}, NULL);
}

static inline void mc_later(_Atomic uint64_t *time, uint64_t at_least)
{
    uint64_t now = atomic_load_explicit(time, memory_order_relaxed);
    while (now < at_least && !atomic_compare_exchange_weak(time, &now, at_least)) {
    }
}

static inline void mc_reach(mc_core *core, uint64_t time_ps)
{
    if (core->clock_ps < time_ps)
        core->clock_ps = time_ps;
}

/* ------------------------------------------------------------------------------------------------
 * Where things lie
 */

static inline int mc_min(int a, int b) { return a < b ? a : b; }
static inline int mc_tiles(int size, int tile) { return (size + tile - 1) / tile; }

/* Ranks have ceil(size / ranks) each, the last may have fewer. */
static inline int mc_first(int size, int rank, int ranks)
{
    return mc_min(rank * mc_tiles(size, ranks), size);
}

static inline int mc_part(int size, int rank, int ranks)
{
    return mc_first(size, rank + 1, ranks) - mc_first(size, rank, ranks);
}

static inline char *mc_memory(const mc_core *core, int rank)
{
    return core->home->memory + (size_t)rank * core->home->program->rank_bytes;
}

static inline mc_elem *mc_at(const mc_core *core, int rank, mc_value value, int row, int column)
{
    char *start = mc_memory(core, rank) + core->home->program->header_bytes + value.offset;
    return (mc_elem *)(start + (size_t)row * value.pitch) + column;
}

/* In this rank's own memory. */
static inline mc_elem *mc_here(const mc_core *core, mc_value value, int row, int column)
{
    return mc_at(core, core->rank, value, row, column);
}

static inline mc_signal *mc_signal_of(const mc_core *core, int rank, int index)
{
    const size_t counters = (size_t)core->home->program->kernels * sizeof(mc_counters);
    return (mc_signal *)(mc_memory(core, rank) + counters) + index;
}

static inline void *mc_scratch(const mc_core *core, size_t offset)
{
    return core->scratchpad + offset;
}

/* ------------------------------------------------------------------------------------------------
 * DMA: posted to the engine, which moves it in order; awaited by a ticket
 */

static inline void mc_post(mc_core *core, mc_transfer transfer)
{
    const uint64_t number = core->last.number;
    mc_patience waited = {0, 0};
    uint64_t done;
    while (number >= MC_RING &&
           number - (done = atomic_load_explicit(&core->done, memory_order_acquire)) >= MC_RING)
        mc_pause(&waited, core, "room in the ring of transfers", number - MC_RING + 1, done);
    core->ring[number % MC_RING] = transfer;
    core->last = (mc_ticket){number + 1, transfer.time_ps};
    atomic_store_explicit(&core->posted, number + 1, memory_order_release);
}

/* Bytes of the aligned lines that a row touches. */
static inline size_t mc_lines(const mc_core *core, const void *row, size_t row_bytes)
{
    const size_t align = core->home->program->machine.align;
    const size_t before = (uintptr_t)row % align;
    return (before + row_bytes + align - 1) / align * align;
}

static inline mc_ticket mc_dma(mc_core *core, mc_transfer one, const void *in_memory, int passes)
{
    const mc_machine *machine = &core->home->program->machine;
    const int is_whole = one.row_bytes == one.to_pitch && one.row_bytes == one.from_pitch;
    const size_t blocks = is_whole ? 1 : one.rows;
    const size_t bytes = one.rows * mc_lines(core, in_memory, one.row_bytes) * (size_t)passes;
    if (!one.row_bytes) { /* a rank without columns: its signal alone */
        one.time_ps = core->clock_ps;
        mc_post(core, one);
        return core->last;
    }
    if (core->dma_free_ps < core->clock_ps)
        core->dma_free_ps = core->clock_ps;
    core->dma_free_ps += machine->startup_ps + blocks * machine->block_ps;
    core->dma_free_ps += (uint64_t)((double)bytes * core->dma_ps_per_byte);
    core->dma_done_ps = one.time_ps = core->dma_free_ps + machine->latency_ps;
    core->counters->transfers++;
    core->counters->blocks += blocks;
    core->counters->bytes += bytes;
    mc_post(core, one);
    return core->last;
}

/* A block, with pitches in bytes, of which `in_memory` is the side in main memory. */
static inline mc_ticket mc_block(mc_core *core, mc_elem *to, size_t to_pitch, const mc_elem *from,
                          size_t from_pitch, int rows, int columns, const void *in_memory)
{
    const size_t row_bytes = (size_t)columns * sizeof(mc_elem);
    if (rows <= 0 || columns <= 0)
        return core->last;
    return mc_dma(core, (mc_transfer){(char *)to, (const char *)from, (size_t)rows, row_bytes,
                                      to_pitch, from_pitch, NULL, 0}, in_memory, 1);
}

/* A block of main memory to the scratchpad. */
static inline mc_ticket mc_get(mc_core *core, mc_elem *to, size_t to_pitch, const mc_elem *from,
                        size_t from_pitch, int rows, int columns)
{
    return mc_block(core, to, to_pitch, from, from_pitch, rows, columns, from);
}

/* A block of the scratchpad to this rank's main memory. */
static inline mc_ticket mc_put(mc_core *core, mc_elem *to, size_t to_pitch, const mc_elem *from,
                        size_t from_pitch, int rows, int columns)
{
    return mc_block(core, to, to_pitch, from, from_pitch, rows, columns, to);
}

/* The same, a transfer for each row: what is compared with. */
static inline mc_ticket mc_get_by_rows(mc_core *core, mc_elem *to, size_t to_pitch, const mc_elem *from,
                                size_t from_pitch, int rows, int columns)
{
    mc_ticket last = core->last;
    for (int row = 0; row < rows; row++)
        last = mc_get(core, (mc_elem *)((char *)to + row * to_pitch), to_pitch,
                      (const mc_elem *)((const char *)from + row * from_pitch), from_pitch, 1,
                      columns);
    return last;
}

static inline mc_ticket mc_put_by_rows(mc_core *core, mc_elem *to, size_t to_pitch, const mc_elem *from,
                                size_t from_pitch, int rows, int columns)
{
    mc_ticket last = core->last;
    for (int row = 0; row < rows; row++)
        last = mc_put(core, (mc_elem *)((char *)to + row * to_pitch), to_pitch,
                      (const mc_elem *)((const char *)from + row * from_pitch), from_pitch, 1,
                      columns);
    return last;
}

/* A block, wherever it lies here, to the main memory of `peer`, whose signal is notified behind it.
 * What stays on this rank passes the DMA engine twice, what leaves it takes the link. */
static inline mc_ticket mc_send(mc_core *core, int peer, int signal, mc_elem *to, size_t to_pitch,
                         const mc_elem *from, size_t from_pitch, int rows, int columns)
{
    const mc_machine *machine = &core->home->program->machine;
    const size_t row_bytes = (size_t)columns * sizeof(mc_elem);
    mc_transfer one = {(char *)to, (const char *)from, (size_t)rows, row_bytes,
                       to_pitch, from_pitch, mc_signal_of(core, peer, signal), 0};
    if (peer == core->rank)
        return mc_dma(core, one, to, 2);
    if (core->link_free_ps < core->clock_ps)
        core->link_free_ps = core->clock_ps;
    core->link_free_ps += machine->startup_ps;
    core->link_free_ps += (uint64_t)((double)(one.rows * row_bytes) * core->link_ps_per_byte);
    core->link_done_ps = one.time_ps = core->link_free_ps + machine->link_latency_ps;
    core->counters->sends++;
    core->counters->send_bytes += one.rows * row_bytes;
    mc_post(core, one);
    return core->last;
}

/* Until this transfer, and all that were posted before it, have moved their data. */
static inline void mc_wait(mc_core *core, mc_ticket ticket)
{
    mc_patience waited = {0, 0};
    uint64_t done;
    while ((done = atomic_load_explicit(&core->done, memory_order_acquire)) < ticket.number)
        mc_pause(&waited, core, "a transfer", ticket.number, done);
    mc_reach(core, ticket.time_ps);
}

static inline void mc_notify(mc_signal *signal, uint64_t time_ps)
{
    mc_later(&signal->time_ps, time_ps);
    atomic_fetch_add_explicit(&signal->count, 1, memory_order_acq_rel);
}

/* Until this rank's signal has its full count: then its time does not change any more. */
static inline void mc_await(mc_core *core, int index, uint64_t count)
{
    mc_signal *signal = mc_signal_of(core, core->rank, index);
    mc_patience waited = {0, 0};
    uint64_t seen;
    if (!count)
        return;
    while ((seen = atomic_load_explicit(&signal->count, memory_order_acquire)) < count)
        mc_pause(&waited, core, "a signal", count, seen);
    mc_reach(core, atomic_load_explicit(&signal->time_ps, memory_order_relaxed) +
                       core->home->program->machine.signal_ps);
}

/* All cores of the rank; each has its transfers done before. */
static inline void mc_barrier(mc_core *core)
{
    mc_rank *home = core->home;
    const uint64_t round = atomic_load_explicit(&home->round, memory_order_acquire);
    const uint64_t cores = (uint64_t)home->program->machine.cores;
    _Atomic uint64_t *meeting = &home->meeting_ps[round % 2];
    mc_patience waited = {0, 0};
    mc_later(meeting, core->clock_ps);
    if (atomic_fetch_add_explicit(&home->arrived, 1, memory_order_acq_rel) + 1 == cores) {
        atomic_store(&home->arrived, 0);
        atomic_store(&home->meeting_ps[(round + 1) % 2], 0);
        atomic_store_explicit(&home->round, round + 1, memory_order_release);
    }
    while (atomic_load_explicit(&home->round, memory_order_acquire) == round)
        mc_pause(&waited, core, "the other cores", cores, atomic_load(&home->arrived));
    mc_reach(core, atomic_load_explicit(meeting, memory_order_relaxed));
    core->clock_ps += home->program->machine.barrier_ps;
}

/* How many cores have a part of so many rows, and send it. */
static inline uint64_t mc_senders(const mc_core *core, int rows)
{
    return rows ? (uint64_t)mc_tiles(rows, mc_tiles(rows, core->home->program->machine.cores)) : 0;
}

/* How many tiles meet the rows that a rank owns of `size`. */
static inline uint64_t mc_tiles_of(const mc_core *core, int size, int rank, int tile)
{
    const int first = mc_first(size, rank, core->ranks), end = mc_first(size, rank + 1, core->ranks);
    return end > first ? (uint64_t)(mc_tiles(end, tile) - first / tile) : 0;
}

/* Until the rows first .. end - 1 of `size` gathered ones have come from the ranks that have them. */
static inline void mc_await_rows(mc_core *core, int signal, int size, int first, int end)
{
    const int each = mc_tiles(size, core->ranks);
    for (int source = first / each; source * each < end; source++)
        mc_await(core, signal + source, mc_senders(core, mc_part(size, source, core->ranks)));
}

/* A tile of sums to the ranks that own its rows: to the slab of this rank in their `parts`. */
static inline mc_ticket mc_send_sums(mc_core *core, int signal, mc_value parts, int size, int row, int column,
                              const mc_elem *tile, size_t pitch, int rows, int columns)
{
    const int each = mc_tiles(size, core->ranks);
    for (int owner = row / each; owner * each < row + rows; owner++) {
        const int first = owner * each > row ? owner * each : row;
        const int end = mc_min((owner + 1) * each, row + rows);
        mc_send(core, owner, signal + core->rank,
                mc_at(core, owner, parts, core->rank * each + first - owner * each, column),
                parts.pitch, (const mc_elem *)((const char *)tile + (first - row) * pitch), pitch,
                end - first, columns);
    }
    return core->last;
}

/* How many of `tiles` are a core's that has the first of every `step`. */
static inline int mc_turns(int tiles, int first, int step)
{
    return first < step && first < tiles ? (tiles - first + step - 1) / step : 0;
}

/* ------------------------------------------------------------------------------------------------
 * Kernels
 */

/* A step of a product: its tiles, and the halves of the double buffers that they are in. */
typedef struct {
    int i_m, i_n, i_k, x, w;
    mc_ticket got;
} mc_step;

/* A matrix in main memory, for routines of a vendor. */
typedef struct {
    mc_elem *data;
    size_t pitch;
    int rows, columns;
} mc_matrix;

static inline mc_elem *mc_of(mc_matrix matrix, int row, int column)
{
    return (mc_elem *)((char *)matrix.data + (size_t)row * matrix.pitch) + column;
}

/* A kernel begins: `active` cores share the engines and the link. */
static inline void mc_begin(mc_core *core, int kernel, int active)
{
    const mc_machine *machine = &core->home->program->machine;
    core->kernel = kernel;
    core->counters = core->all_counters + kernel;
    core->dma_ps_per_byte = machine->dma_ps_per_byte * mc_tiles(active, machine->groups);
    core->link_ps_per_byte = machine->link_ps_per_byte * active;
}

/* It leaves transfers under way, of data that nobody changes. */
static inline void mc_leave(mc_core *core)
{
    core->counters->end_ps = core->clock_ps;
}

/* It ends on all cores: whatever they have posted is done, and the scratchpads are free. */
static inline void mc_end(mc_core *core)
{
    mc_wait(core, core->last);
    mc_reach(core, core->dma_done_ps);
    mc_reach(core, core->link_done_ps);
    mc_leave(core);
    mc_barrier(core);
}

static inline void mc_compute(mc_core *core, double flops)
{
    core->clock_ps += (uint64_t)(flops * core->home->program->machine.flop_ps);
}

/* sums += a @ b, the sum over k in order; pitches in bytes, sums are `width` wide. */
static inline void mc_multiply(mc_core *core, float *restrict sums, int width, const mc_elem *a,
                        size_t a_pitch, const mc_elem *b, size_t b_pitch, int m, int n, int k)
{
    for (int i = 0; i < m; i++) {
        const mc_elem *a_row = (const mc_elem *)((const char *)a + i * a_pitch);
        float *restrict sum = sums + (size_t)i * width;
        for (int l = 0; l < k; l++) {
            const mc_elem *b_row = (const mc_elem *)((const char *)b + l * b_pitch);
            const float x = mc_load(a_row[l]);
            for (int j = 0; j < n; j++)
                sum[j] += x * mc_load(b_row[j]);
        }
    }
    mc_compute(core, 2.0 * m * n * k);
}

/* Sums as elements, rounded once. */
static inline void mc_round_tile(mc_core *core, mc_elem *tile, size_t pitch, const float *sums, int width,
                          int m, int n)
{
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++)
            ((mc_elem *)((char *)tile + i * pitch))[j] = mc_store(sums[(size_t)i * width + j]);
    mc_compute(core, (double)m * n);
}

/* A block of queries meets one of keys and values: the softmax so far is that of all it has seen.
 * sums: [queries, head]; softmax: the largest score and the weights' sum of each query. The first
 * query sees the first `seen` keys of the block, each further one a key more, or all of them. */
static inline void mc_attend(mc_core *core, float *sums, float *softmax, float *scores, const mc_elem *q,
                      const mc_elem *k, const mc_elem *v, size_t pitch, int queries, int keys,
                      int head, int seen, int causal)
{
    const float scale = 1.0f / sqrtf((float)head);
    for (int i = 0; i < queries; i++) {
        const mc_elem *q_row = (const mc_elem *)((const char *)q + i * pitch);
        const int visible = causal ? mc_min(keys, seen + i) : keys;
        float *sum = sums + (size_t)i * head, largest = softmax[2 * i];
        for (int j = 0; j < visible; j++) {
            const mc_elem *k_row = (const mc_elem *)((const char *)k + j * pitch);
            float score = 0.0f;
            for (int c = 0; c < head; c++)
                score += mc_load(q_row[c]) * mc_load(k_row[c]);
            scores[j] = score * scale;
            largest = fmaxf(largest, scores[j]);
        }
        if (visible <= 0)
            continue;
        const float kept = expf(softmax[2 * i] - largest);
        softmax[2 * i] = largest;
        softmax[2 * i + 1] *= kept;
        for (int c = 0; c < head; c++)
            sum[c] *= kept;
        for (int j = 0; j < visible; j++) {
            const mc_elem *v_row = (const mc_elem *)((const char *)v + j * pitch);
            const float weight = expf(scores[j] - largest);
            softmax[2 * i + 1] += weight;
            for (int c = 0; c < head; c++)
                sum[c] += weight * mc_load(v_row[c]);
        }
    }
    mc_compute(core, (double)queries * keys * (4 * head + 16));
}

static inline float mc_silu(float x) { return x / (1.0f + expf(-x)); }
static inline float mc_gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }
static inline float mc_gelu_tanh(float x)
{
    return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

/* ------------------------------------------------------------------------------------------------
 * A run: ranks' threads, and what `main` is given
 *
 *     PROGRAM FILE RANK     one rank of a mapping of all ranks' memory; RANK `all`: all, as threads
 */

static inline void mc_move(const mc_transfer *one)
{
    for (size_t row = 0; row < one->rows; row++)
        memcpy(one->to + row * one->to_pitch, one->from + row * one->from_pitch, one->row_bytes);
    if (one->signal)
        mc_notify(one->signal, one->time_ps);
}

typedef struct {
    mc_rank *home;
    int group;
} mc_engine;

/* The engine of a core group: each core's transfers in the order in which it posted them. */
static inline void *mc_run_engine(void *argument)
{
    const mc_engine *engine = argument;
    mc_rank *home = engine->home;
    const mc_machine *machine = &home->program->machine;
    mc_patience waited = {0, 0};
    for (;;) {
        const int stop = atomic_load_explicit(&home->stop, memory_order_acquire);
        int moved = 0;
        for (int i = engine->group; i < machine->cores; i += machine->groups) {
            mc_core *core = &home->cores[i];
            const uint64_t posted = atomic_load_explicit(&core->posted, memory_order_acquire);
            uint64_t done = atomic_load_explicit(&core->done, memory_order_relaxed);
            for (; done < posted; done++, moved++) {
                mc_move(&core->ring[done % MC_RING]);
                atomic_store_explicit(&core->done, done + 1, memory_order_release);
            }
        }
        if (moved)
            waited = (mc_patience){0, 0};
        else if (stop)
            return NULL;
        else
            mc_pause(&waited, NULL, "work", 0, 0);
    }
}

static inline void *mc_run_core(void *argument)
{
    mc_core *core = argument;
    core->home->program->body(core);
    return NULL;
}

static inline void mc_count(mc_rank *home)
{
    const mc_program *program = home->program;
    mc_counters *total = (mc_counters *)(home->memory + (size_t)home->rank * program->rank_bytes);
    for (int kernel = 0; kernel < program->kernels; kernel++)
        for (int i = 0; i < program->machine.cores; i++) {
            const mc_counters *one = &home->cores[i].all_counters[kernel];
            mc_counters *sum = &total[kernel];
            sum->end_ps = sum->end_ps > one->end_ps ? sum->end_ps : one->end_ps;
            sum->transfers += one->transfers;
            sum->blocks += one->blocks;
            sum->bytes += one->bytes;
            sum->sends += one->sends;
            sum->send_bytes += one->send_bytes;
        }
}

static inline void *mc_run_rank(void *argument)
{
    mc_rank *home = argument;
    const mc_program *program = home->program;
    const mc_machine *machine = &program->machine;
    pthread_t *threads = calloc((size_t)(machine->cores + machine->groups), sizeof *threads);
    mc_engine *engines = calloc((size_t)machine->groups, sizeof *engines);
    home->cores = calloc((size_t)machine->cores, sizeof *home->cores);
    for (int i = 0; i < machine->cores; i++) {
        mc_core *core = &home->cores[i];
        core->home = home;
        core->index = i;
        core->rank = home->rank;
        core->ranks = program->ranks;
        core->scratchpad = aligned_alloc(MC_PAGE, (machine->scratchpad_bytes + MC_PAGE - 1) / MC_PAGE * MC_PAGE);
        core->all_counters = calloc((size_t)program->kernels, sizeof(mc_counters));
        memset(core->scratchpad, 0xff, machine->scratchpad_bytes); /* NaN, until something is got */
    }
    for (int i = 0; i < machine->groups; i++) {
        engines[i] = (mc_engine){home, i};
        pthread_create(&threads[machine->cores + i], NULL, mc_run_engine, &engines[i]);
    }
    for (int i = 0; i < machine->cores; i++)
        pthread_create(&threads[i], NULL, mc_run_core, &home->cores[i]);
    for (int i = 0; i < machine->cores; i++)
        pthread_join(threads[i], NULL);
    atomic_store_explicit(&home->stop, 1, memory_order_release);
    for (int i = 0; i < machine->groups; i++)
        pthread_join(threads[machine->cores + i], NULL);
    mc_count(home);
    for (int i = 0; i < machine->cores; i++) {
        free(home->cores[i].scratchpad);
        free(home->cores[i].all_counters);
    }
    free(home->cores);
    free(engines);
    free(threads);
    return NULL;
}

static inline int mc_main(const mc_program *program, int count, char **words)
{
    const size_t bytes = program->rank_bytes * (size_t)program->ranks;
    const int file = count == 3 ? open(words[1], O_RDWR) : -1;
    mc_rank *ranks = calloc((size_t)program->ranks, sizeof *ranks);
    pthread_t *threads = calloc((size_t)program->ranks, sizeof *threads);
    char *memory = file < 0 ? MAP_FAILED
                            : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    int first = 0, end = program->ranks;
    if (memory == MAP_FAILED) {
        fprintf(stderr, "usage: %s FILE RANK|all, a file of %zu bytes\n", program->name, bytes);
        return 2;
    }
    if (strcmp(words[2], "all") != 0) {
        first = atoi(words[2]);
        end = first + 1;
    }
    for (int i = first; i < end; i++) {
        ranks[i].program = program;
        ranks[i].rank = i;
        ranks[i].memory = memory;
        pthread_create(&threads[i], NULL, mc_run_rank, &ranks[i]);
    }
    for (int i = first; i < end; i++)
        pthread_join(threads[i], NULL);
    munmap(memory, bytes);
    free(threads);
    free(ranks);
    return 0;
}

#endif
