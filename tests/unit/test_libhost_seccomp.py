"""The compiled filter says what the rules say, for every call and for the arguments that matter."""

from __future__ import annotations

import errno
import struct

import pytest

from libhost import seccomp

X86 = seccomp.AUDIT_ARCH_X86_64


def run_filter(arch: int, number: int, args: tuple[int, ...]) -> int:
    """A classic BPF machine, written from the manual and not from the compiler under test."""
    words = [*args, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=IIQ6Q", number & 0xFFFFFFFF, arch, 0, *words)
    program = list(struct.iter_unpack("=HBBI", seccomp.compile_filter()))
    accumulator = position = 0
    while True:
        code, jump_true, jump_false, k = program[position]
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, k)
        elif code == 0x54:
            accumulator &= k
        elif code == 0x06:
            return {0x7FFF0000: 0}.get(k, k & 0xFFFF)
        else:
            taken = {0x15: accumulator == k, 0x25: accumulator > k, 0x45: bool(accumulator & k)}
            position += jump_true if taken[code] else jump_false


ARGUMENTS = [
    (0, 0),
    (0x1200011, 0),
    (0x10000000, 0),
    (0x10000000 | 0xDEAD << 32, 0),
    (0x80, 0),
    *[(family, 1) for family in range(50)],
    (17 | 1 << 40, 3),
    (2 | 1 << 40, 1),
    *[(3, request) for request in (0x401C5820, 0xC0C0586D, 0x40086602, 0x40046602, 0x801C581F)],
    *[(3, request | 0xDEAD << 32) for request in (0x401C5820, 0xC0C0586D, 0x5412, 0x541C, 0x5413)],
    (62, 1),
    (62 | 1 << 32, 1),
]


@pytest.mark.parametrize("args", ARGUMENTS, ids=str)
def test_filter_agrees_with_rules_for_every_call(args: tuple[int, int]) -> None:
    for number in range(600):
        assert run_filter(X86, number, args) == seccomp.decide(X86, number, args), number


@pytest.mark.parametrize(
    ("number", "args", "expected"),
    [
        (56, (0x10000000 | 17,), errno.EPERM),  # clone(CLONE_NEWUSER)
        (56, (0x3D0F00,), 0),  # what pthread_create passes
        (272, (0x10000000,), errno.EPERM),  # unshare(CLONE_NEWUSER)
        (272, (0x400,), 0),  # unshare(CLONE_FILES)
        (435, (), errno.ENOSYS),  # clone3
        (16, (3, 0x401C5820 | 0xBEEF << 32), errno.EPERM),  # quota project, high bits set
        (16, (3, 0x5401), 0),  # TCGETS
        (41, (17, 3, 3), errno.EPERM),  # AF_PACKET
        (41, (40, 1, 0), errno.EAFNOSUPPORT),  # AF_VSOCK
        (41, (2, 1, 0), 0),
        (101, (0,), 0),  # ptrace: debuggers work, PID 1 protects itself
        (469, (), errno.EPERM),  # file_setattr
        (470, (), errno.ENOSYS),  # newer than judged
        (0x40000000 | 16, (3, 0x5401), errno.ENOSYS),  # x32
    ],
)
def test_decision(number: int, args: tuple[int, ...], expected: int) -> None:
    assert run_filter(X86, number, args) == expected


def test_another_abi_gets_nothing() -> None:
    i386 = 0x40000003
    assert {run_filter(i386, number, (0, 0)) for number in range(500)} == {errno.ENOSYS}
