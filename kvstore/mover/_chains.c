/* What the prefix index does with every block of an event, called through ctypes without the GIL:
 * decode msgpack arrays, hash chains of token blocks, and keep the blocks of an engine.
 *
 * No call allocates memory or reads beyond the bytes it is given. `raw` is one msgpack array. A
 * call that decodes one returns the number of its elements, or -1 - p if the bytes at p are not
 * what they have to be; what it wrote until then has no meaning. A chain and a name are never 0.
 */
#include "_xxh3.h"

#define EXPORT __attribute__((visibility("default")))

enum { KEY_BYTES = 32, AHEAD = 8 };

INLINE uint64_t not_zero(uint64_t value) {
    return value ? value : 1;
}

/* XXH3 with 64 bits of any bytes. */
EXPORT uint64_t kv_hash64(const uint8_t *in, int64_t length, uint64_t seed) {
    return hash64(in, (size_t)length, seed);
}

/* ---- Msgpack ----------------------------------------------------------------------------------- */

struct reader {
    const uint8_t *at, *end;
};

/* Big-endian, 1, 2, 4 or 8 bytes; the caller has checked that they are there. */
INLINE uint64_t read_big(const uint8_t *at, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) value = value << 8 | at[i];
    return value;
}

INLINE int has(const struct reader *r, size_t bytes) {
    return (size_t)(r->end - r->at) >= bytes;
}

/* The number of elements, each at least one byte; -1: this is not an array that fits. */
static int64_t read_array(struct reader *r) {
    if (!has(r, 1)) return -1;
    const uint8_t head = *r->at;
    const int wide = head == 0xdc ? 2 : head == 0xdd ? 4 : 0;
    if ((head & 0xf0) != 0x90 && !wide) return -1;
    if (!has(r, 1 + (size_t)wide)) return -1;
    const uint64_t count = wide ? read_big(r->at + 1, wide) : head & 0x0f;
    r->at += 1 + wide;
    return has(r, count) ? (int64_t)count : -1;
}

/* An integer modulo 2**64. 0: there is none. */
INLINE int read_integer(struct reader *r, uint64_t *value, int *negative) {
    if (!has(r, 1)) return 0;
    const uint8_t head = *r->at;
    *negative = 0;
    if (head < 0x80) {
        *value = head;
        r->at++;
        return 1;
    }
    if (head >= 0xe0) {
        *value = (uint64_t)(int64_t)(int8_t)head;
        *negative = 1;
        r->at++;
        return 1;
    }
    if (head < 0xcc || head > 0xd3) return 0;
    const int bytes = 1 << (head & 3), bits = 8 * bytes; /* cc..cf: unsigned, d0..d3: signed */
    if (!has(r, 1 + (size_t)bytes)) return 0;
    *value = read_big(r->at + 1, bytes);
    if (head >= 0xd0 && *value >> (bits - 1)) {
        *negative = 1;
        if (bits < 64) *value |= ~(uint64_t)0 << bits;
    }
    r->at += 1 + bytes;
    return 1;
}

/* The start of a byte string of at most `most` bytes, which are skipped; NULL: there is none. */
INLINE const uint8_t *read_string(struct reader *r, size_t most, size_t *length) {
    if (!has(r, 1) || *r->at < 0xc4 || *r->at > 0xc6) return NULL;
    const int wide = 1 << (*r->at - 0xc4);
    if (!has(r, 1 + (size_t)wide)) return NULL;
    *length = read_big(r->at + 1, wide);
    if (*length > most || !has(r, 1 + (size_t)wide + *length)) return NULL;
    const uint8_t *start = r->at + 1 + wide;
    r->at = start + *length;
    return start;
}

/* Skip one value with all that is in it. 0: its bytes are not all there. */
static int skip_value(struct reader *r) {
    for (uint64_t left = 1; left; left--) {
        if (!has(r, 1)) return 0;
        const uint8_t head = *r->at++;
        uint64_t bytes = 0;
        int wide = 0; /* bytes of a length */
        if (head < 0x80 || head >= 0xe0 || head == 0xc0 || head == 0xc2 || head == 0xc3) continue;
        if (head == 0xc1) return 0;
        if (head < 0x90) left += 2 * (uint64_t)(head & 0x0f);
        else if (head < 0xa0) left += head & 0x0f;
        else if (head < 0xc0) bytes = head & 0x1f;
        else if (head <= 0xc9) wide = 1 << ((head - 0xc4) % 3), bytes = head >= 0xc7;
        else if (head <= 0xcb) bytes = head == 0xca ? 4 : 8;
        else if (head <= 0xd3) bytes = 1 << (head & 3);
        else if (head <= 0xd8) bytes = 1 + (1 << (head - 0xd4));
        else if (head <= 0xdb) wide = 1 << (head - 0xd9);
        else wide = head & 1 ? 4 : 2;
        if (!has(r, (size_t)wide)) return 0;
        const uint64_t length = wide ? read_big(r->at, wide) : 0;
        r->at += wide;
        if (head < 0xdc) bytes += length;
        else left += head < 0xde ? length : 2 * length;
        if (!has(r, bytes)) return 0;
        r->at += bytes;
    }
    return 1;
}

/* Skip an array of integers. 0: this is something else. */
static int skip_integers(struct reader *r) {
    int64_t count = read_array(r);
    for (; count > 0 && r->at < r->end; count--) {
        const uint8_t head = *r->at;
        const int integer = head < 0x80 || head >= 0xe0, wide = head >= 0xcc && head <= 0xd3;
        const size_t bytes = wide ? 1 + ((size_t)1 << (head & 3)) : 1;
        if (!(integer || wide) || !has(r, bytes)) return 0;
        r->at += bytes;
    }
    return count == 0;
}

/* Find the value of "token_ids" in each event of a batch, [time, [event, ...], ...]: its start and
 * its end, 0 and 0 if there is none. `at` has room for twice `room` numbers. Returns the number of
 * events, or -1 if this is no such batch, or a value is not an array of integers. */
EXPORT int64_t kv_find_tokens(const uint8_t *raw, int64_t bytes, uint64_t *at, int64_t room) {
    static const uint8_t NAME[] = "\xa9token_ids";
    const size_t name = sizeof NAME - 1;
    struct reader r = {raw, raw + bytes};
    if (read_array(&r) < 2 || !skip_value(&r)) return -1;
    const int64_t events = read_array(&r);
    if (events < 0 || events > room) return -1;
    for (int64_t i = 0; i < events; i++) {
        if (!has(&r, 1)) return -1;
        const uint8_t head = *r.at++;
        const int wide = head == 0xde ? 2 : head == 0xdf ? 4 : 0;
        if (((head & 0xf0) != 0x80 && !wide) || !has(&r, (size_t)wide)) return -1;
        uint64_t fields = wide ? read_big(r.at, wide) : head & 0x0f;
        r.at += wide;
        at[2 * i] = at[2 * i + 1] = 0;
        for (; fields; fields--) {
            const int is_tokens = has(&r, name) && memcmp(r.at, NAME, name) == 0;
            if (!skip_value(&r)) return -1;
            const uint64_t start = (uint64_t)(r.at - raw);
            if (!is_tokens ? !skip_value(&r) : at[2 * i + 1] || !skip_integers(&r)) return -1;
            if (is_tokens) at[2 * i] = start, at[2 * i + 1] = (uint64_t)(r.at - raw);
        }
    }
    return events;
}

/* ---- Chains ------------------------------------------------------------------------------------ */

/* Chain values of the full blocks of `ids`: each is the hash of its block, seeded with the one
 * before. Returns how many, at most `room`. */
EXPORT int64_t kv_chain(const uint32_t *ids, int64_t count, int64_t block_tokens, uint64_t start,
                        uint64_t *chains, int64_t room) {
    if (block_tokens < 1 || count < 0 || room < 0) return 0;
    const int64_t blocks = count / block_tokens < room ? count / block_tokens : room;
    for (int64_t i = 0; i < blocks; i++) {
        const uint8_t *block = (const uint8_t *)(ids + i * block_tokens);
        chains[i] = start = not_zero(hash64(block, 4 * (size_t)block_tokens, start));
    }
    return blocks;
}

/* Decode an array of at most `room` token ids, each less than 2**32, as little-endian uint32. */
EXPORT int64_t kv_read_ids(const uint8_t *raw, int64_t bytes, uint32_t *ids, int64_t room) {
    struct reader r = {raw, raw + bytes};
    const int64_t count = read_array(&r);
    if (count < 0 || count > room) return -1;
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *item = r.at;
        uint64_t value;
        int negative;
        if (has(&r, 1 + sizeof value) && *item >= 0xcc && *item <= 0xce) {
            /* Without a branch for each of the usual widths: nobody could predict it. */
            const int wide = 1 << (*item & 3);
            ids[i] = (uint32_t)(__builtin_bswap64(read64(item + 1)) >> (64 - 8 * wide));
            r.at += 1 + wide;
            continue;
        }
        if (!read_integer(&r, &value, &negative) || negative || value > UINT32_MAX)
            return -1 - (item - raw);
        ids[i] = (uint32_t)value;
    }
    return r.at == r.end ? count : -1 - (r.at - raw);
}

/* kv_read_ids and kv_chain in one call; returns the number of ids. */
EXPORT int64_t kv_chain_raw(const uint8_t *raw, int64_t bytes, uint32_t *ids, int64_t ids_room,
                            int64_t block_tokens, uint64_t start, uint64_t *chains, int64_t room) {
    const int64_t count = kv_read_ids(raw, bytes, ids, ids_room);
    if (count > 0) kv_chain(ids, count, block_tokens, start, chains, room);
    return count;
}

/* Chain values of an array of at most `room` prefix keys: the first 8 bytes of each as a
 * little-endian integer, xor `scope`. With `integers`, an integer stands for those bytes,
 * big-endian. */
EXPORT int64_t kv_keys_raw(const uint8_t *raw, int64_t bytes, uint64_t scope, int32_t integers,
                           uint64_t *chains, int64_t room) {
    struct reader r = {raw, raw + bytes};
    const int64_t count = read_array(&r);
    if (count < 0 || count > room) return -1;
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *item = r.at, *key;
        size_t length;
        uint64_t value;
        int negative;
        if ((key = read_string(&r, KEY_BYTES, &length)) && length == KEY_BYTES)
            value = read64(key);
        else if (!key && integers && read_integer(&r, &value, &negative))
            value = __builtin_bswap64(value);
        else
            return -1 - (item - raw);
        chains[i] = not_zero(value ^ scope);
    }
    return r.at == r.end ? count : -1 - (r.at - raw);
}

/* Names of an array of at most `room` block hashes: integers modulo 2**64, mixed with `secret` by a
 * bijection, and byte strings of at most 64 bytes, hashed with it. */
EXPORT int64_t kv_names_raw(const uint8_t *raw, int64_t bytes, uint64_t secret, uint64_t *names,
                            int64_t room) {
    struct reader r = {raw, raw + bytes};
    const int64_t count = read_array(&r);
    if (count < 0 || count > room) return -1;
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *item = r.at, *string;
        size_t length;
        uint64_t value;
        int negative;
        if (read_integer(&r, &value, &negative))
            value = avalanche(value ^ secret);
        else if ((string = read_string(&r, 64, &length)))
            value = hash64(string, length, secret);
        else
            return -1 - (item - raw);
        names[i] = not_zero(value);
    }
    return r.at == r.end ? count : -1 - (r.at - raw);
}

/* ---- The blocks of an engine ------------------------------------------------------------------- */

/* A hash table with linear probing: name → chain value, and a bit for each holder. There is always
 * an empty slot. The arrays belong to Python (kvstore/index/blockmap.py), which also makes room. */
struct blocks {
    uint64_t *names, *chains; /* name 0: an empty slot */
    uint8_t *masks;           /* `width` bytes each: 1, 2, 4 or 8 */
    int64_t slots, used, width;
};

INLINE int64_t home(const struct blocks *b, uint64_t name) {
    return (int64_t)((unsigned __int128)name * (uint64_t)b->slots >> 64);
}

/* The slot of a name, or the empty one where it belongs. */
INLINE int64_t seek(const struct blocks *b, uint64_t name) {
    int64_t at = home(b, name);
    while (b->names[at] && b->names[at] != name) at = at + 1 < b->slots ? at + 1 : 0;
    return at;
}

INLINE void fetch_ahead(const struct blocks *b, const uint64_t *names, int64_t i, int64_t count) {
    if (i + AHEAD < count) __builtin_prefetch(b->names + home(b, names[i + AHEAD]), 0, 1);
}

INLINE uint64_t get_mask(const struct blocks *b, int64_t at) {
    uint64_t mask = 0;
    memcpy(&mask, b->masks + at * b->width, (size_t)b->width);
    return mask;
}

INLINE void set_mask(struct blocks *b, int64_t at, uint64_t mask) {
    memcpy(b->masks + at * b->width, &mask, (size_t)b->width);
}

INLINE void put(struct blocks *b, int64_t at, uint64_t name, uint64_t chain, uint64_t mask) {
    b->names[at] = name, b->chains[at] = chain;
    set_mask(b, at, mask);
}

/* Empty a slot; those after it that would not be found any more move up. */
static void empty_slot(struct blocks *b, int64_t hole) {
    for (int64_t at = hole;;) {
        at = at + 1 < b->slots ? at + 1 : 0;
        if (!b->names[at]) break;
        int64_t from_home = at - home(b, b->names[at]), from_hole = at - hole;
        from_home += from_home < 0 ? b->slots : 0, from_hole += from_hole < 0 ? b->slots : 0;
        if (from_home < from_hole) continue;
        put(b, hole, b->names[at], b->chains[at], get_mask(b, at));
        hole = at;
    }
    put(b, hole, 0, 0, 0);
    b->used--;
}

/* Chain value and holders of each name; 0 and 0 if it is unknown. Returns how many are known. */
EXPORT int64_t kv_blocks_find(const struct blocks *b, const uint64_t *names, int64_t count,
                              uint64_t *chains, uint64_t *masks) {
    int64_t known = 0;
    for (int64_t i = 0; i < count; i++) {
        fetch_ahead(b, names, i, count);
        const int64_t at = seek(b, names[i]);
        chains[i] = b->chains[at], masks[i] = get_mask(b, at);
        known += b->names[at] != 0;
    }
    return known;
}

/* Add a holder to blocks, which need as many empty slots. Returns the number of those that are
 * known with another chain value; they are left as they are. */
EXPORT int64_t kv_blocks_store(struct blocks *b, const uint64_t *names, const uint64_t *chains,
                               int64_t count, int64_t bit) {
    int64_t conflicts = 0;
    for (int64_t i = 0; i < count; i++) {
        fetch_ahead(b, names, i, count);
        const int64_t at = seek(b, names[i]);
        if (!b->names[at]) {
            put(b, at, names[i], chains[i], (uint64_t)1 << bit);
            b->used++;
        } else if (b->chains[at] == chains[i])
            set_mask(b, at, get_mask(b, at) | (uint64_t)1 << bit);
        else
            conflicts++;
    }
    return conflicts;
}

/* Remove a holder from blocks; a block without holders is forgotten. Writes the chain values of
 * those that had it and returns how many. */
EXPORT int64_t kv_blocks_remove(struct blocks *b, const uint64_t *names, int64_t count, int64_t bit,
                                uint64_t *chains) {
    int64_t removed = 0;
    for (int64_t i = 0; i < count; i++) {
        fetch_ahead(b, names, i, count);
        const int64_t at = seek(b, names[i]);
        const uint64_t mask = get_mask(b, at), rest = mask & ~((uint64_t)1 << bit);
        if (mask == rest) continue; /* also an empty slot */
        chains[removed++] = b->chains[at];
        if (rest)
            set_mask(b, at, rest);
        else
            empty_slot(b, at);
    }
    return removed;
}

/* Copy all blocks into an empty table with more slots; its masks may be wider. */
EXPORT void kv_blocks_copy(const struct blocks *from, struct blocks *to) {
    for (int64_t i = 0; i < from->slots; i++)
        if (from->names[i])
            put(to, seek(to, from->names[i]), from->names[i], from->chains[i], get_mask(from, i));
    to->used = from->used;
}

/* The chain value of one block; 0 if it is unknown. */
EXPORT uint64_t kv_block_chain(const struct blocks *b, uint64_t name) {
    return b->chains[seek(b, name)];
}
