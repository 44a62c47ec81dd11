// Faults at file operations: at the n-th operation below a directory the process is killed, or the disk is full from then
// on.
//
// Loaded with LD_PRELOAD, so that the writes of C++ and Rust code count too. An operation is one that changes a file or
// a directory entry: a read is none, nor is the removal of what does not exist. A write at which the fault happens is
// torn: half of its bytes are written first. Paths with .. are not resolved. The rename with which safetensors ends a
// file is a system call of its own and is not seen; a kill before the next operation comes after it.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static char directory[PATH_MAX]; // with a slash at its end
static char fault;               // 'k': kill, 'f': full disk, '-': count only
static long first, count;        // the fault happens at operation `first`, counted from 1
static int log_file;
static pid_t process; // children are left alone

// Starts to count. Every operation is appended to `log` as "number name path", before it happens.
void start_counting(const char *below, char kind, long at, const char *log) {
    snprintf(directory, sizeof directory, "%s/", below);
    log_file = REAL(open)(log, O_CREAT | O_WRONLY | O_APPEND | O_TRUNC, 0644);
    fault = kind, first = at, count = 0, process = getpid();
}

// The absolute form of a path relative to an open directory (or AT_FDCWD); of the descriptor itself if `path` is empty.
static void resolve(int at, const char *path, char *absolute) {
    char link[64], base[PATH_MAX];
    snprintf(link, sizeof link, at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", at);
    ssize_t length = *path == '/' ? 0 : readlink(link, base, sizeof base - 1);
    base[length > 0 ? length : 0] = 0;
    snprintf(absolute, PATH_MAX, *path && *path != '/' ? "%s/%s" : "%s%s", base, path);
}

static int exists(int at, const char *path) {
    struct stat status;
    return fstatat(at, path, &status, AT_SYMLINK_NOFOLLOW) == 0;
}

enum moment { BEFORE, NOW, AFTER };

// Counts an operation, and says where it lies relative to the fault.
static enum moment reach(const char *name, int at, const char *path) {
    char absolute[PATH_MAX], line[PATH_MAX + 64];
    if (getpid() != process)
        return BEFORE;
    int before = errno;
    resolve(at, path, absolute);
    if (strncmp(absolute, directory, strlen(directory)))
        return errno = before, BEFORE;
    long number = __sync_add_and_fetch(&count, 1);
    int length = snprintf(line, sizeof line, "%ld %s %s\n", number, name, absolute + strlen(directory));
    (void)!REAL(write)(log_file, line, length);
    errno = before;
    return fault == '-' || number < first ? BEFORE : number == first ? NOW : AFTER;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

// Whether an operation that writes no bytes has to fail with ENOSPC. At the fault itself the process may end here.
static int fails(const char *name, int at, const char *path, int needs_space) {
    enum moment moment = reach(name, at, path);
    if (moment == NOW && fault == 'k')
        die();
    if (moment == BEFORE || !needs_space)
        return 0;
    errno = ENOSPC;
    return 1;
}

// Returns what `whole` writes, or at the fault what `half` writes, or nothing after it.
#define WRITE(fd, whole, half)                                                                                         \
    enum moment moment = reach("write", fd, "");                                                                       \
    if (moment == BEFORE)                                                                                              \
        return whole;                                                                                                  \
    ssize_t written = moment == NOW ? half : 0;                                                                        \
    if (fault == 'k')                                                                                                  \
        die();                                                                                                         \
    if (written > 0)                                                                                                   \
        return written;                                                                                                \
    errno = ENOSPC;                                                                                                    \
    return -1;

ssize_t write(int fd, const void *bytes, size_t size) {
    WRITE(fd, REAL(write)(fd, bytes, size), REAL(write)(fd, bytes, size / 2))
}

ssize_t writev(int fd, const struct iovec *parts, int number) {
    WRITE(fd, REAL(writev)(fd, parts, number), REAL(write)(fd, parts[0].iov_base, parts[0].iov_len / 2))
}

ssize_t pwrite(int fd, const void *bytes, size_t size, off_t offset) {
    WRITE(fd, REAL(pwrite)(fd, bytes, size, offset), REAL(pwrite)(fd, bytes, size / 2, offset))
}

ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t offset) { return pwrite(fd, bytes, size, offset); }

ssize_t sendfile(int out, int in, off_t *offset, size_t size) {
    WRITE(out, REAL(sendfile)(out, in, offset, size), REAL(sendfile)(out, in, offset, size / 2))
}

ssize_t sendfile64(int out, int in, off64_t *offset, size_t size) { return sendfile(out, in, offset, size); }

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
    WRITE(out, REAL(copy_file_range)(in, from, out, to, size, flags),
          REAL(copy_file_range)(in, from, out, to, size / 2, flags))
}

// Opening for reading is no operation. On a full disk an existing file is still opened, and truncated if asked.
static int open_fails(int at, const char *path, int flags) {
    int changes = (flags & O_TRUNC) || ((flags & O_CREAT) && !exists(at, path));
    return changes && fails("open", at, path, !exists(at, path));
}

#define MODE                                                                                                           \
    mode_t mode = 0;                                                                                                   \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                                               \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode = va_arg(rest, mode_t);                                                                                   \
        va_end(rest);                                                                                                  \
    }

int open(const char *path, int flags, ...) {
    MODE
    return open_fails(AT_FDCWD, path, flags) ? -1 : REAL(open)(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    MODE
    return open_fails(AT_FDCWD, path, flags) ? -1 : REAL(open64)(path, flags, mode);
}

int openat(int at, const char *path, int flags, ...) {
    MODE
    return open_fails(at, path, flags) ? -1 : REAL(openat)(at, path, flags, mode);
}

int openat64(int at, const char *path, int flags, ...) {
    MODE
    return open_fails(at, path, flags) ? -1 : REAL(openat64)(at, path, flags, mode);
}

static int fopen_fails(const char *path, const char *mode) {
    int flags = strchr(mode, 'w') ? O_CREAT | O_TRUNC : strchr(mode, 'a') ? O_CREAT : 0;
    return open_fails(AT_FDCWD, path, flags);
}

FILE *fopen(const char *path, const char *mode) { return fopen_fails(path, mode) ? NULL : REAL(fopen)(path, mode); }

FILE *fopen64(const char *path, const char *mode) { return fopen_fails(path, mode) ? NULL : REAL(fopen64)(path, mode); }

int rename(const char *from, const char *to) {
    return exists(AT_FDCWD, from) && fails("rename", AT_FDCWD, to, 0) ? -1 : REAL(rename)(from, to);
}

int renameat(int at, const char *from, int at_new, const char *to) {
    return exists(at, from) && fails("rename", at_new, to, 0) ? -1 : REAL(renameat)(at, from, at_new, to);
}

int unlink(const char *path) {
    return exists(AT_FDCWD, path) && fails("unlink", AT_FDCWD, path, 0) ? -1 : REAL(unlink)(path);
}

int unlinkat(int at, const char *path, int flags) {
    const char *name = flags & AT_REMOVEDIR ? "rmdir" : "unlink";
    return exists(at, path) && fails(name, at, path, 0) ? -1 : REAL(unlinkat)(at, path, flags);
}

int rmdir(const char *path) {
    return exists(AT_FDCWD, path) && fails("rmdir", AT_FDCWD, path, 0) ? -1 : REAL(rmdir)(path);
}

int mkdir(const char *path, mode_t mode) {
    return !exists(AT_FDCWD, path) && fails("mkdir", AT_FDCWD, path, 1) ? -1 : REAL(mkdir)(path, mode);
}

int mkdirat(int at, const char *path, mode_t mode) {
    return !exists(at, path) && fails("mkdir", at, path, 1) ? -1 : REAL(mkdirat)(at, path, mode);
}

int ftruncate(int fd, off_t size) { return fails("truncate", fd, "", 0) ? -1 : REAL(ftruncate)(fd, size); }

int ftruncate64(int fd, off64_t size) { return fails("truncate", fd, "", 0) ? -1 : REAL(ftruncate64)(fd, size); }

int posix_fallocate(int fd, off_t offset, off_t size) {
    return fails("allocate", fd, "", 1) ? ENOSPC : REAL(posix_fallocate)(fd, offset, size);
}

int fallocate(int fd, int mode, off_t offset, off_t size) {
    return fails("allocate", fd, "", 1) ? -1 : REAL(fallocate)(fd, mode, offset, size);
}
