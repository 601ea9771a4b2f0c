/* The native copier: moves and digests pages in one pass, called through ctypes without the GIL.
 *
 * The digest is XXH3 with 128 bits and a 64-bit seed, written from the algorithm's published
 * description (xxHash repository, doc/xxhash_spec.md, "XXH3 algorithm"); the tests compare it with
 * the xxhash package. A page's bytes are loaded once: what goes into the digest is what is stored.
 *
 * Every call takes arrays by address and returns the number of pages it finished, or a negative
 * number: -1 - p when the pieces of page p do not fill it, NO_MEMORY when it could not start. It
 * checks every piece before it writes anything. docs/internals/mover.md explains the rest.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "only little-endian machines; the package works without this library"
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

enum {
    VERSION = 1,         /* of the calls below; kvstore/mover.py refuses any other */
    STRIPE = 64,         /* bytes digested at a time; each has its own part of the secret */
    BLOCK_STRIPES = 16,  /* stripes between two scrambles */
    SECRET_BYTES = 192,
    SHORT_MAX = 240,             /* longer inputs use the stripes */
    STEP = 256 * 1024,           /* between two looks at the cancel flag; whole blocks */
    AHEAD = 4096,                /* how far before its use the source is asked for */
    STREAM_MIN = 256 * 1024,     /* smaller jobs use ordinary stores: they may be read at once */
    POPULATE_STEP = 16 << 20,
};
static const int64_t NO_MEMORY = INT64_MIN;

/* ---- XXH3: constants, short inputs ---------------------------------------------------------- */

static const uint64_t P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
static const uint64_t P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F;
static const uint64_t P64_3 = 0x165667B19E3779F9, P64_4 = 0x85EBCA77C2B2AE63;
static const uint64_t P64_5 = 0x27D4EB2F165667C5;
static const uint64_t MX1 = 0x165667919E3779F9, MX2 = 0x9FB21C651E98DF25;

static const uint64_t SECRET[SECRET_BYTES / 8] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};

struct digest {
    uint64_t low, high;
};

INLINE uint64_t read64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

INLINE uint32_t read32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

INLINE uint64_t secret64(size_t offset) {
    return read64((const uint8_t *)SECRET + offset);
}

INLINE uint64_t folded_product(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

INLINE uint64_t avalanche(uint64_t x) {
    x = (x ^ (x >> 37)) * MX1;
    return x ^ (x >> 32);
}

INLINE uint64_t avalanche_old(uint64_t x) {
    x = (x ^ (x >> 33)) * P64_2;
    x = (x ^ (x >> 29)) * P64_3;
    return x ^ (x >> 32);
}

static struct digest digest_to_16(const uint8_t *in, size_t length, uint64_t seed) {
    if (length > 8) {
        uint64_t first = read64(in), last = read64(in + length - 8);
        uint64_t a = ((secret64(32) ^ secret64(40)) - seed) ^ first ^ last;
        uint64_t b = ((secret64(48) ^ secret64(56)) + seed) ^ last;
        unsigned __int128 product = (unsigned __int128)a * P64_1;
        uint64_t low = (uint64_t)product + ((uint64_t)(length - 1) << 54);
        uint64_t high = (uint64_t)(product >> 64) + b + (uint32_t)b * (P32_2 - 1);
        low ^= __builtin_bswap64(high);
        product = (unsigned __int128)low * P64_2;
        high = (uint64_t)(product >> 64) + high * P64_2;
        return (struct digest){avalanche((uint64_t)product), avalanche(high)};
    }
    if (length > 3) {
        uint64_t mixed_seed = seed ^ ((uint64_t)__builtin_bswap32((uint32_t)seed) << 32);
        uint64_t input = read32(in) | ((uint64_t)read32(in + length - 4) << 32);
        uint64_t value = ((secret64(16) ^ secret64(24)) + mixed_seed) ^ input;
        unsigned __int128 product = (unsigned __int128)value * (P64_1 + (length << 2));
        uint64_t low = (uint64_t)product, high = (uint64_t)(product >> 64) + (low << 1);
        low ^= high >> 3;
        low = (low ^ (low >> 35)) * MX2;
        return (struct digest){low ^ (low >> 28), avalanche(high)};
    }
    if (length > 0) {
        uint32_t input = in[length - 1] | ((uint32_t)length << 8) | ((uint32_t)in[0] << 16) |
                         ((uint32_t)in[length >> 1] << 24);
        uint32_t turned = __builtin_bswap32(input);
        turned = (turned << 13) | (turned >> 19);
        uint64_t first = secret64(0), second = secret64(8);
        uint64_t low = ((uint32_t)first ^ (first >> 32)) + seed;
        uint64_t high = ((uint32_t)second ^ (second >> 32)) - seed;
        return (struct digest){avalanche_old(low ^ input), avalanche_old(high ^ turned)};
    }
    return (struct digest){avalanche_old(seed ^ secret64(64) ^ secret64(72)),
                           avalanche_old(seed ^ secret64(80) ^ secret64(88))};
}

INLINE uint64_t mixed16(const uint8_t *in, size_t secret, uint64_t seed) {
    return folded_product(read64(in) ^ (secret64(secret) + seed),
                          read64(in + 8) ^ (secret64(secret + 8) - seed));
}

INLINE void mix32(struct digest *sum, const uint8_t *a, const uint8_t *b, size_t secret,
                  uint64_t seed) {
    sum->low = (sum->low + mixed16(a, secret, seed)) ^ (read64(b) + read64(b + 8));
    sum->high = (sum->high + mixed16(b, secret + 16, seed)) ^ (read64(a) + read64(a + 8));
}

static struct digest digest_short(const uint8_t *in, size_t length, uint64_t seed) {
    if (length <= 16) return digest_to_16(in, length, seed);
    struct digest sum = {length * P64_1, 0};
    if (length <= 128) {
        for (size_t i = ((length - 1) >> 5) + 1; i-- > 0;)
            mix32(&sum, in + 16 * i, in + length - 16 * i - 16, 32 * i, seed);
    } else {
        for (size_t i = 0; i < 4; i++) mix32(&sum, in + 32 * i, in + 32 * i + 16, 32 * i, seed);
        sum = (struct digest){avalanche(sum.low), avalanche(sum.high)};
        for (size_t i = 4; i < length >> 5; i++)
            mix32(&sum, in + 32 * i, in + 32 * i + 16, 32 * (i - 4) + 3, seed);
        mix32(&sum, in + length - 16, in + length - 32, 103, 0 - seed);
    }
    uint64_t high = sum.low * P64_1 + sum.high * P64_4 + (length - seed) * P64_2;
    return (struct digest){avalanche(sum.low + sum.high), 0 - avalanche(high)};
}

/* ---- XXH3: long inputs, stripe by stripe, copying as they go --------------------------------- */

struct hash {
    _Alignas(64) uint64_t acc[8];
    _Alignas(64) uint8_t secret[SECRET_BYTES];
    size_t stripe; /* in the present block */
};

enum stores { NO_STORES, PLAIN, STREAM, STREAM_16 }; /* STREAM: aligned to the vector's width */

/* Digest `stripes` of `in`, store them at `out`, and ask for as many bytes at `ahead`. */
typedef void consumer(struct hash *hash, const uint8_t *in, uint8_t *out, size_t stripes,
                      const uint8_t *ahead, enum stores stores);

INLINE void stripe_scalar(uint64_t *acc, const uint8_t *in, const uint8_t *secret, uint8_t *out,
                          enum stores stores) {
    uint64_t data[8];
    memcpy(data, in, STRIPE);
    if (stores != NO_STORES) memcpy(out, data, STRIPE);
    for (int i = 0; i < 8; i++) {
        uint64_t keyed = data[i] ^ read64(secret + 8 * i);
        acc[i] += data[i ^ 1] + (uint64_t)(uint32_t)keyed * (keyed >> 32);
    }
}

INLINE void scramble_scalar(uint64_t *acc, const uint8_t *secret) {
    for (int i = 0; i < 8; i++)
        acc[i] = (acc[i] ^ (acc[i] >> 47) ^ read64(secret + 8 * i)) * P32_1;
}

/* One consumer for each instruction set: the loop is the same, a stripe and a scramble differ. */
#define DEFINE_CONSUMER(NAME, TARGET, VECTOR)                                                     \
    TARGET INLINE void loop_##NAME(struct hash *hash, const uint8_t *in, uint8_t *out,            \
                                   size_t stripes, const uint8_t *ahead, enum stores stores) {    \
        VECTOR acc[STRIPE / sizeof(VECTOR)];                                                      \
        memcpy(acc, hash->acc, STRIPE);                                                           \
        size_t at = hash->stripe;                                                                 \
        while (stripes) {                                                                         \
            size_t count = BLOCK_STRIPES - at < stripes ? BLOCK_STRIPES - at : stripes;           \
            const uint8_t *secret = hash->secret + 8 * at;                                        \
            for (size_t i = 0; i < count; i++) {                                                  \
                __builtin_prefetch(ahead + STRIPE * i, 0, 3);                                     \
                stripe_##NAME(acc, in + STRIPE * i, secret + 8 * i, out + STRIPE * i, stores);    \
            }                                                                                     \
            in += STRIPE * count, out += STRIPE * count, ahead += STRIPE * count;                 \
            stripes -= count, at += count;                                                        \
            if (at == BLOCK_STRIPES) {                                                            \
                scramble_##NAME(acc, hash->secret + SECRET_BYTES - STRIPE);                       \
                at = 0;                                                                           \
            }                                                                                     \
        }                                                                                         \
        memcpy(hash->acc, acc, STRIPE);                                                           \
        hash->stripe = at;                                                                        \
    }                                                                                             \
    TARGET static void consume_##NAME(struct hash *hash, const uint8_t *in, uint8_t *out,         \
                                      size_t stripes, const uint8_t *ahead, enum stores stores) { \
        switch (stores) {                                                                         \
        case NO_STORES: loop_##NAME(hash, in, (uint8_t *)in, stripes, ahead, NO_STORES); break;   \
        case PLAIN: loop_##NAME(hash, in, out, stripes, ahead, PLAIN); break;                     \
        case STREAM: loop_##NAME(hash, in, out, stripes, ahead, STREAM); break;                   \
        case STREAM_16: loop_##NAME(hash, in, out, stripes, ahead, STREAM_16); break;             \
        }                                                                                         \
    }

DEFINE_CONSUMER(scalar, , uint64_t)

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f")))

/* A stripe: acc[i] += data[i ^ 1] + low32(data[i] ^ secret[i]) * high32(data[i] ^ secret[i]).
 * A scramble multiplies by a 32-bit prime: the high halves' product counts from bit 32. */
INLINE void stripe_sse2(__m128i *acc, const uint8_t *in, const uint8_t *secret, uint8_t *out,
                        enum stores stores) {
    for (int i = 0; i < 4; i++) {
        __m128i data = _mm_loadu_si128((const __m128i *)in + i);
        if (stores == PLAIN) _mm_storeu_si128((__m128i *)out + i, data);
        if (stores > PLAIN) _mm_stream_si128((__m128i *)out + i, data);
        __m128i keyed = _mm_xor_si128(data, _mm_loadu_si128((const __m128i *)secret + i));
        __m128i product = _mm_mul_epu32(keyed, _mm_srli_epi64(keyed, 32));
        acc[i] = _mm_add_epi64(acc[i], _mm_add_epi64(product, _mm_shuffle_epi32(data, 0x4e)));
    }
}

INLINE void scramble_sse2(__m128i *acc, const uint8_t *secret) {
    const __m128i prime = _mm_set1_epi64x((int64_t)P32_1);
    for (int i = 0; i < 4; i++) {
        __m128i x = _mm_xor_si128(acc[i], _mm_srli_epi64(acc[i], 47));
        x = _mm_xor_si128(x, _mm_loadu_si128((const __m128i *)secret + i));
        __m128i high = _mm_slli_epi64(_mm_mul_epu32(_mm_srli_epi64(x, 32), prime), 32);
        acc[i] = _mm_add_epi64(_mm_mul_epu32(x, prime), high);
    }
}
DEFINE_CONSUMER(sse2, , __m128i)

AVX2 INLINE void stripe_avx2(__m256i *acc, const uint8_t *in, const uint8_t *secret, uint8_t *out,
                             enum stores stores) {
    for (int i = 0; i < 2; i++) {
        __m256i data = _mm256_loadu_si256((const __m256i *)in + i);
        if (stores == PLAIN) _mm256_storeu_si256((__m256i *)out + i, data);
        if (stores == STREAM) _mm256_stream_si256((__m256i *)out + i, data);
        if (stores == STREAM_16) {
            _mm_stream_si128((__m128i *)out + 2 * i, _mm256_castsi256_si128(data));
            _mm_stream_si128((__m128i *)out + 2 * i + 1, _mm256_extracti128_si256(data, 1));
        }
        __m256i keyed = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)secret + i));
        __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
        __m256i sum = _mm256_add_epi64(product, _mm256_shuffle_epi32(data, 0x4e));
        acc[i] = _mm256_add_epi64(acc[i], sum);
    }
}

AVX2 INLINE void scramble_avx2(__m256i *acc, const uint8_t *secret) {
    const __m256i prime = _mm256_set1_epi64x((int64_t)P32_1);
    for (int i = 0; i < 2; i++) {
        __m256i x = _mm256_xor_si256(acc[i], _mm256_srli_epi64(acc[i], 47));
        x = _mm256_xor_si256(x, _mm256_loadu_si256((const __m256i *)secret + i));
        __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime), 32);
        acc[i] = _mm256_add_epi64(_mm256_mul_epu32(x, prime), high);
    }
}
DEFINE_CONSUMER(avx2, AVX2, __m256i)

AVX512 INLINE void stripe_avx512(__m512i *acc, const uint8_t *in, const uint8_t *secret,
                                 uint8_t *out, enum stores stores) {
    __m512i data = _mm512_loadu_si512(in);
    if (stores == PLAIN) _mm512_storeu_si512(out, data);
    if (stores == STREAM) _mm512_stream_si512((__m512i *)out, data);
    if (stores == STREAM_16) {
        _mm_stream_si128((__m128i *)out, _mm512_castsi512_si128(data));
        _mm_stream_si128((__m128i *)out + 1, _mm512_extracti32x4_epi32(data, 1));
        _mm_stream_si128((__m128i *)out + 2, _mm512_extracti32x4_epi32(data, 2));
        _mm_stream_si128((__m128i *)out + 3, _mm512_extracti32x4_epi32(data, 3));
    }
    __m512i keyed = _mm512_xor_si512(data, _mm512_loadu_si512(secret));
    __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
    __m512i swapped = _mm512_shuffle_epi32(data, (_MM_PERM_ENUM)0x4e);
    *acc = _mm512_add_epi64(*acc, _mm512_add_epi64(product, swapped));
}

AVX512 INLINE void scramble_avx512(__m512i *acc, const uint8_t *secret) {
    const __m512i prime = _mm512_set1_epi64((int64_t)P32_1);
    __m512i x = _mm512_xor_si512(*acc, _mm512_srli_epi64(*acc, 47));
    x = _mm512_xor_si512(x, _mm512_loadu_si512(secret));
    __m512i high = _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(x, 32), prime), 32);
    *acc = _mm512_add_epi64(_mm512_mul_epu32(x, prime), high);
}
DEFINE_CONSUMER(avx512, AVX512, __m512i)
#endif

/* What kvstore/mover.py calls them: 0 scalar, 1 sse2, 2 avx2, 3 avx512. */
static const struct isa {
    consumer *consume;
    size_t stream_alignment; /* 0: it has no streaming stores */
} ISAS[] = {
    {consume_scalar, 0},
#if defined(__x86_64__)
    {consume_sse2, 16}, {consume_avx2, 32}, {consume_avx512, 64},
#endif
};

static void hash_start(struct hash *hash, uint64_t seed) {
    const uint64_t start[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    uint64_t secret[SECRET_BYTES / 8];
    for (int i = 0; i < SECRET_BYTES / 8; i++) secret[i] = SECRET[i] + (i & 1 ? 0 - seed : seed);
    memcpy(hash->acc, start, sizeof start);
    memcpy(hash->secret, secret, sizeof secret);
    hash->stripe = 0;
}

static uint64_t merged(const struct hash *hash, uint64_t sum, size_t secret) {
    for (int i = 0; i < 8; i += 2)
        sum += folded_product(hash->acc[i] ^ read64(hash->secret + secret + 8 * i),
                              hash->acc[i + 1] ^ read64(hash->secret + secret + 8 * i + 8));
    return avalanche(sum);
}

/* `last`: the input's last 64 bytes, of which some may have been consumed before. */
static struct digest hash_end(struct hash *hash, const uint8_t *last, uint64_t length) {
    stripe_scalar(hash->acc, last, hash->secret + SECRET_BYTES - STRIPE - 7, NULL, NO_STORES);
    return (struct digest){merged(hash, length * P64_1, 11),
                           merged(hash, ~(length * P64_2), SECRET_BYTES - STRIPE - 11)};
}

static void write_digest(struct digest digest, uint8_t *out) {
    const uint64_t words[2] = {__builtin_bswap64(digest.high), __builtin_bswap64(digest.low)};
    memcpy(out, words, sizeof words);
}

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
    int64_t good = 0;
    while (verify && good < done && ok[good]) good++;
    if (words) set_word(words, GOOD, (uint32_t)good);
    if (mode == SCATTER_SEGMENTS) {
        uint64_t *offset = calloc(pages ? (size_t)pages : 1, sizeof *offset);
        if (done < pages || !offset ||
            !copy_segments(&job, pages, page, &pieces, end, segments, ok, offset)) {
            memset(ok, 0, (size_t)pages); /* not one of them is whole */
            done = offset ? 0 : NO_MEMORY;
        }
        free(offset);
    } else if (done == pages && words) {
        kv_publish(words, DONE, (uint32_t)segments);
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
