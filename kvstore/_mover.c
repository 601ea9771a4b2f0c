/* The native copier: moves and digests pages in one pass, called through ctypes without the GIL.
 *
 * Every call takes arrays by address and returns the number of pages it finished, or a negative
 * number: -1 - p when the pieces of page p do not fill it, NO_MEMORY when it could not start. It
 * checks every piece before it writes anything. docs/internals/mover.md explains the rest.
 */
#define _GNU_SOURCE
#include "_xxh3.h"

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
    VERSION = 1,             /* of the calls below; kvstore/mover.py refuses any other */
    STEP = 256 * 1024,       /* between two looks at the cancel flag; whole blocks */
    AHEAD = 2048,            /* how far before its use the source is asked for: measured */
    STREAM_MIN = 256 * 1024, /* smaller jobs use ordinary stores: they may be read at once */
    POPULATE_STEP = 16 << 20,
};
static const int64_t NO_MEMORY = INT64_MIN;

/* ---- Progress: a block of words shared with Python ------------------------------------------- */

enum { DONE, FINISHED, EVENT, GOOD, CANCEL }; /* kvstore/mover.py knows this order */

static void set_word(uint32_t *words, int word, uint32_t value) {
    __atomic_store_n(&words[word], value, __ATOMIC_RELEASE);
}

static uint32_t word(const uint32_t *words, int word) {
    return __atomic_load_n(&words[word], __ATOMIC_ACQUIRE);
}

static int cancelled(const uint32_t *words) {
    return words && word(words, CANCEL);
}

/* Set a word and wake every waiter. They sleep on EVENT, so a change just before is not missed. */
EXPORT void kv_publish(uint32_t *words, int32_t which, uint32_t value) {
    set_word(words, which, value);
    __atomic_fetch_add(&words[EVENT], 1, __ATOMIC_ACQ_REL);
#ifdef __linux__
    syscall(SYS_futex, &words[EVENT], FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#endif
}

/* Wait for DONE >= count, FINISHED or the timeout; may return early. 1: reached, 0: finished
 * without it, -1: neither yet. */
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

/* ---- Jobs ------------------------------------------------------------------------------------ */

enum mode { DIGEST, GATHER, SCATTER, SCATTER_SEGMENTS };

struct cursor { /* walks a list of pieces, which may be pages of one length; empty: goes nowhere */
    const uint64_t *address, *length;
    size_t length_stride; /* 0: all pieces have length[0] */
    int64_t at, count;
    uint64_t used; /* of the present piece */
};

struct job {
    const struct isa *isa;
    enum mode mode;
    int streaming;
    uint64_t page_bytes;
    uint32_t *words;
    struct cursor source, target, ahead;
};

INLINE uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

INLINE uint64_t left(const struct cursor *c) {
    return c->at < c->count ? c->length[(size_t)c->at * c->length_stride] - c->used : UINT64_MAX;
}

INLINE uint8_t *here(const struct cursor *c) {
    return c->at < c->count ? (uint8_t *)(uintptr_t)(c->address[c->at] + c->used) : NULL;
}

INLINE void advance(struct cursor *c, uint64_t bytes) {
    if (c->at >= c->count) return;
    c->used += bytes;
    if (left(c) == 0) c->at++, c->used = 0;
}

INLINE void store_fence(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

static enum stores stores_for(const struct job *job, const uint8_t *out) {
    if (!out) return NO_STORES;
    if (!job->streaming || !job->isa->stream_alignment || (uintptr_t)out % 16) return PLAIN;
    return (uintptr_t)out % job->isa->stream_alignment ? STREAM_16 : STREAM;
}

/* A page of whole stripes, all of whose pieces are whole stripes: digest and copy in one pass. */
static int fused(struct job *job, uint64_t seed, uint8_t *digest) {
    struct hash hash;
    hash_start(&hash, seed);
    uint64_t bytes = job->page_bytes - STRIPE, step = 0;
    while (bytes) {
        if (!step) {
            if (cancelled(job->words)) return 0;
            step = STEP;
        }
        uint64_t count = least(least(bytes, step), least(left(&job->source), left(&job->target)));
        count = least(count, left(&job->ahead));
        const uint8_t *in = here(&job->source), *ahead = here(&job->ahead);
        uint8_t *out = here(&job->target);
        job->isa->consume(&hash, in, out, count / STRIPE, ahead ? ahead : in, stores_for(job, out));
        advance(&job->source, count), advance(&job->target, count), advance(&job->ahead, count);
        bytes -= count, step -= count;
    }
    uint8_t last[STRIPE];
    memcpy(last, here(&job->source), STRIPE);
    if (here(&job->target)) memcpy(here(&job->target), last, STRIPE);
    advance(&job->source, STRIPE), advance(&job->target, STRIPE), advance(&job->ahead, STRIPE);
    write_digest(hash_end(&hash, last, job->page_bytes), digest);
    return 1;
}

static void copy_step(struct job *job, uint64_t bytes) {
    while (bytes && job->target.count) {
        uint64_t count = least(bytes, least(left(&job->source), left(&job->target)));
        memcpy(here(&job->target), here(&job->source), count);
        advance(&job->source, count), advance(&job->target, count);
        bytes -= count;
    }
}

/* Any page and any pieces: a step is copied and digested one after the other, from the cache. */
static int stepwise(struct job *job, const uint8_t *page, uint64_t seed, uint8_t *digest) {
    struct hash hash;
    struct digest result = {0, 0};
    hash_start(&hash, seed);
    uint64_t length = job->page_bytes, stripes = (length - 1) / STRIPE;
    for (uint64_t at = 0; at == 0 || at < length; at += STEP) {
        if (cancelled(job->words)) return 0;
        uint64_t bytes = least(STEP, length - at), count = least(bytes / STRIPE, stripes);
        if (job->mode == GATHER) copy_step(job, bytes);
        if (length <= SHORT_MAX) {
            result = digest_short(page, length, seed);
        } else {
            job->isa->consume(&hash, page + at, NULL, count, page + at, NO_STORES);
            stripes -= count;
        }
        if (job->mode == SCATTER) copy_step(job, bytes);
    }
    if (length > SHORT_MAX) result = hash_end(&hash, page + length - STRIPE, length);
    write_digest(result, digest);
    return 1;
}

/* Copy `bytes` past the cache when it pays. 0: cancelled before the end. */
static int copy_out(const struct job *job, uint8_t *out, const uint8_t *in, uint64_t bytes) {
    while (bytes) {
        if (cancelled(job->words)) return 0;
        uint64_t count = least(bytes, STEP), at = 0;
#if defined(__x86_64__)
        if (job->streaming && count >= 256) {
            at = (0 - (uintptr_t)out) % 64;
            memcpy(out, in, at);
            for (; at + 64 <= count; at += 64) {
                __m128i a = _mm_loadu_si128((const __m128i *)(in + at));
                __m128i b = _mm_loadu_si128((const __m128i *)(in + at + 16));
                __m128i c = _mm_loadu_si128((const __m128i *)(in + at + 32));
                __m128i d = _mm_loadu_si128((const __m128i *)(in + at + 48));
                __builtin_prefetch(in + at + AHEAD, 0, 3);
                _mm_stream_si128((__m128i *)(out + at), a);
                _mm_stream_si128((__m128i *)(out + at + 16), b);
                _mm_stream_si128((__m128i *)(out + at + 32), c);
                _mm_stream_si128((__m128i *)(out + at + 48), d);
            }
        }
#endif
        memcpy(out + at, in + at, count - at);
        in += count, out += count, bytes -= count;
    }
    return 1;
}

/* Of the pages that verified, copy segment after segment. 0: cancelled; no page is whole. */
static int copy_segments(const struct job *job, int64_t pages, const uint64_t *page,
                         const struct cursor *target, const int64_t *end, int64_t segments,
                         const uint8_t *ok, uint64_t *offset) {
    for (int64_t s = 0; s < segments; s++) {
        for (int64_t p = 0; p < pages; p++) {
            int64_t slot = p * segments + s;
            for (int64_t i = slot ? end[slot - 1] : 0; ok[p] && i < end[slot]; i++) {
                const uint8_t *in = (const uint8_t *)(uintptr_t)(page[p] + offset[p]);
                uint8_t *out = (uint8_t *)(uintptr_t)target->address[i];
                if (!copy_out(job, out, in, target->length[i])) return 0;
                offset[p] += target->length[i];
            }
        }
        store_fence();
        if (job->words) kv_publish(job->words, DONE, (uint32_t)s + 1);
    }
    return 1;
}

/* Index of the first page that its pieces do not fill exactly; -1: none. `odd` gets the lengths'
 * bits, which say whether all are whole stripes. */
static int64_t first_unfilled(int64_t pages, uint64_t page_bytes, const struct cursor *pieces,
                              const int64_t *end, int64_t segments, uint64_t *odd) {
    int64_t i = 0;
    for (int64_t p = 0; p < pages; p++) {
        uint64_t room = page_bytes;
        for (int64_t slot = p * segments; slot < (p + 1) * segments; slot++) {
            if (end[slot] < i) return p;
            for (; i < end[slot]; i++) {
                uint64_t length = pieces->length[i];
                if (length == 0 || length > room) return p;
                if (!pieces->address[i] || pieces->address[i] + length < length) return p;
                room -= length;
                *odd |= length;
            }
        }
        if (room) return p;
    }
    return -1;
}

/* One job. Arrays: page, seed and ok have `pages` entries, digest 16 times as many bytes; end has
 * pages * segments, its last entry being the number of pieces in address and length. */
EXPORT int64_t kv_move(int32_t mode, int32_t isa, int64_t pages, uint64_t page_bytes,
                       int64_t segments, const uint64_t *page, const uint64_t *seed,
                       uint8_t *digest, const uint64_t *address, const uint64_t *length,
                       const int64_t *end, uint8_t *ok, uint32_t *words) {
    const struct cursor whole = {page, &page_bytes, 0, 0, pages, 0}, none = {0};
    struct cursor pieces = {address, length, 1, 0, 0, 0};
    uint64_t odd = page_bytes;
    if (mode != DIGEST && pages) {
        int64_t unfilled = first_unfilled(pages, page_bytes, &pieces, end, segments, &odd);
        if (unfilled >= 0) return -1 - unfilled;
        pieces.count = end[pages * segments - 1];
    }
    struct job job = {&ISAS[isa], mode == SCATTER_SEGMENTS ? DIGEST : (enum mode)mode,
                      page_bytes * (uint64_t)pages >= STREAM_MIN, page_bytes, words,
                      mode == GATHER ? pieces : whole,
                      mode == GATHER ? whole : mode == SCATTER ? pieces : none, none};
    job.ahead = job.source;
    for (uint64_t skip = AHEAD, count; skip && here(&job.ahead); skip -= count)
        advance(&job.ahead, count = least(skip, left(&job.ahead)));
    int fast = odd % STRIPE == 0 && page_bytes > SHORT_MAX, verify = mode >= SCATTER;
    int64_t done = 0;
    uint8_t found[16];
    for (; done < pages; done++) {
        const uint8_t *at = (const uint8_t *)(uintptr_t)page[done];
        uint8_t *out = verify ? found : digest + 16 * done;
        if (!(fast ? fused(&job, seed[done], out) : stepwise(&job, at, seed[done], out))) break;
        if (verify) ok[done] = memcmp(found, digest + 16 * done, 16) == 0;
    }
    store_fence();
    if (mode == SCATTER_SEGMENTS) {
        uint32_t good = 0;
        while (good < done && ok[good]) good++;
        if (words) set_word(words, GOOD, good);
        uint64_t *offset = calloc(pages ? (size_t)pages : 1, sizeof *offset);
        if (done < pages || !offset ||
            !copy_segments(&job, pages, page, &pieces, end, segments, ok, offset)) {
            memset(ok, 0, (size_t)pages); /* not one of them is whole */
            done = offset ? 0 : NO_MEMORY;
        }
        free(offset);
    }
    return done;
}

/* ---- The rest -------------------------------------------------------------------------------- */

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

/* Touch one byte a page without changing it, even while others write to it. */
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
    const int advice = writing ? 23 : 22; /* MADV_POPULATE_WRITE, _READ: Linux 5.14 */
    uint64_t at = address / page_bytes * page_bytes, stop = address + length;
    while (at < stop) {
        uint64_t bytes = least(POPULATE_STEP, (stop - at + page_bytes - 1) / page_bytes * page_bytes);
        if (madvise((void *)(uintptr_t)at, bytes, advice) != 0) {
            if (errno != EINVAL && errno != ENOSYS) return errno;
            touch((uint8_t *)(uintptr_t)at, (uint8_t *)(uintptr_t)(at + bytes), page_bytes, writing);
        }
        at += bytes;
    }
    return 0;
}
