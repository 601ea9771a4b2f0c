/* Short answers over a socket. Called through ctypes without the GIL.
 *
 * Waking a thread that sleeps takes longer than most answers of a node: so the thread looks for its
 * answer for a short time first.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <sys/socket.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    LOOKS = 4,   /* between two looks at the clock */
    PAUSES = 20, /* between two looks at the socket: a microsecond */
};

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Leave the core's other thread some room. */
static void relax(void) {
    for (int i = 0; i < PAUSES; i++) {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#else
        __asm__ volatile("");
#endif
    }
}

static int64_t received(int descriptor, void *memory, int64_t room, int flags) {
    const ssize_t bytes = recv(descriptor, memory, (size_t)room, flags);
    return bytes >= 0 ? (int64_t)bytes : errno ? -(int64_t)errno : -EIO;
}

/* Receive what is there, up to `room` bytes. Look for it for `look_ns`; then sleep, for as long as
 * the socket's own timeout says. Returns the bytes, 0 = the peer has closed the connection, or a
 * negative errno: -EAGAIN for the timeout, -EINTR when a signal came. `*slept`: it has slept. */
EXPORT int64_t kv_receive_answer(int32_t descriptor, uint8_t *memory, int64_t room,
                                 int64_t look_ns, int32_t *slept) {
    *slept = 0;
    if (room <= 0) return -EINVAL;
    if (look_ns > 0) {
        const int64_t until_ns = now_ns() + look_ns;
        do {
            for (int i = 0; i < LOOKS; i++) {
                const int64_t bytes = received(descriptor, memory, room, MSG_DONTWAIT);
                if (bytes != -EAGAIN && bytes != -EWOULDBLOCK) return bytes;
                relax();
            }
        } while (now_ns() < until_ns);
    }
    *slept = 1;
    return received(descriptor, memory, room, 0);
}
