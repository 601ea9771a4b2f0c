/* Ranges of memory and a connection: what is sent and received is scattered over an engine's pool,
 * and each range has a digest. Called through ctypes without the GIL.
 *
 * `places` are the addresses of all ranges, then their lengths, which may be 0. A call returns 0
 * if it does not say otherwise, or a negative errno: -EINVAL for arguments that cannot be, before anything is done, -ETIMEDOUT
 * when a deadline has passed, -EPIPE when the peer has closed the connection. The socket may be
 * blocking: only poll waits, for no longer than the deadline says.
 */
#define _GNU_SOURCE
#include "_pages.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

enum {
    DIGEST_BYTES = 16,
    BUFFERS = 64,          /* of one system call */
    CALL_BYTES = 256 << 10, /* received by one: what is digested next is still in the cache */
};
static const int64_t RANGES_MAX = 1 << 20;

struct places {
    const uint64_t *address, *length;
    int64_t at, count;
    uint64_t used; /* bytes of range `at` */
};

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Look at `places`; 0 = they cannot be. */
static int open_places(struct places *p, const uint64_t *places, int64_t count) {
    if (count < 0 || count > RANGES_MAX || (count && !places)) return 0;
    *p = (struct places){places, places + count, 0, count, 0};
    for (int64_t i = 0; i < count; i++) {
        if (p->length[i] && !p->address[i]) return 0;
        if (p->address[i] + p->length[i] < p->address[i]) return 0;
    }
    return 1;
}

/* The buffers of the next system call: no more than `most` bytes. Returns their number. */
static size_t fill(struct iovec *buffers, const struct places *p, uint64_t most) {
    size_t found = 0;
    uint64_t used = p->used;
    for (int64_t i = p->at; i < p->count && found < BUFFERS && most; i++, used = 0) {
        const uint64_t bytes = least(p->length[i] - used, most);
        if (!bytes) continue;
        buffers[found++] = (struct iovec){(void *)(uintptr_t)(p->address[i] + used), bytes};
        most -= bytes;
    }
    return found;
}

/* So many bytes have been sent. */
static void skip(struct places *p, uint64_t bytes) {
    while (p->at < p->count) {
        const uint64_t now = least(bytes, p->length[p->at] - p->used);
        p->used += now, bytes -= now;
        if (p->used < p->length[p->at]) return;
        p->at++, p->used = 0;
    }
}

/* After a system call that has failed: wait until it may be tried again. 0, or a negative errno. */
static int64_t wait_again(int descriptor, short events, int64_t until_ns) {
    if (errno == EINTR) return 0;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return errno ? -(int64_t)errno : -EIO;
    const int64_t left_ns = until_ns - now_ns();
    if (left_ns <= 0) return -ETIMEDOUT;
    const int64_t left_ms = (left_ns + 999999) / 1000000;
    struct pollfd asked = {descriptor, events, 0};
    const int found = poll(&asked, 1, left_ms < INT_MAX ? (int)left_ms : INT_MAX);
    return found >= 0 || errno == EINTR ? 0 : -(int64_t)errno;
}

/* The seeds of ranges: M(M(of_room ^ (plane << 32 | first)) ^ size), where M is the last step of
 * SplitMix64 (https://prng.di.unimi.it/splitmix64.c). A range is three numbers. */
INLINE uint64_t mixed(uint64_t word) {
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
    word = (word ^ word >> 27) * 0x94d049bb133111eb;
    return word ^ word >> 31;
}

EXPORT void kv_range_seeds(uint64_t of_room, int64_t count, const uint32_t *ranges,
                           uint64_t *seeds) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t *r = ranges + 3 * i;
        seeds[i] = mixed(mixed(of_room ^ ((uint64_t)r[0] << 32 | r[1])) ^ r[2]);
    }
}

/* What the digest of a range is computed with. */
static void begin(struct job *job, struct page *page, const struct places *p, uint64_t seed) {
    job->page_bytes = p->length[p->at];
    job->source = (struct cursor){p->address, p->length, 1, p->at, p->count, 0};
    start_page(job, page, seed);
}

/* Digest `bytes` more; the digest of each range is written when its last byte has come. Ranges
 * without bytes have zeros. */
static void take(struct job *job, struct page *page, struct places *p, uint64_t bytes,
                 const uint64_t *seed, uint8_t *digest) {
    for (;;) {
        const uint64_t count = p->at < p->count ? least(bytes, p->length[p->at] - p->used) : 0;
        if (count) {
            if (!p->used) begin(job, page, p, seed[p->at]);
            run(job, page, count);
            p->used += count, bytes -= count;
        }
        if (p->at == p->count || p->used < p->length[p->at]) return;
        uint8_t *out = digest + DIGEST_BYTES * p->at;
        if (p->used) write_found(job, page, seed[p->at], out);
        else memset(out, 0, DIGEST_BYTES);
        p->at++, p->used = 0;
    }
}

static struct job digesting(int32_t isa) {
    const struct cursor none = {0};
    return (struct job){&ISAS[isa], 0, 0, NULL, none, none, none};
}

extern int32_t kv_best_isa(void);

/* Digest ranges where they are: 16 bytes each. */
EXPORT int64_t kv_digest_ranges(int32_t isa, int64_t count, const uint64_t *places,
                                const uint64_t *seed, uint8_t *digest) {
    struct places p;
    struct page page;
    if (isa < 0 || isa > kv_best_isa() || !open_places(&p, places, count)) return -EINVAL;
    if (count && (!seed || !digest)) return -EINVAL;
    struct job job = digesting(isa);
    job.ahead = (struct cursor){p.address, p.length, 1, 0, count, 0};
    advance(&job.ahead, AHEAD);
    while (p.at < count) take(&job, &page, &p, p.length[p.at], seed, digest);
    return 0;
}

/* Fill ranges from a connection, and digest each as its bytes arrive, or none if `seed` is NULL.
 * CALL_BYTES have to come within `silence_ns`. */
EXPORT int64_t kv_receive_ranges(int32_t descriptor, int32_t isa, int64_t count,
                                 const uint64_t *places, const uint64_t *seed, uint8_t *digest,
                                 int64_t silence_ns) {
    struct places p;
    struct page page;
    struct iovec buffers[BUFFERS];
    if (isa < 0 || isa > kv_best_isa() || !open_places(&p, places, count)) return -EINVAL;
    if (!seed != !digest) return -EINVAL;
    struct job job = digesting(isa);
    int64_t until_ns = now_ns() + silence_ns, fresh = 0;
    for (uint64_t found_bytes = 0;;) {
        if (seed) take(&job, &page, &p, found_bytes, seed, digest);
        else skip(&p, found_bytes);
        if (p.at == count) return 0;
        struct msghdr message = {.msg_iov = buffers};
        message.msg_iovlen = fill(buffers, &p, CALL_BYTES);
        const ssize_t found = recvmsg(descriptor, &message, MSG_DONTWAIT);
        if (!found) return -EPIPE;
        found_bytes = found < 0 ? 0 : (uint64_t)found;
        if (found < 0) {
            const int64_t error = wait_again(descriptor, POLLIN, until_ns);
            if (error) return error;
            continue;
        }
        if ((fresh += found) >= CALL_BYTES) fresh = 0, until_ns = now_ns() + silence_ns;
    }
}

/* Receive a frame: its length in 4 bytes, little-endian, and that plus `tail` bytes into `out`, if
 * no more than `room`. Returns how many bytes follow the length; more than `room` = none of them
 * was read. Length and rest have to come within `silence_ns` each. */
EXPORT int64_t kv_receive_frame(int32_t descriptor, uint8_t *out, int64_t room, uint32_t tail,
                                int64_t silence_ns) {
    uint32_t length = 0;
    uint64_t places[] = {(uintptr_t)&length, sizeof length};
    int64_t error = kv_receive_ranges(descriptor, 0, 1, places, NULL, NULL, silence_ns);
    const int64_t bytes = (int64_t)length + tail;
    if (error || bytes > room) return error ? error : bytes;
    places[0] = (uintptr_t)out, places[1] = (uint64_t)bytes;
    error = kv_receive_ranges(descriptor, 0, 1, places, NULL, NULL, silence_ns);
    return error ? error : bytes;
}

/* Send `head`, then ranges, all within `limit_ns`. */
EXPORT int64_t kv_send_ranges(int32_t descriptor, const uint8_t *head, uint64_t head_bytes,
                              int64_t count, const uint64_t *places, int64_t limit_ns) {
    struct places p;
    struct iovec buffers[1 + BUFFERS];
    if (!open_places(&p, places, count) || !head) return -EINVAL;
    const int64_t until_ns = now_ns() + limit_ns;
    for (;;) {
        struct msghdr message = {.msg_iov = buffers + !head_bytes};
        buffers[0] = (struct iovec){(void *)(uintptr_t)head, head_bytes};
        message.msg_iovlen = fill(buffers + 1, &p, UINT64_MAX) + !!head_bytes;
        if (!message.msg_iovlen) return 0;
        const ssize_t sent = sendmsg(descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) {
            const int64_t error = wait_again(descriptor, POLLOUT, until_ns);
            if (error) return error;
            continue;
        }
        const uint64_t of_head = least((uint64_t)sent, head_bytes);
        head += of_head, head_bytes -= of_head;
        skip(&p, (uint64_t)sent - of_head);
    }
}
