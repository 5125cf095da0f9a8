"""How a process shuts itself in on Linux: namespaces, seccomp, Landlock, straight from the C library.

    enter_namespaces(folder)      # a world of its own, in which only the folder can be written
    refuse_system_calls()         # no sockets, nothing that outlives the process, no tracing
    restrict_by_landlock(folder)  # where namespaces are not granted: the part of it that is

No rights are needed, and root gains nothing by being root. Left out: control groups, which need rights;
hiding files that the user may read. Needs Linux 5.12, x86-64 or ARM. To copy into another project: this file.
Numbers are those of the kernel's headers, named beside them.
"""

import ctypes
import errno
import os
import re
import struct
import sys

LINUX = sys.platform == "linux"
LIBC = ctypes.CDLL(None, use_errno=True)
CAPSET = LIBC.capset if LINUX else None  # looked up once, not in every child
SUBREAPER = (36, 1, 0, 0, 0)  # for prctl: orphans below become children of the caller


def enter_namespaces(box: str) -> None:
    """Go on as process 1 of new namespaces with only box and /dev/shm writable; OSError if not granted."""
    uid, gid = os.getuid(), os.getgid()
    flags = 0x10000000 | 0x20000000 | 0x00020000 | 0x40000000 | 0x08000000  # CLONE_NEW: USER PID NS NET IPC
    check(LIBC.unshare(flags))
    for name, line in (("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    if os.fork():
        os._exit(0)
    mount("none", "/", None, 0x4000 | 0x40000)  # MS_REC | MS_PRIVATE
    mount(
        "proc", "/proc", "proc", 2 | 4 | 8
    )  # nosuid, nodev, noexec; it shows this namespace's processes alone
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")  # no namespaces, and with them rights, of the program's own
    if LIMITED_PIDS:
        with open("/proc/sys/kernel/pid_max", "w") as file:
            file.write("400")
    change_mount("/", 0x8000, 1 | 2 | 4, 0)  # AT_RECURSIVE: read-only, no set-uid, no devices
    for device in ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"):
        mount(device, device, None, 0x1000)  # MS_BIND
        change_mount(device, 0, 0, 1 | 4)
    mount_box(box)


# Since Linux 6.14 each process namespace has its own pid_max, which binds root too (RLIMIT_NPROC does not).
LIMITED_PIDS = LINUX and tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (6, 14)


def mount_box(box: str) -> None:
    mount("tmpfs", box, "tmpfs", 2 | 4, "size=256m,nr_inodes=20k,mode=700")
    if os.path.isdir("/dev/shm"):
        mount(box, "/dev/shm", None, 0x1000)  # where the multiprocessing module keeps its locks


def empty(box: str, namespaces: bool) -> None:
    """Remove what a call left in its folder, however deep, and whatever its modes."""
    if namespaces:
        for path in ("/dev/shm", box):
            LIBC.umount2(path.encode(), 2)  # MNT_DETACH
        mount_box(box)
    else:
        os.spawnlp(os.P_WAIT, "chmod", "chmod", "-R", "u+rwx", box)
        os.spawnlp(os.P_WAIT, "rm", "rm", "-rf", box)
        os.mkdir(box)


def check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    kind = kind and kind.encode()
    check(LIBC.mount(source.encode(), target.encode(), kind, ctypes.c_ulong(flags), options.encode()))


def change_mount(path: str, flags: int, switch_on: int, switch_off: int) -> None:
    attributes = struct.pack("QQQQ", switch_on, switch_off, 0, 0)
    check(LIBC.syscall(442, -100, path.encode(), flags, attributes, ctypes.c_size_t(32)))  # mount_setattr


# Refused with EPERM: the way to the network and to sockets of this machine; what outlives a call (queues and
# memory of System V and POSIX); memory that no limit counts (memfd_create); what only an attack on the kernel
# or on another process needs:
# socket shmget msgget semget mq_open memfd_create ptrace process_vm_readv process_vm_writev pidfd_getfd setns
# unshare bpf perf_event_open io_uring_setup userfaultfd add_key request_key keyctl memfd_secret
REFUSED = {
    "x86_64": (0xC000003E, "41 29 68 64 240 319 101 310 311 438 308 272 321 298 425 323 248 249 250 447"),
    "aarch64": (0xC00000B7, "198 194 186 190 180 279 117 270 271 438 268 97 280 241 425 282 217 218 219 447"),
}


def refuse_system_calls() -> bool:
    """Give up new rights and the calls above for good, children included (seccomp). False if not granted."""
    architecture, numbers = REFUSED.get(os.uname().machine, (0, ""))
    numbers = [int(number) for number in numbers.split()]
    program = [
        (0x20, 0, 0, 4),
        (0x15, 0, len(numbers) + 2, architecture),
        (0x20, 0, 0, 0),
    ]  # arch, must equal; call number
    program += [(0x35, len(numbers), 0, 0x40000000)]  # x86-64's second table of calls
    program += [(0x15, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    program += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x50000 | errno.EPERM)]  # allow; refuse
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
    return architecture > 0 and LIBC.prctl(38, 1, 0, 0, 0) == 0 and LIBC.prctl(22, 2, head, 0, 0) == 0


def restrict_by_landlock(box: str) -> None:
    """Without namespaces: write below box only; no signal to, no look into processes outside of this call."""
    if (version := LIBC.syscall(444, None, 0, 1)) < 1:
        return
    write = 2 | sum(
        1 << bit for bit in range(4, 13 + min(version - 1, 2))
    )  # files; directories; from 2 on, links; from 3, truncation
    scope = 3 if version > 5 else 0  # abstract sockets, signals
    rules = check(LIBC.syscall(444, struct.pack("QQQ", write, 0, scope), ctypes.c_size_t(24), 0))
    for path, allowed in ((box, write), (os.devnull, 2)):
        fd = os.open(path, os.O_PATH)
        check(LIBC.syscall(445, rules, 1, struct.pack("=Qi", allowed, fd), 0))
        os.close(fd)
    LIBC.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    check(LIBC.syscall(446, rules, 0))
    os.close(rules)
