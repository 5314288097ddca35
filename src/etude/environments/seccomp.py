"""The pods' seccomp filter as BPF bytes: the calls by which a process could reach the kernel's administration or a neighbour.

Allows by default; what it denies gives EPERM (ENOSYS where a program is to fall back). Namespaces and dropped capabilities already stand in
the way of most of it: the filter is the second wall. Needs no library.
"""

from __future__ import annotations

import errno
import platform
import struct

from etude.records.errors import MissingCapability

ALLOW = 0x7FFF0000
KILL = 0x80000000
ERRNO = 0x00050000
LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24

# name: (x86_64, aarch64), None where the architecture has no such call
DENIED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "syslog": (103, 116),
    "uselib": (134, None),
    "personality": (135, 92),
    "vhangup": (153, 58),
    "modify_ldt": (154, None),
    "pivot_root": (155, 41),
    "adjtimex": (159, 171),
    "chroot": (161, 51),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "mount": (165, 40),
    "umount2": (166, 39),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "lookup_dcookie": (212, 18),
    "clock_settime": (227, 112),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "migrate_pages": (256, 238),
    "unshare": (272, 97),
    "move_pages": (279, 239),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "clock_adjtime": (305, 266),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "finit_module": (313, 273),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
}
MISSING = {
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "clone3": (435, 435),
}
CLONE, SOCKET, IOCTL = (56, 220), (41, 198), (16, 29)
NEW_USER_NAMESPACE = 0x10000000
# namespaces' clone flags: time, mount, cgroup, uts, ipc, user, pid, net
NEW_NAMESPACES = (
    0x00000080 | 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | NEW_USER_NAMESPACE | 0x20000000 | 0x40000000
)
# unix, inet, inet6, netlink: the others (vsock, packet, alg, ...) are not confined by a network namespace, or reach odd kernel code
SOCKET_FAMILIES = (1, 2, 10, 16)
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def filter_bytes(machine: str | None = None) -> bytes:
    """`struct sock_filter[]` for this (or the named) architecture. Raises MissingCapability on one without a table."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise MissingCapability("environments", "architecture", machine, "x86_64 or aarch64 for namespace pods")
    column, audit = ARCHITECTURES[machine]

    def instruction(code: int, jump_true: int, jump_false: int, value: int) -> bytes:
        return struct.pack("=HBBI", code, jump_true, jump_false, value)

    def when_number(number: int, block: list[bytes]) -> list[bytes]:
        return [instruction(JUMP_EQUAL, 0, len(block), number), *block]

    def give(action: int) -> bytes:
        return instruction(RETURN, 0, 0, action)

    program = [
        instruction(LOAD, 0, 0, ARCHITECTURE),
        instruction(JUMP_EQUAL, 1, 0, audit),
        give(KILL),
        instruction(LOAD, 0, 0, NUMBER),
    ]
    if machine == "x86_64":  # the x32 calls carry a bit of their own
        program += [instruction(JUMP_GREATER_EQUAL, 0, 1, 0x40000000), give(ERRNO | errno.ENOSYS)]
    program += when_number(
        CLONE[column],
        [
            instruction(LOAD, 0, 0, FIRST_ARGUMENT),
            instruction(JUMP_SET, 0, 1, NEW_NAMESPACES),
            give(ERRNO | errno.EPERM),
            give(ALLOW),
        ],
    )
    families = [instruction(LOAD, 0, 0, FIRST_ARGUMENT)]
    for position, family in enumerate(SOCKET_FAMILIES):
        families.append(instruction(JUMP_EQUAL, len(SOCKET_FAMILIES) - position, 0, family))
    program += when_number(SOCKET[column], [*families, give(ERRNO | errno.EAFNOSUPPORT), give(ALLOW)])
    requests = [
        instruction(LOAD, 0, 0, SECOND_ARGUMENT),
        instruction(JUMP_EQUAL, 1, 0, TIOCSTI),
        instruction(JUMP_EQUAL, 0, 1, TIOCLINUX),
    ]
    program += when_number(IOCTL[column], [*requests, give(ERRNO | errno.EPERM), give(ALLOW)])
    for name, numbers in {**DENIED, **MISSING}.items():
        number = numbers[column]
        if number is not None:
            program += when_number(number, [give(ERRNO | (errno.ENOSYS if name in MISSING else errno.EPERM))])
    program.append(give(ALLOW))
    return b"".join(program)
