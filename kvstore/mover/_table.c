/* How the prefix index's table is read, called through ctypes without the GIL: the holders of a
 * prompt's blocks, and how far they make prefixes usable. docs/internals/index.md says what a reader
 * may assume; kvstore/index/table.py and runs.py do the same without this library.
 *
 * Another process writes the table meanwhile, and none of it is trusted: what it says is bounded
 * before it is used as a position. No call allocates memory or writes to the table.
 */
#include "_xxh3.h"

#define EXPORT __attribute__((visibility("default")))

enum {
    LINE_SLOTS = 8,
    PAGE_LINES = 64,
    OVERRUN_LINES = 8, /* lines at the end of a segment that are no entry's first */
    ROW_WORDS = 16,
    SET_BITS = 24,
    TAG_BITS = 40,
    AHEAD = 32, /* lines that are on their way to the cache at once */
};

/* As in kvstore/mover/lookup.py. */
struct index_table {
    const uint64_t *states, *rows, *slots;
    int64_t region_lines, sets;
    uint64_t factor;
    int64_t segment_shift, tag_shift;
};

struct place {
    const uint64_t *state;
    uint64_t seen, tag;
    int64_t line, last; /* the first line to probe, and the segment's last; last < 0: nonsense */
};

INLINE uint64_t load(const uint64_t *at) {
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

INLINE void locate(const struct index_table *t, struct place *p) {
    p->seen = load(p->state);
    const int64_t lines = (int64_t)(p->seen & 0x7fffffff) * PAGE_LINES;
    const int64_t half = p->seen >> 31 & 1, segment = p->state - t->states;
    if (lines < PAGE_LINES || lines > t->region_lines) {
        p->last = -1;
        return;
    }
    const int64_t start = (2 * segment + half) * t->region_lines;
    p->line = start + (int64_t)(p->tag * (uint64_t)(lines - OVERRUN_LINES) >> TAG_BITS);
    p->last = start + lines - 1;
}

/* The number of an entry's set; 0: it is absent. */
INLINE uint64_t probe(const struct index_table *t, const struct place *p) {
    for (int64_t line = p->line; line <= p->last; line++) {
        const uint64_t *slots = t->slots + line * LINE_SLOTS;
        for (int lane = 0; lane < LINE_SLOTS; lane++) {
            const uint64_t word = load(slots + lane);
            if (word >> SET_BITS == p->tag) return word & (((uint64_t)1 << SET_BITS) - 1);
            if (!word) return 0;
        }
    }
    return 0;
}

/* Find the sets of `count` chains; 0 for those that are absent, or whose segment has moved at each
 * of `tries` looks. Returns how many of the latter there are. */
static int64_t find_sets(const struct index_table *t, const uint64_t *chains, int64_t count,
                         int64_t tries, uint32_t *sets) {
    struct place places[AHEAD];
    int64_t undecided = 0;
    for (int64_t from = 0; from < count; from += AHEAD) {
        const int64_t some = count - from < AHEAD ? count - from : AHEAD;
        for (int64_t i = 0; i < some; i++) {
            const uint64_t mixed = chains[from + i] * t->factor;
            const uint64_t tag = mixed >> t->tag_shift & (((uint64_t)1 << TAG_BITS) - 1);
            places[i].state = t->states + (mixed >> 1 >> t->segment_shift);
            places[i].tag = tag ? tag : 1; /* no word with a tag is 0 */
            locate(t, &places[i]);
            if (places[i].last >= 0) __builtin_prefetch(t->slots + places[i].line * LINE_SLOTS);
        }
        for (int64_t i = 0; i < some; i++) {
            struct place *p = &places[i];
            int64_t left = tries;
            for (;;) {
                const uint64_t set = p->last < 0 ? 0 : probe(t, p);
                __atomic_thread_fence(__ATOMIC_ACQUIRE);
                if (p->last >= 0 && load(p->state) == p->seen) {
                    sets[from + i] = (uint32_t)set;
                    break;
                }
                if (left-- == 0) {
                    sets[from + i] = 0;
                    undecided++;
                    break;
                }
                locate(t, p);
            }
        }
    }
    return undecided;
}

/* Find the holders of a prompt's blocks, as runs of blocks with equal sets.
 *
 * sets: room for `count`, of no meaning afterwards. ends: the number of blocks up to the end of each
 * run, room for `count`. rows: ROW_WORDS words for each run, room for `count` runs. undecided: gets
 * the number of blocks that count as absent because their segments have moved again and again.
 *
 * Returns the number of runs. */
EXPORT int64_t kv_table_find(const struct index_table *t, const uint64_t *chains, int64_t count,
                             int64_t tries, uint32_t *sets, int64_t *ends, uint64_t *rows,
                             int64_t *undecided) {
    *undecided = find_sets(t, chains, count, tries, sets);
    int64_t runs = 0;
    for (int64_t i = 0; i < count; i++) {
        if (i + 1 < count && sets[i + 1] == sets[i]) continue;
        const int64_t set = sets[i] < t->sets ? sets[i] : t->sets - 1;
        const uint64_t *row = t->rows + set * ROW_WORDS;
        for (int word = 0; word < ROW_WORDS; word++) rows[runs * ROW_WORDS + word] = load(row + word);
        ends[runs++] = i + 1;
    }
    return runs;
}

/* What candidates need; as in kvstore/mover/lookup.py. Candidate c has the parts from parts[c] on, up
 * to parts[c + 1]; part p is there where one of its words from words[p] on, up to words[p + 1], has
 * a bit of its mask. A window is the number of blocks at the end of a prefix that a part needs; 0:
 * all. since: room for a word for each part. */
struct prefix_needs {
    int64_t candidates;
    const int64_t *parts, *words, *windows;
    const int32_t *at;
    const uint64_t *masks;
    int64_t *since;
};

INLINE int is_there(const struct prefix_needs *n, int64_t part, const uint64_t *row) {
    for (int64_t i = n->words[part]; i < n->words[part + 1]; i++)
        if (row[n->at[i]] & n->masks[i]) return 1;
    return 0;
}

/* Most candidates have one part, which one holder has. Returns the number of leading runs. */
INLINE int64_t one_holder(const struct prefix_needs *n, int64_t pair, const uint64_t *rows,
                          int64_t runs, uint8_t *there, int64_t *torn) {
    const uint64_t mask = n->masks[pair];
    const uint64_t *words = rows + n->at[pair];
    int64_t head = 0, every = 0;
    for (int64_t run = 0; run < runs; run++) {
        const uint8_t has = (words[run * ROW_WORDS] & mask) != 0;
        there[run] = has;
        every += has;
        head += has & (head == run);
    }
    *torn += every != head;
    return head;
}

/* For each candidate: the longest usable prefix, at the end of a run; how many leading blocks have
 * all its parts; and whether each run has them: a byte for each, those of a candidate together.
 *
 * Returns how many candidates have all parts in a run after one that has not. */
EXPORT int64_t kv_usable_prefixes(const struct prefix_needs *n, const uint64_t *rows,
                                  const int64_t *ends, int64_t runs, int64_t *usable,
                                  int64_t *leading, uint8_t *there) {
    int64_t torn = 0;
    for (int64_t c = 0; c < n->candidates; c++, there += runs) {
        const int64_t first = n->parts[c], last = n->parts[c + 1];
        if (last == first + 1 && !n->windows[first] && n->words[last] == n->words[first] + 1) {
            const int64_t head = one_holder(n, n->words[first], rows, runs, there, &torn);
            usable[c] = leading[c] = head ? ends[head - 1] : 0;
            continue;
        }
        int64_t longest = 0, head = 0;
        int later = 0;
        for (int64_t part = first; part < last; part++) n->since[part] = 0;
        for (int64_t run = 0; run < runs; run++) {
            int every = first < last, enough = every;
            for (int64_t part = first; part < last; part++) {
                if (!is_there(n, part, rows + run * ROW_WORDS)) {
                    n->since[part] = ends[run];
                    every = enough = 0;
                    continue;
                }
                const int64_t from = n->since[part], window = n->windows[part];
                if (from && !(window && ends[run] - from >= window)) enough = 0;
            }
            there[run] = (uint8_t)every;
            if (enough) longest = ends[run];
            if (every && head == run)
                head++;
            else if (every)
                later = 1;
        }
        usable[c] = longest, leading[c] = head ? ends[head - 1] : 0;
        torn += later;
    }
    return torn;
}
