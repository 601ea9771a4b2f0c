/* XXH3 with 128 or 64 bits and a 64-bit seed, little-endian, with stores on the side.
 *
 * Written from the algorithm's published description (xxHash repository, doc/xxhash_spec.md, "XXH3
 * algorithm"); the tests compare it with the xxhash package at every length. Long inputs can be
 * copied while they are digested: a stripe is loaded once, so what is digested is what is stored,
 * whoever else writes to that memory meanwhile.
 */
#ifndef KVSTORE_XXH3_H
#define KVSTORE_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "only little-endian machines; the package works without this library"
#endif

#define INLINE static inline __attribute__((always_inline))

enum {
    STRIPE = 64,        /* bytes digested at a time; each has its own part of the secret */
    BLOCK_STRIPES = 16, /* stripes between two scrambles */
    SECRET_BYTES = 192,
    SHORT_MAX = 240, /* longer inputs use the stripes */
};

/* Others may write to the memory that is read. What was loaded counts from here on: the compiler
 * may not load it a second time. */
#define LOADED_WORD(value) __asm__("" : "+r"(value))
#define LOADED_VECTOR(value) __asm__("" : "+v"(value))

INLINE void read_once(uint8_t *to, const uint8_t *from, size_t bytes) {
    memcpy(to, from, bytes);
    __asm__ volatile("" : : "r"(to) : "memory");
}

/* ---- Constants and short inputs -------------------------------------------------------------- */

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

static inline struct digest digest_to_16(const uint8_t *in, size_t length, uint64_t seed) {
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

static inline struct digest digest_short(const uint8_t *in, size_t length, uint64_t seed) {
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

/* ---- Long inputs, stripe by stripe ----------------------------------------------------------- */

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
    for (int i = 0; i < 8; i++) LOADED_WORD(data[i]);
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
        LOADED_VECTOR(data);
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
        LOADED_VECTOR(data);
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
    LOADED_VECTOR(data);
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
enum { BASE_ISA = sizeof ISAS / sizeof *ISAS > 1 }; /* every machine of this kind has it */

static inline void hash_start(struct hash *hash, uint64_t seed) {
    const uint64_t start[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    uint64_t secret[SECRET_BYTES / 8];
    for (int i = 0; i < SECRET_BYTES / 8; i++) secret[i] = SECRET[i] + (i & 1 ? 0 - seed : seed);
    memcpy(hash->acc, start, sizeof start);
    memcpy(hash->secret, secret, sizeof secret);
    hash->stripe = 0;
}

static inline uint64_t merged(const uint64_t *acc, const uint8_t *secret, uint64_t sum) {
    for (int i = 0; i < 8; i += 2)
        sum += folded_product(acc[i] ^ read64(secret + 8 * i),
                              acc[i + 1] ^ read64(secret + 8 * i + 8));
    return avalanche(sum);
}

/* `last`: the input's last 64 bytes, of which some may have been consumed before. */
static inline struct digest hash_end(const struct hash *hash, const uint8_t *last, uint64_t length) {
    const uint8_t *end = hash->secret + SECRET_BYTES - STRIPE;
    uint64_t acc[8];
    memcpy(acc, hash->acc, sizeof acc);
    stripe_scalar(acc, last, end - 7, NULL, NO_STORES);
    return (struct digest){merged(acc, hash->secret + 11, length * P64_1),
                           merged(acc, end - 11, ~(length * P64_2))};
}

static inline void write_digest(struct digest digest, uint8_t *out) {
    const uint64_t words[2] = {__builtin_bswap64(digest.high), __builtin_bswap64(digest.low)};
    memcpy(out, words, sizeof words);
}

/* ---- 64 bits ----------------------------------------------------------------------------------- */

INLINE uint64_t rotated(uint64_t x, int bits) {
    return (x << bits) | (x >> (64 - bits));
}

static inline uint64_t hash64_to_16(const uint8_t *in, size_t length, uint64_t seed) {
    if (length > 8) {
        uint64_t low = read64(in) ^ ((secret64(24) ^ secret64(32)) + seed);
        uint64_t high = read64(in + length - 8) ^ ((secret64(40) ^ secret64(48)) - seed);
        return avalanche(length + __builtin_bswap64(low) + high + folded_product(low, high));
    }
    if (length > 3) {
        uint64_t mixed_seed = seed ^ ((uint64_t)__builtin_bswap32((uint32_t)seed) << 32);
        uint64_t input = read32(in + length - 4) + ((uint64_t)read32(in) << 32);
        uint64_t x = input ^ ((secret64(8) ^ secret64(16)) - mixed_seed);
        x = (x ^ rotated(x, 49) ^ rotated(x, 24)) * MX2;
        x = (x ^ ((x >> 35) + length)) * MX2;
        return x ^ (x >> 28);
    }
    return length ? digest_to_16(in, length, seed).low
                  : avalanche_old(seed ^ secret64(56) ^ secret64(64));
}

static inline uint64_t hash64(const uint8_t *in, size_t length, uint64_t seed) {
    if (length <= 16) return hash64_to_16(in, length, seed);
    uint64_t sum = length * P64_1;
    if (length <= 128) {
        for (size_t i = 0; i <= (length - 1) >> 5; i++)
            sum += mixed16(in + 16 * i, 32 * i, seed) +
                   mixed16(in + length - 16 * i - 16, 32 * i + 16, seed);
        return avalanche(sum);
    }
    if (length <= SHORT_MAX) {
        for (size_t i = 0; i < 8; i++) sum += mixed16(in + 16 * i, 16 * i, seed);
        sum = avalanche(sum) + mixed16(in + length - 16, 119, seed);
        for (size_t i = 8; i < length >> 4; i++)
            sum += mixed16(in + 16 * i, 16 * (i - 8) + 3, seed);
        return avalanche(sum);
    }
    struct hash hash;
    hash_start(&hash, seed);
    ISAS[BASE_ISA].consume(&hash, in, NULL, (length - 1) / STRIPE, in, NO_STORES);
    return hash_end(&hash, in + length - STRIPE, length).low;
}

#endif
