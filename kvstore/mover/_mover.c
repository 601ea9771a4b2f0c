/* The native mover: copies and digests pages in one pass, called through ctypes without the GIL.
 *
 * Every call takes arrays by address and returns the number of finished pages, or a negative
 * number: -1 - p if page p has an invalid address or its pieces do not fill it, NO_MEMORY if it
 * could not start, NO_JOB if its numbers are invalid. It checks all arguments before it writes
 * anything. docs/internals/mover.md explains the rest.
 */
#define _GNU_SOURCE
#include "_pages.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#define EXPORT __attribute__((visibility("default")))

enum {
    VERSION = 5,             /* of this library's interface; binary.py refuses any other */
    POPULATE_STEP = 16 << 20,
};
static const int64_t NO_MEMORY = INT64_MIN, NO_JOB = INT64_MIN + 1;
static const int64_t LIST_MAX = (int64_t)1 << 40; /* entries: sums of them never overflow */
static const uint64_t PAGE_BYTES_MAX = ((uint64_t)1 << 62) - 1;

/* ---- Progress: a block of words shared with Python ------------------------------------------- */

static void set_word(uint32_t *words, int word, uint32_t value) {
    __atomic_store_n(&words[word], value, __ATOMIC_RELEASE);
}

/* Set a word and wake all waiters. They sleep on EVENT, so that no change is missed. */
EXPORT void kv_publish(uint32_t *words, int32_t which, uint32_t value) {
    if (which < DONE || which > CANCEL) return;
    set_word(words, which, value);
    __atomic_fetch_add(&words[EVENT], 1, __ATOMIC_ACQ_REL);
#ifdef __linux__
    syscall(SYS_futex, &words[EVENT], FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#endif
}

/* Wait for DONE >= count, FINISHED or the timeout; may return early. 1: reached, 0: finished
 * without reaching it, -1: neither. */
EXPORT int32_t kv_wait(const uint32_t *words, uint32_t count, int64_t timeout_ns) {
    uint32_t event = word(words, EVENT), finished = word(words, FINISHED);
    if (word(words, DONE) >= count) return 1;
    if (finished) return 0;
#ifdef __linux__
    struct timespec timeout = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    syscall(SYS_futex, &words[EVENT], FUTEX_WAIT_PRIVATE, event, &timeout, NULL, 0);
#else
    struct timespec pause = {0, timeout_ns < 200000 ? timeout_ns : 200000};
    (void)event, nanosleep(&pause, NULL);
#endif
    finished = word(words, FINISHED);
    return word(words, DONE) >= count ? 1 : finished ? 0 : -1;
}

/* ---- Version and instruction set --------------------------------------------------------------- */

EXPORT int32_t kv_version(void) {
    return VERSION;
}

/* The best instruction set of this machine, as an index into ISAS. */
EXPORT int32_t kv_best_isa(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return 3;
    return __builtin_cpu_supports("avx2") ? 2 : 1;
#else
    return 0;
#endif
}

enum mode { DIGEST, GATHER, SCATTER, SCATTER_SEGMENTS };

/* ---- Segment after segment ------------------------------------------------------------------- */

struct layers { /* a job in segment order */
    int64_t pages, segments;
    const uint64_t *page, *seed;
    const int64_t *end;
    struct cursor pieces;
    uint8_t *ok;
    struct page *states; /* one per page */
    uint8_t (*marks)[16]; /* one per segment of each page: digest of the page up to its end */
};

static uint64_t segment_bytes(const struct layers *l, int64_t slot) {
    uint64_t bytes = 0;
    for (int64_t i = slot ? l->end[slot - 1] : 0; i < l->end[slot]; i++)
        bytes += l->pieces.length[i];
    return bytes;
}

/* Read every page and store its digest up to the end of each segment. 0: cancelled. */
static int verify_pages(struct job *job, const struct layers *l, const uint8_t *digest) {
    for (int64_t p = 0; p < l->pages; p++) {
        start_page(job, &l->states[p], l->seed[p]);
        for (int64_t slot = p * l->segments; slot < (p + 1) * l->segments; slot++) {
            if (!run(job, &l->states[p], segment_bytes(l, slot))) return 0;
            write_found(job, &l->states[p], l->seed[p], l->marks[slot]);
        }
        l->ok[p] = memcmp(l->marks[(p + 1) * l->segments - 1], digest + 16 * p, 16) == 0;
        start_page(job, &l->states[p], l->seed[p]);
    }
    return 1;
}

/* Copy the verified pages segment after segment. The bytes are digested again and must match the
 * marks; otherwise the page is not good any more. 0: cancelled; no page is complete. */
static int copy_segments(struct job *job, const struct layers *l, uint32_t *words) {
    int64_t good = 0;
    for (int64_t s = 0; s < l->segments; s++) {
        for (int64_t p = 0; p < l->pages; p++) {
            const int64_t slot = p * l->segments + s, next = (p + 1) % l->pages;
            const uint64_t bytes = segment_bytes(l, slot);
            const uint64_t from[] = {l->page[p] + l->states[p].at, l->page[next] + l->states[next].at};
            const uint64_t lengths[] = {bytes, AHEAD};
            uint8_t found[16];
            if (!l->ok[p]) continue;
            job->source.at = p, job->source.used = l->states[p].at;
            job->target = l->pieces;
            job->target.at = slot ? l->end[slot - 1] : 0;
            job->ahead = (struct cursor){from, lengths, 1, 0, 2, 0};
            advance(&job->ahead, AHEAD);
            if (!run(job, &l->states[p], bytes)) return 0;
            write_found(job, &l->states[p], l->seed[p], found);
            l->ok[p] = memcmp(found, l->marks[slot], 16) == 0;
        }
        store_fence();
        if (s == 0) good = l->pages;
        for (int64_t p = 0; p < good; p++)
            if (!l->ok[p]) good = p;
        if (words) set_word(words, GOOD, (uint32_t)good), kv_publish(words, DONE, (uint32_t)s + 1);
    }
    return 1;
}

static int64_t move_by_segment(struct job *job, struct layers *l, const uint8_t *digest,
                               uint32_t *words) {
    int64_t done = NO_MEMORY;
    l->states = malloc((size_t)l->pages * sizeof *l->states);
    l->marks = malloc((size_t)l->pages * (size_t)l->segments * sizeof *l->marks);
    if (l->states && l->marks) {
        done = verify_pages(job, l, digest) ? l->pages : 0;
        if (done && !copy_segments(job, l, words)) done = 0;
    }
    if (done <= 0) memset(l->ok, 0, (size_t)l->pages); /* none is complete */
    free(l->states), free(l->marks);
    return done;
}

/* ---- Interface ------------------------------------------------------------------------------- */

/* Index of the first page with an invalid address, or not filled exactly by its pieces; or -1. */
static int64_t first_wrong(int64_t pages, uint64_t page_bytes, const uint64_t *page,
                           const struct cursor *pieces, const int64_t *end, int64_t segments) {
    int64_t i = 0;
    for (int64_t p = 0; p < pages; p++) {
        uint64_t room = page_bytes;
        if (!page[p] || page[p] + page_bytes < page_bytes) return p;
        if (!end) continue;
        for (int64_t slot = p * segments; slot < (p + 1) * segments; slot++) {
            if (end[slot] < i || end[slot] > pieces->count) return p;
            for (; i < end[slot]; i++) {
                uint64_t length = pieces->length[i];
                if (length == 0 || length > room) return p;
                if (!pieces->address[i] || pieces->address[i] + length < length) return p;
                room -= length;
            }
        }
        if (room) return p;
    }
    return i == pieces->count ? -1 : pages - 1;
}

/* Run a job of `pages` pages and `pieces` pieces. page, seed and ok have one entry per page, digest
 * 16 bytes per page, end pages * segments entries, address and length one entry per piece. DIGEST
 * has no pieces; only SCATTER and SCATTER_SEGMENTS have ok. */
EXPORT int64_t kv_move(int32_t mode, int32_t isa, int64_t pages, uint64_t page_bytes,
                       int64_t segments, int64_t pieces, const uint64_t *page,
                       const uint64_t *seed, uint8_t *digest, const uint64_t *address,
                       const uint64_t *length, const int64_t *end, uint8_t *ok, uint32_t *words) {
    if (mode < DIGEST || mode > SCATTER_SEGMENTS || isa < 0 || isa > kv_best_isa() || pages < 0 ||
        segments < 1 || segments > LIST_MAX || pages > LIST_MAX / segments || pieces < 0 ||
        (page_bytes == 0 && mode != DIGEST) || page_bytes > PAGE_BYTES_MAX ||
        (pages && (!page || !seed || !digest)) || (pages && mode >= SCATTER && !ok) ||
        (mode == DIGEST ? pieces || end : pages && (!address || !length || !end)))
        return NO_JOB;
    const struct cursor whole = {page, &page_bytes, 0, 0, pages, 0}, none = {0};
    const struct cursor list = {address, length, 1, 0, pieces, 0};
    int64_t wrong = first_wrong(pages, page_bytes, page, &list, end, segments);
    if (wrong >= 0) return -1 - wrong;
    struct job job = {&ISAS[isa], page_bytes * (uint64_t)pages >= STREAM_MIN, page_bytes, words,
                      mode == GATHER ? list : whole,
                      mode == GATHER ? whole : mode == SCATTER ? list : none, none};
    job.ahead = job.source;
    advance(&job.ahead, AHEAD);
    if (mode == SCATTER_SEGMENTS && pages) {
        struct layers layers = {pages, segments, page, seed, end, list, ok, NULL, NULL};
        return move_by_segment(&job, &layers, digest, words);
    }
    int64_t done = 0;
    for (struct page state; done < pages; done++) {
        uint8_t found[16];
        start_page(&job, &state, seed[done]);
        if (!run(&job, &state, page_bytes)) break;
        write_found(&job, &state, seed[done], mode == SCATTER ? found : digest + 16 * done);
        if (mode == SCATTER) ok[done] = memcmp(found, digest + 16 * done, 16) == 0;
    }
    store_fence();
    return done;
}

/* ---- Memory -------------------------------------------------------------------------------- */

/* Touch one byte per page without changing it, even while others write to it. */
static void touch(uint8_t *at, uint8_t *stop, size_t page_bytes, int writing) {
    for (; at < stop; at += page_bytes) {
        uint8_t value = __atomic_load_n((volatile uint8_t *)at, __ATOMIC_RELAXED);
        if (writing)
            __atomic_compare_exchange_n((volatile uint8_t *)at, &value, value, 0, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED);
    }
}

/* Fault in whole memory pages around the range. Returns 0 or an errno. */
EXPORT int32_t kv_populate(uint64_t address, uint64_t length, int32_t writing) {
    const uint64_t page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
    const int populate_read = 22, populate_write = 23; /* MADV_POPULATE_…: Linux 5.14 */
    const int advice = writing ? populate_write : populate_read;
    uint64_t at = address / page_bytes * page_bytes, stop = address + length;
    if (stop < address || stop > UINT64_MAX - page_bytes) return EINVAL;
    while (at < stop) {
        uint64_t bytes = least(POPULATE_STEP, (stop - at + page_bytes - 1) / page_bytes * page_bytes);
        if (madvise((void *)(uintptr_t)at, bytes, advice) != 0) {
            if (errno != EINVAL && errno != ENOSYS) return errno;
            /* An old kernel, or memory of a device; otherwise only the right to write is missing. */
            if (writing && madvise((void *)(uintptr_t)at, bytes, populate_read) == 0) return EACCES;
            touch((uint8_t *)(uintptr_t)at, (uint8_t *)(uintptr_t)(at + bytes), page_bytes, writing);
        }
        at += bytes;
    }
    return 0;
}
