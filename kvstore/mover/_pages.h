/* A page that is read, copied and digested piece after piece: what the mover and the receiver of
 * ranges have in common. docs/internals/mover.md explains it.
 */
#ifndef KVSTORE_PAGES_H
#define KVSTORE_PAGES_H

#include "_xxh3.h"

enum {
    STEP = 256 * 1024,       /* bytes between two checks of the cancel flag; whole blocks */
    AHEAD = 2048,            /* prefetch distance in bytes; measured */
    STREAM_MIN = 256 * 1024, /* smaller jobs use ordinary stores: their bytes may be read soon */
};

/* ---- Words shared with Python ---------------------------------------------------------------- */

enum { DONE, FINISHED, EVENT, GOOD, CANCEL }; /* as in kvstore/mover/jobs.py */

INLINE uint32_t word(const uint32_t *words, int word) {
    return __atomic_load_n(&words[word], __ATOMIC_ACQUIRE);
}

INLINE int cancelled(const uint32_t *words) {
    return words && word(words, CANCEL);
}

/* ---- Jobs ------------------------------------------------------------------------------------ */

struct cursor { /* position in a list of pieces, or of pages of one length; may be empty */
    const uint64_t *address, *length;
    size_t length_stride; /* 0: all pieces have length[0] */
    int64_t at, count;
    uint64_t used; /* bytes of the current piece */
};

struct job {
    const struct isa *isa;
    int streaming;
    uint64_t page_bytes;
    const uint32_t *words;
    struct cursor source, target, ahead;
};

struct page { /* state of a page that is being read and digested */
    struct hash hash;                 /* of whole stripes, except the page's last one */
    uint64_t at;                      /* bytes read */
    size_t rest;                      /* those of them that are not in `hash` yet */
    uint8_t tail[STRIPE + SHORT_MAX]; /* the stripe before the rest, and the rest */
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
    for (uint64_t rest; bytes >= (rest = left(c)); bytes -= rest) c->at++, c->used = 0;
    if (c->at < c->count) c->used += bytes;
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

static void start_page(const struct job *job, struct page *page, uint64_t seed) {
    if (job->page_bytes > SHORT_MAX) hash_start(&page->hash, seed);
    page->at = page->rest = 0;
}

/* The digest of the bytes read so far; before the end of the page only useful for comparing. */
static void write_found(const struct job *job, const struct page *page, uint64_t seed,
                        uint8_t *digest) {
    const uint8_t *last = page->tail + page->rest;
    uint8_t rest[STRIPE] = {0};
    if (job->page_bytes <= SHORT_MAX) {
        write_digest(digest_short(page->tail + STRIPE, page->at, seed), digest);
        return;
    }
    if (page->at < job->page_bytes) last = memcpy(rest, page->tail + STRIPE, page->rest);
    write_digest(hash_end(&page->hash, last, page->at), digest);
}

/* Read and copy `count` bytes that are not a whole stripe, or belong to a page's last stripes. */
static void run_tail(struct job *job, struct page *page, uint64_t count, int last) {
    uint8_t *stripe = page->tail + STRIPE, *fresh = stripe + page->rest;
    read_once(fresh, here(&job->source), count);
    if (here(&job->target)) memcpy(here(&job->target), fresh, count);
    page->rest += count;
    if (last || page->rest < STRIPE) return;
    job->isa->consume(&page->hash, stripe, NULL, 1, stripe, NO_STORES);
    memcpy(page->tail, stripe, STRIPE);
    page->rest = 0;
}

/* Read `bytes` more of a page, each once: the target gets the digested bytes. Whole stripes go
 * through registers. A stripe that two pieces share, and the last stripe or two of a page (which
 * the digest needs again), go through private memory. 0: cancelled before the end. */
static int run(struct job *job, struct page *page, uint64_t bytes) {
    const int is_short = job->page_bytes <= SHORT_MAX;
    const uint64_t whole = is_short ? 0 : (job->page_bytes - 1) / STRIPE * STRIPE;
    const uint64_t direct = whole - (whole && job->page_bytes % STRIPE ? STRIPE : 0);
    for (uint64_t step = 0, count; bytes; bytes -= count, step -= least(count, step)) {
        if (!step) {
            if (cancelled(job->words)) return 0;
            step = STEP;
        }
        count = least(least(bytes, step), least(left(&job->source), left(&job->target)));
        if (!page->rest && count >= STRIPE && page->at < direct) {
            const uint8_t *in = here(&job->source), *ahead = here(&job->ahead);
            uint8_t *out = here(&job->target);
            count = least(count, direct - page->at);
            count = least(count, least(left(&job->ahead), STEP) + STRIPE - 1) / STRIPE * STRIPE;
            job->isa->consume(&page->hash, in, out, count / STRIPE, ahead ? ahead : in + AHEAD,
                              stores_for(job, out));
        } else {
            count = least(count, (is_short ? SHORT_MAX : STRIPE) - page->rest);
            run_tail(job, page, count, page->at + count > whole);
        }
        page->at += count;
        advance(&job->source, count), advance(&job->target, count), advance(&job->ahead, count);
    }
    return 1;
}

#endif
