/* podlaunch: starts one pod and stays as its shim (DESIGN decision 11).
 *
 * The shim makes the pod's cgroups, clones PID 1 into new namespaces, waits for it and takes the cgroups away again, so
 * nothing is left even when the host process that asked for the pod is killed. PID 1 sees an overlay of the image (lower)
 * and a tmpfs (upper), /proc, six device nodes and a loopback interface; it holds no capability and never uid 0.
 * It knows nothing of the protocol: stdin and stdout go to PID 1 as they are. Errors are one line on stderr, status 125.
 *
 * Usage: podlaunch key=value... -- /path/in/image argument...   (keys: see `option` below; `environments/launcher.py` writes them)
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_LIST 32
#define FIRST_POD_UID 0x40000000u /* every pod has a uid of its own: 2^30 + the shim's pid */

static const char *state_dir, *image, *hostname_ = "pod", *workdir = "/repo", *seccomp_file, *cgroup_dirs[MAX_LIST], *cgroup_sets[MAX_LIST];
static int n_cgroup_dirs, n_cgroup_sets, user_namespace;
static long long disk_bytes = 64 << 20, inodes = 16384, cpu_seconds, open_files = 1024, address_space, processes;
static char **pod_argv;
static unsigned pod_uid;
static int cgroups_are_ours; /* only the shim takes them away, never PID 1 */

static void remove_cgroups(void);

static void fail(const char *format, ...) {
    int code = errno;
    va_list arguments;
    va_start(arguments, format);
    dprintf(2, "podlaunch: ");
    vdprintf(2, format, arguments);
    dprintf(2, code ? ": %s\n" : "\n", strerror(code));
    va_end(arguments);
    if (cgroups_are_ours) remove_cgroups();
    _exit(125);
}

#define CHECK(call, ...) do { errno = 0; if ((call) < 0) fail(__VA_ARGS__); } while (0)

static void option(char *text) {
    char *value = strchr(text, '=');
    errno = 0;
    if (!value) fail("option %s has no value", text);
    *value++ = 0;
    if (!strcmp(text, "state")) state_dir = value;              /* cwd: holds images/ and the empty directory mnt/ */
    else if (!strcmp(text, "image")) image = value;             /* path of the lower layer relative to state */
    else if (!strcmp(text, "hostname")) hostname_ = value;
    else if (!strcmp(text, "workdir")) workdir = value;
    else if (!strcmp(text, "seccomp")) seccomp_file = value;    /* file of struct sock_filter */
    else if (!strcmp(text, "userns")) user_namespace = atoi(value);
    else if (!strcmp(text, "disk")) disk_bytes = atoll(value);
    else if (!strcmp(text, "inodes")) inodes = atoll(value);
    else if (!strcmp(text, "cpu")) cpu_seconds = atoll(value);
    else if (!strcmp(text, "files")) open_files = atoll(value);
    else if (!strcmp(text, "space")) address_space = atoll(value);
    else if (!strcmp(text, "processes")) processes = atoll(value);
    else if (!strcmp(text, "cgroup") && n_cgroup_dirs < MAX_LIST) cgroup_dirs[n_cgroup_dirs++] = value;
    else if (!strcmp(text, "set") && n_cgroup_sets < MAX_LIST) cgroup_sets[n_cgroup_sets++] = value; /* file:value */
    else fail("unknown option %s", text);
}

static int write_text(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t n = write(fd, text, strlen(text));
    int code = errno;
    close(fd);
    errno = code;
    return n < 0 ? -1 : 0;
}

static void remove_cgroups(void) {
    for (int i = n_cgroup_dirs - 1; i >= 0; i--)
        for (int tries = 0; rmdir(cgroup_dirs[i]) < 0 && errno == EBUSY && tries < 500; tries++) {
            struct timespec pause = {0, 1000000};
            nanosleep(&pause, NULL);
        }
}

static void make_cgroups(void) {
    int wanted = n_cgroup_dirs;
    cgroups_are_ours = 1;
    for (n_cgroup_dirs = 0; n_cgroup_dirs < wanted; n_cgroup_dirs++)
        CHECK(mkdir(cgroup_dirs[n_cgroup_dirs], 0755), "mkdir %s", cgroup_dirs[n_cgroup_dirs]);
    for (int i = 0; i < n_cgroup_sets; i++) {
        char *value = strrchr(cgroup_sets[i], ':');
        errno = 0;
        if (!value) fail("set %s has no value", cgroup_sets[i]);
        *value++ = 0;
        CHECK(write_text(cgroup_sets[i], value), "write %s to %s", value, cgroup_sets[i]);
    }
}

static void enter_cgroups(void) {
    char path[4096];
    for (int i = 0; i < n_cgroup_dirs; i++) {
        snprintf(path, sizeof path, "%s/cgroup.procs", cgroup_dirs[i]);
        CHECK(write_text(path, "0"), "join %s", path);
    }
}

static void device(const char *name, unsigned minor_number) {
    char path[64], source[64];
    snprintf(path, sizeof path, "mnt/upper/dev/%s", name);
    snprintf(source, sizeof source, "/dev/%s", name);
    if (!user_namespace) {
        CHECK(mknod(path, S_IFCHR | 0666, makedev(name[0] == 't' ? 5 : 1, minor_number)), "mknod %s", path);
        CHECK(chmod(path, 0666), "chmod %s", path);
        return;
    }
    int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0644);
    CHECK(fd, "create %s", path);
    close(fd);
    snprintf(path, sizeof path, "mnt/root/dev/%s", name);
    CHECK(mount(source, path, NULL, MS_BIND, NULL), "bind %s", source);
}

static void owned_directory(const char *path, mode_t mode) {
    if (mkdir(path, mode) < 0 && errno != EEXIST) fail("mkdir %s", path);
    CHECK(chmod(path, mode), "chmod %s", path);
    CHECK(chown(path, pod_uid, pod_uid), "chown %s", path);
}

static void make_root(void) {
    char options[4096], path[4096];
    CHECK(chdir(state_dir), "chdir %s", state_dir);
    CHECK(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "make mounts private");
    snprintf(options, sizeof options, "size=%lld,nr_inodes=%lld,mode=0755", disk_bytes, inodes);
    CHECK(mount("tmpfs", "mnt", "tmpfs", MS_NOSUID, options), "mount tmpfs");
    CHECK(mkdir("mnt/upper", 0755), "mkdir upper");
    CHECK(mkdir("mnt/work", 0755), "mkdir work");
    CHECK(mkdir("mnt/root", 0755), "mkdir root");
    CHECK(mkdir("mnt/upper/dev", 0755), "mkdir dev");
    owned_directory("mnt/upper/tmp", 01777);
    owned_directory("mnt/upper/home", 0755);
    owned_directory("mnt/upper/dev/shm", 01777);
    snprintf(path, sizeof path, "mnt/upper%s", workdir);
    for (char *slash = strchr(path + 10, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        if (mkdir(path, 0755) < 0 && errno != EEXIST) fail("mkdir %s", path);
        *slash = '/';
    }
    owned_directory(path, 0755);
    static const struct { const char *name; unsigned minor_number; } devices[] = {{"null", 3}, {"zero", 5}, {"full", 7}, {"random", 8}, {"urandom", 9}, {"tty", 0}};
    if (!user_namespace) for (unsigned i = 0; i < 6; i++) device(devices[i].name, devices[i].minor_number);
    snprintf(options, sizeof options, "lowerdir=%s,upperdir=mnt/upper,workdir=mnt/work%s", image, user_namespace ? ",userxattr" : "");
    CHECK(mount("overlay", "mnt/root", "overlay", MS_NOSUID, options), "mount overlay");
    if (user_namespace) for (unsigned i = 0; i < 5; i++) device(devices[i].name, devices[i].minor_number);
    CHECK(mount("proc", "mnt/root/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL), "mount proc");
    CHECK(chdir("mnt/root"), "chdir root");
    CHECK(syscall(SYS_pivot_root, ".", "."), "pivot_root");
    CHECK(umount2(".", MNT_DETACH), "leave the host's root");
    CHECK(chdir(workdir), "chdir %s", workdir);
}

static void loopback_up(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    CHECK(fd, "socket");
    CHECK(ioctl(fd, SIOCSIFFLAGS, &request), "loopback up");
    close(fd);
}

static void limit(int which, long long soft, long long hard) {
    struct rlimit value = {soft, hard};
    CHECK(setrlimit(which, &value), "setrlimit %d", which);
}

static void drop_rights(void) {
    limit(RLIMIT_CORE, 0, 0);
    limit(RLIMIT_MEMLOCK, 0, 0);
    limit(RLIMIT_MSGQUEUE, 0, 0);
    limit(RLIMIT_NOFILE, open_files, open_files);
    /* soft only: PID 1 ignores the signal, a hard limit would kill it in a long-lived pod */
    if (cpu_seconds) limit(RLIMIT_CPU, cpu_seconds, RLIM_INFINITY);
    if (address_space) limit(RLIMIT_AS, address_space, address_space);
    if (processes) limit(RLIMIT_NPROC, processes, processes);
    for (int capability = 0; capability <= 63; capability++)
        if (prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0 && errno != EINVAL) fail("drop capability %d", capability);
    if (!user_namespace) CHECK(setgroups(0, NULL), "setgroups");
    CHECK(setresgid(pod_uid, pod_uid, pod_uid), "setresgid");
    CHECK(setresuid(pod_uid, pod_uid, pod_uid), "setresuid");
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2] = {{0}};
    CHECK(syscall(SYS_capset, &header, none), "capset");
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs");
    CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "pdeathsig");
}

static void load_filter(int fd) {
    static struct sock_filter code[4096];
    ssize_t n = read(fd, code, sizeof code);
    close(fd);
    errno = 0;
    if (n <= 0 || n % sizeof code[0]) fail("seccomp filter of %zd bytes", n);
    struct sock_fprog program = {n / sizeof code[0], code};
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0), "seccomp");
}

static void run_pod(int ready) {
    char byte;
    if (read(ready, &byte, 1) != 1) _exit(125); /* the shim has written the id maps */
    close(ready);
    int filter = -1;
    if (seccomp_file) CHECK(filter = open(seccomp_file, O_RDONLY | O_CLOEXEC), "open %s", seccomp_file);
    enter_cgroups();
    CHECK(unshare(CLONE_NEWCGROUP), "unshare cgroup namespace");
    make_root();
    loopback_up();
    CHECK(sethostname(hostname_, strlen(hostname_)), "sethostname");
    setsid();
    umask(022);
    drop_rights();
    if (filter >= 0) load_filter(filter);
    sigset_t nothing;
    sigemptyset(&nothing);
    sigprocmask(SIG_SETMASK, &nothing, NULL);
    static char *environment[] = {"PATH=/usr/bin:/bin", "LC_ALL=C.UTF-8", "PYTHONHASHSEED=0", NULL};
    execve(pod_argv[0], pod_argv, environment);
    fail("exec %s", pod_argv[0]);
}

static void write_id_maps(pid_t child) {
    char path[64], text[64];
    snprintf(path, sizeof path, "/proc/%d/setgroups", child);
    CHECK(write_text(path, "deny"), "write %s", path);
    snprintf(path, sizeof path, "/proc/%d/uid_map", child);
    snprintf(text, sizeof text, "%u %u 1", pod_uid, geteuid());
    CHECK(write_text(path, text), "write %s", path);
    snprintf(path, sizeof path, "/proc/%d/gid_map", child);
    snprintf(text, sizeof text, "%u %u 1", pod_uid, getegid());
    CHECK(write_text(path, text), "write %s", path);
}

int main(int argc, char **argv) {
    int i = 1, ready[2], status;
    for (; i < argc && strcmp(argv[i], "--"); i++) option(argv[i]);
    errno = 0;
    if (i + 1 >= argc || !state_dir || !image) fail("usage: podlaunch state=DIR image=DIR [key=value...] -- program [argument...]");
    pod_argv = argv + i + 1;
    pod_uid = FIRST_POD_UID + getpid();

    sigset_t watched;
    sigemptyset(&watched);
    sigaddset(&watched, SIGCHLD);
    sigaddset(&watched, SIGTERM);
    sigaddset(&watched, SIGINT);
    sigprocmask(SIG_BLOCK, &watched, NULL); /* before the cgroups exist: from here on every end takes them away */
    CHECK(pipe2(ready, O_CLOEXEC), "pipe");
    make_cgroups();
    unsigned long flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | (user_namespace ? CLONE_NEWUSER : 0) | SIGCHLD;
    errno = 0;
    pid_t child = syscall(SYS_clone, flags, NULL, NULL, NULL, NULL);
    if (child < 0) fail("clone with new namespaces");
    if (!child) {
        cgroups_are_ours = 0;
        close(ready[1]);
        run_pod(ready[0]);
    }
    close(ready[0]);
    if (user_namespace) write_id_maps(child);
    if (write(ready[1], "x", 1) != 1) kill(child, SIGKILL);
    close(ready[1]);
    /* the pod alone holds its channel: when PID 1 is gone, the other end sees it */
    close(0);
    close(1);
    for (;;) {
        int signal_number = sigwaitinfo(&watched, NULL);
        if (signal_number == SIGTERM || signal_number == SIGINT) kill(child, SIGKILL);
        if (waitpid(child, &status, WNOHANG) == child) break;
    }
    remove_cgroups();
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
