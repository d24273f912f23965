/*
 * reach NAME: what root inside a sandbox might try. Prints "ok" if it worked, else the errno's
 * name. Each attempt is one system call or the shortest path to one, so that what answers is the
 * kernel and not a tool.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define HIGH_BITS (0xdeadUL << 32)

static long open_file(const char *path, int flags)
{
    int fd = open(path, flags | O_CLOEXEC);
    struct stat file;
    char byte;
    if (fd < 0 || fstat(fd, &file) < 0)
        return -1;
    if (S_ISCHR(file.st_mode) && file.st_rdev == makedev(1, 3)) {
        errno = ENODATA; /* /dev/null is in its place */
        return -1;
    }
    return (flags & O_ACCMODE) == O_RDONLY && read(fd, &byte, 1) < 0 ? -1 : 0;
}

static long control(unsigned long request)
{
    char record[128] = {0};
    int fd = open("/reach-file", O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    return syscall(SYS_ioctl, fd, request, record);
}

static long clone_with(unsigned long flags)
{
    long pid = syscall(SYS_clone, flags | SIGCHLD, 0, 0, 0, 0);
    if (pid == 0)
        _exit(0);
    return pid;
}

static long read_memory_of_init(void)
{
    char here[8];
    struct iovec local = {here, sizeof here}, remote = {(void *)0x400000, sizeof here};
    return process_vm_readv(1, &local, 1, &remote, 1, 0);
}

static long steal_descriptor(int number)
{
    int pidfd = (int)syscall(SYS_pidfd_open, 1, 0);
    return pidfd < 0 ? -1 : syscall(SYS_pidfd_getfd, pidfd, number, 0);
}

static long fifo_priority(void)
{
    struct sched_param param = {.sched_priority = 1};
    return sched_setscheduler(0, SCHED_FIFO, &param);
}

static long more_files(void)
{
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_max += 1;
    return setrlimit(RLIMIT_NOFILE, &limit);
}

static long handle(void)
{
    struct { struct file_handle head; char bytes[128]; } h = {.head.handle_bytes = 8};
    h.head.handle_type = 1;
    return syscall(SYS_open_by_handle_at, open("/", O_RDONLY), &h.head, O_RDONLY);
}

static long with_child(long (*attack)(pid_t))
{
    pid_t pid = fork();
    if (pid == 0) {
        pause();
        _exit(0);
    }
    long result = attack(pid);
    int error = errno;
    kill(pid, SIGKILL);
    waitpid(pid, NULL, __WALL);
    errno = error;
    return result;
}

#ifdef __x86_64__
static long i386_getpid(void)
{
    long result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(20L) : "memory", "r8", "r9", "r10", "r11");
    if (result < 0)
        errno = (int)-result;
    return result;
}
#endif

static long attach(pid_t pid) { return ptrace(PTRACE_ATTACH, pid, 0, 0); }

static long attempt(const char *name)
{
#define IS(text) (strcmp(name, text) == 0)
    if (IS("mount")) return mount("none", "/mnt", "tmpfs", 0, NULL);
    if (IS("umount-mask")) return umount2("/proc/keys", MNT_DETACH);
    if (IS("remount-proc-sys")) return mount(NULL, "/proc/sys", NULL, MS_REMOUNT | MS_BIND, NULL);
    if (IS("pivot_root")) return syscall(SYS_pivot_root, ".", ".");
    if (IS("open_tree")) return syscall(428, AT_FDCWD, "/", 1);
    if (IS("fsopen")) return syscall(430, "tmpfs", 0);
    if (IS("unshare-user")) return unshare(CLONE_NEWUSER);
    if (IS("unshare-mount")) return unshare(CLONE_NEWNS);
    if (IS("unshare-files")) return unshare(CLONE_FILES);
    if (IS("clone-user")) return clone_with(CLONE_NEWUSER);
    if (IS("clone-user-high-bits")) return clone_with(CLONE_NEWUSER | HIGH_BITS);
    if (IS("clone3")) { struct clone_args a = {.exit_signal = SIGCHLD}; return syscall(435, &a, sizeof a); }
    if (IS("setns-init")) return setns(open("/proc/1/ns/mnt", O_RDONLY), 0);
    if (IS("bpf")) return syscall(SYS_bpf, 0, NULL, 0);
    if (IS("perf")) return syscall(SYS_perf_event_open, NULL, 0, -1, -1, 0);
    if (IS("keyctl")) return syscall(SYS_keyctl, 0, -3, 0);
    if (IS("io_uring")) return syscall(425, 1, NULL);
    if (IS("userfaultfd")) return syscall(SYS_userfaultfd, 1);
    if (IS("open_by_handle")) return handle();
    if (IS("kexec")) return syscall(SYS_kexec_load, 0, 0, NULL, 0);
    if (IS("init_module")) return syscall(SYS_init_module, NULL, 0, "");
    if (IS("reboot")) return reboot(RB_DISABLE_CAD);
    if (IS("syslog")) return syscall(SYS_syslog, 10, NULL, 0);
    if (IS("swapon")) return syscall(SYS_swapon, "/reach-file", 0);
    if (IS("af_packet")) return socket(AF_PACKET, SOCK_RAW, 0);
    if (IS("af_packet-high-bits")) return syscall(SYS_socket, AF_PACKET | HIGH_BITS, SOCK_RAW, 0);
    if (IS("af_vsock")) return socket(AF_VSOCK, SOCK_STREAM, 0);
    if (IS("af_alg")) return socket(AF_ALG, SOCK_SEQPACKET, 0);
    if (IS("raw-icmp")) return socket(AF_INET, SOCK_RAW, 1);
    if (IS("tcp")) return socket(AF_INET, SOCK_STREAM, 0);
    if (IS("netlink")) return socket(AF_NETLINK, SOCK_RAW, 0);
    if (IS("mknod-disk")) return mknod("/reach-disk", S_IFBLK | 0600, makedev(254, 0));
    if (IS("mknod-mem")) return mknod("/dev/reach-mem", S_IFCHR | 0600, makedev(1, 1));
    if (IS("mkfifo")) return mknod("/reach-fifo", S_IFIFO | 0600, 0);
    if (IS("fssetxattr")) return control(0x401c5820);
    if (IS("fssetxattr-high-bits")) return control(0x401c5820 | HIGH_BITS);
    if (IS("setflags")) return control(0x40086602);
    if (IS("swapext")) return control(0xc0c0586d);
    if (IS("swapext-high-bits")) return control(0xc0c0586d | HIGH_BITS);
    if (IS("tiocsti")) return control(0x5412);
    if (IS("file_setattr")) return syscall(469, AT_FDCWD, "/reach-file", NULL, 0, 0);
    if (IS("newest-call")) return syscall(480);
    if (IS("quotactl")) return syscall(SYS_quotactl, 0x80000702, NULL, 0, NULL);
    if (IS("sched-cookie")) return prctl(62, 1, 0, 0, 0);
    if (IS("ptrace-init")) return attach(1);
    if (IS("ptrace-child")) return with_child(attach);
    if (IS("memory-of-init")) return read_memory_of_init();
    if (IS("descriptor-of-init")) return steal_descriptor(4);
    if (IS("cgroup-of-init")) return open_file("/proc/1/fd/4/cgroup.procs", O_WRONLY);
    if (IS("escape-by-init-cwd")) return open_file("/proc/1/cwd/etc", O_RDONLY | O_DIRECTORY);
    if (IS("overwrite-agent")) return open_file("/proc/1/exe", O_WRONLY);
    if (IS("kcore")) return open_file("/proc/kcore", O_RDONLY);
    if (IS("kpagecgroup")) return open_file("/proc/kpagecgroup", O_RDONLY);
    if (IS("kpageflags")) return open_file("/proc/kpageflags", O_RDONLY);
    if (IS("keys")) return open_file("/proc/keys", O_RDONLY);
    if (IS("sysrq")) return open_file("/proc/sysrq-trigger", O_WRONLY);
    if (IS("core-pattern")) return open_file("/proc/sys/kernel/core_pattern", O_WRONLY);
    if (IS("uevent-helper")) return open_file("/sys/kernel/uevent_helper", O_WRONLY);
    if (IS("sysfs-write")) return open_file("/sys/class/net/lo/mtu", O_WRONLY);
    if (IS("fifo-priority")) return fifo_priority();
    if (IS("nice")) return setpriority(PRIO_PROCESS, 0, -5);
    if (IS("more-files")) return more_files();
    if (IS("settime")) { struct timespec t = {0}; return clock_settime(CLOCK_REALTIME, &t); }
    if (IS("sethostname")) return sethostname("x", 1);
    if (IS("chroot")) return chroot("/tmp");
    if (IS("setuid")) return setuid(1000);
#ifdef __x86_64__
    if (IS("i386")) return i386_getpid();
#endif
    if (IS("kill-init")) return kill(1, SIGKILL);
#undef IS
    errno = ENOTSUP;
    return -1;
}

int main(int argc, char **argv)
{
    errno = 0;
    long result = attempt(argc > 1 ? argv[1] : "");
    puts(result >= 0 ? "ok" : strerrorname_np(errno));
    return 0;
}
