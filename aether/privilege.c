#include "privilege.h"

#include <errno.h>
#include <grp.h>
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CAP(name) (UINT64_C(1) << CAP_##name)

/* For commands. Nothing here reaches beyond the sandbox's own processes, files and network
 * namespace. */
static const uint64_t usual = CAP(CHOWN) | CAP(DAC_OVERRIDE) | CAP(FOWNER) | CAP(FSETID) |
                              CAP(KILL) | CAP(SETGID) | CAP(SETUID) | CAP(SETPCAP) |
                              CAP(NET_BIND_SERVICE) | CAP(SYS_CHROOT) | CAP(AUDIT_WRITE) |
                              CAP(SETFCAP);

/* Never, whatever --caps says: each of these ends the confinement or the accounting. */
static const uint64_t never =
    CAP(SYS_ADMIN) | CAP(SYS_PTRACE) | CAP(SYS_RESOURCE) | CAP(SYS_MODULE) | CAP(SYS_RAWIO) |
    CAP(SYS_BOOT) | CAP(SYS_TIME) | CAP(SYS_NICE) | CAP(NET_RAW) | CAP(NET_ADMIN) | CAP(MKNOD) |
    CAP(BPF) | CAP(PERFMON) | CAP(MAC_ADMIN) | CAP(MAC_OVERRIDE) | CAP(DAC_READ_SEARCH) |
    CAP(CHECKPOINT_RESTORE) | CAP(SYSLOG) | CAP(LINUX_IMMUTABLE);

/* The agent's own, besides those it has to be able to hand to root's file operations. */
static const uint64_t own = CAP(SETUID) | CAP(SETGID) | CAP(KILL) | CAP(DAC_OVERRIDE);

static uint64_t for_commands;

uint64_t privilege_default_caps(void) { return usual; }

static int capget_permitted(uint64_t *permitted) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2];
    if (syscall(SYS_capget, &header, data) < 0)
        return -errno;
    *permitted = data[0].permitted | (uint64_t)data[1].permitted << 32;
    return 0;
}

static int capset_all(uint64_t caps) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {
        {.permitted = (uint32_t)caps, .effective = (uint32_t)caps},
        {.permitted = (uint32_t)(caps >> 32), .effective = (uint32_t)(caps >> 32)},
    };
    return syscall(SYS_capset, &header, data) < 0 ? -errno : 0;
}

int privilege_init(uint64_t caps) {
    caps &= ~never;
    for (int cap = 0; prctl(PR_CAPBSET_READ, cap, 0, 0, 0) >= 0; cap++) {
        bool wanted = cap < 64 && (caps >> cap & 1);
        if (!wanted && prctl(PR_CAPBSET_READ, cap, 0, 0, 0) == 1 &&
            prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0)
            return -errno;
    }
    uint64_t permitted = 0;
    int error = capget_permitted(&permitted);
    if (error)
        return error;
    for_commands = permitted & caps;
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    error = capset_all(permitted & (caps | own));
    if (error)
        return error;
    /* prlimit(2) on a process is allowed to whoever has all three of its uids and gids, dumpable or
     * not: root inside could give PID 1 an RLIMIT_CPU and have the kernel kill it. Nobody has both
     * of two different gids. */
    return setresgid((gid_t)-1, (gid_t)-1, 65534) < 0 ? -errno : 0;
}

int privilege_become(const struct identity *identity, bool keep_caps) {
    size_t groups = (size_t)identity->group_count;
    if (setgroups(groups, identity->groups) < 0 ||
        setresgid(identity->gid, identity->gid, identity->gid) < 0 ||
        setresuid(identity->uid, identity->uid, identity->uid) < 0)
        return errno;
    if (keep_caps && identity->uid == 0)
        return -capset_all(for_commands);
    return 0;
}
