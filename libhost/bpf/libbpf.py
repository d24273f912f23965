"""The few words of libbpf this package speaks, through ctypes.

libbpf and not bpf(2) itself: reading an ELF object, its type information and relocations is
libbpf's work, and its element calls follow the kernel's structures on every architecture. Its
tcx functions are newer than the oldest libbpf served (1.1), but the plain attach call carries an
interface index just as well as a cgroup's descriptor, so nothing has to be issued by number.

Every call raises ``OSError`` naming its object. No policy here.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from functools import cache
from typing import Final

from libhost.errors import UnsupportedError

_LIBRARY: Final = "libbpf.so.1"
_WARN: Final = 0
_VERIFIER_LOG_BYTES: Final = 256 << 10

_PrintFn = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class _OpenOpts(ctypes.Structure):
    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("object_name", ctypes.c_char_p),
        ("relaxed_maps", ctypes.c_bool),
        ("pin_root_path", ctypes.c_char_p),
        ("unused", ctypes.c_uint32),
        ("kconfig", ctypes.c_char_p),
        ("btf_custom_path", ctypes.c_char_p),
        ("kernel_log_buf", ctypes.c_char_p),
        ("kernel_log_size", ctypes.c_size_t),
        ("kernel_log_level", ctypes.c_uint32),
    )


class _AttachOpts(ctypes.Structure):
    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("flags", ctypes.c_uint),
        ("replace_prog_fd", ctypes.c_int),
    )


class _BatchOpts(ctypes.Structure):
    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("elem_flags", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
    )


class _TcHook(ctypes.Structure):
    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("ifindex", ctypes.c_int),
        ("attach_point", ctypes.c_int),
        ("parent", ctypes.c_uint32),
    )


class _TcOpts(ctypes.Structure):
    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("prog_fd", ctypes.c_int),
        ("flags", ctypes.c_uint32),
        ("prog_id", ctypes.c_uint32),
        ("handle", ctypes.c_uint32),
        ("priority", ctypes.c_uint32),
    )


class _Printer:
    """Keeps libbpf's warnings for the exception text instead of letting them onto stderr."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.callback = _PrintFn(self._print)
        self._vsnprintf = ctypes.CDLL(None).vsnprintf

    def _print(self, level: int, text: bytes, arguments: int) -> int:
        if level == _WARN:
            # JUSTIFICATION: the arguments are a va_list; only the C library can read one.
            # SAFETY: the buffer's size is given, and the list is used once, inside the call.
            line = ctypes.create_string_buffer(512)
            self._vsnprintf(line, ctypes.sizeof(line), text, ctypes.c_void_p(arguments))
            self.lines = [*self.lines[-19:], line.value.decode(errors="replace").strip()]
        return 0


_printer: Final = _Printer()


@cache
def library() -> ctypes.CDLL:
    """libbpf, loaded on first use: importing this package must work where it is not installed."""
    try:
        lib = ctypes.CDLL(_LIBRARY, use_errno=True)
    except OSError as err:
        hint = "install the package libbpf1"
        raise UnsupportedError("network policy", f"{_LIBRARY}: {err}", hint) from err
    lib.libbpf_set_print(_printer.callback)
    for find in ("find_map_by_name", "find_program_by_name", "open_file"):
        getattr(lib, f"bpf_object__{find}").restype = ctypes.c_void_p
    return lib


def checked(result: int, subject: str) -> int:
    """libbpf returns ``-errno``."""
    if result < 0:
        raise OSError(-result, os.strerror(-result), subject)
    return result


class BpfObject:
    """open -> set_pin, set_constant -> load -> program_fd, map_fd -> close.

    What is pinned or attached outlives ``close``; the rest goes with it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._log = ctypes.create_string_buffer(_VERIFIER_LOG_BYTES)
        opts = _OpenOpts(sz=ctypes.sizeof(_OpenOpts), kernel_log_level=0)
        # SAFETY: the buffer is kept by this object, which outlives every load.
        opts.kernel_log_buf = ctypes.cast(self._log, ctypes.c_char_p)
        opts.kernel_log_size = ctypes.sizeof(self._log)
        _printer.lines.clear()
        handle = library().bpf_object__open_file(os.fsencode(path), ctypes.byref(opts))
        if not handle:
            number = ctypes.get_errno()
            raise OSError(number, self._explain(os.strerror(number)), path)
        self._handle = ctypes.c_void_p(handle)

    def _explain(self, reason: str) -> str:
        said = [*_printer.lines[-3:], self._log.value.decode(errors="replace")[-2000:]]
        return ": ".join([reason, *(part for part in said if part)])

    def _map(self, name: str) -> ctypes.c_void_p:
        found = library().bpf_object__find_map_by_name(self._handle, name.encode())
        if not found:
            raise OSError(errno.ENOENT, f"no map {name!r}", self._path)
        return ctypes.c_void_p(found)

    def set_pin(self, name: str, path: str) -> None:
        """Where the map is pinned: an equal one found there is taken over with its contents."""
        checked(library().bpf_map__set_pin_path(self._map(name), os.fsencode(path)), path)

    def set_constants(self, value: bytes) -> None:
        """The ``const volatile`` variables, all of them: the verifier then knows their values."""
        size = ctypes.c_size_t(len(value))
        found = self._map(".rodata")
        checked(library().bpf_map__set_initial_value(found, value, size), ".rodata")

    def load(self) -> None:
        _printer.lines.clear()
        result = library().bpf_object__load(self._handle)
        if result < 0:
            raise OSError(-result, self._explain(os.strerror(-result)), self._path)

    def map_fd(self, name: str) -> int:
        return checked(library().bpf_map__fd(self._map(name)), name)

    def program_fd(self, name: str) -> int:
        found = library().bpf_object__find_program_by_name(self._handle, name.encode())
        if not found:
            raise OSError(errno.ENOENT, f"no program {name!r}", self._path)
        return checked(library().bpf_program__fd(ctypes.c_void_p(found)), name)

    def close(self) -> None:
        if self._handle:
            library().bpf_object__close(self._handle)
            self._handle = ctypes.c_void_p()


# --- pins and ids


def obj_pin(fd: int, path: str) -> None:
    checked(library().bpf_obj_pin(fd, os.fsencode(path)), path)


def obj_get(path: str) -> int:
    return checked(library().bpf_obj_get(os.fsencode(path)), path)


def info(fd: int, size: int, subject: str) -> bytes:
    """The first ``size`` bytes of ``bpf_{prog,map,link}_info``."""
    buffer = ctypes.create_string_buffer(size)
    length = ctypes.c_uint32(size)
    checked(library().bpf_obj_get_info_by_fd(fd, buffer, ctypes.byref(length)), subject)
    return buffer.raw


def program_fd_by_id(program_id: int) -> int:
    return checked(library().bpf_prog_get_fd_by_id(program_id), f"program {program_id}")


# --- attachments


def link_create(program_fd: int, target_fd: int, attach_type: int, subject: str) -> int:
    return checked(library().bpf_link_create(program_fd, target_fd, attach_type, None), subject)


def link_update(link_fd: int, program_fd: int, subject: str) -> None:
    checked(library().bpf_link_update(link_fd, program_fd, None), subject)


def prog_attach(
    program_fd: int, target: int, attach_type: int, flags: int, replace_fd: int, subject: str
) -> None:
    """``target`` is a descriptor or, for tcx, an interface index."""
    opts = _AttachOpts(ctypes.sizeof(_AttachOpts), flags, replace_fd)
    call = library().bpf_prog_attach_opts
    checked(call(program_fd, target, attach_type, ctypes.byref(opts)), subject)


def prog_query(target: int, attach_type: int, subject: str) -> Sequence[int]:
    """Ids of the programs attached, first run first; at most 64, tcx's own limit."""
    count = ctypes.c_uint32(64)
    ids = (ctypes.c_uint32 * 64)()
    call = library().bpf_prog_query
    checked(call(target, attach_type, 0, None, ids, ctypes.byref(count)), subject)
    return ids[: count.value]


def tc_attach(program_fd: int, ifindex: int, attach_point: int, subject: str) -> None:
    """Put the program on the interface's clsact hook, in place of an earlier one."""
    hook = _TcHook(ctypes.sizeof(_TcHook), ifindex, attach_point, 0)
    made = library().bpf_tc_hook_create(ctypes.byref(hook))
    if made != -errno.EEXIST:
        checked(made, subject)
    opts = _TcOpts(ctypes.sizeof(_TcOpts), program_fd, 1, 0, 1, 1)  # replace; handle, priority
    checked(library().bpf_tc_attach(ctypes.byref(hook), ctypes.byref(opts)), subject)


# --- map elements


def map_update(fd: int, key: bytes, value: bytes, flags: int, subject: str) -> None:
    checked(library().bpf_map_update_elem(fd, key, value, ctypes.c_uint64(flags)), subject)


def map_lookup(fd: int, key: bytes, value_size: int, subject: str) -> bytes | None:
    value = ctypes.create_string_buffer(value_size)
    result = library().bpf_map_lookup_elem(fd, key, value)
    if result == -errno.ENOENT:
        return None
    checked(result, subject)
    return value.raw


def map_delete(fd: int, key: bytes, subject: str) -> bool:
    """False if there was no such element."""
    result = library().bpf_map_delete_elem(fd, key)
    if result == -errno.ENOENT:
        return False
    checked(result, subject)
    return True


def map_update_batch(fd: int, keys: bytes, values: bytes, count: int, subject: str) -> None:
    opts = _BatchOpts(ctypes.sizeof(_BatchOpts), 0, 0)
    done = ctypes.c_uint32(count)
    call = library().bpf_map_update_batch
    checked(call(fd, keys, values, ctypes.byref(done), ctypes.byref(opts)), subject)


def map_lookup_batch(
    fd: int, position: bytes | None, key_size: int, value_size: int, limit: int, subject: str
) -> tuple[bytes, bytes, int, bytes | None]:
    """Keys, values, how many, and where to go on (None: that was the end)."""
    keys = ctypes.create_string_buffer(key_size * limit)
    values = ctypes.create_string_buffer(value_size * limit)
    count = ctypes.c_uint32(limit)
    following = ctypes.create_string_buffer(max(key_size, 4))
    opts = _BatchOpts(ctypes.sizeof(_BatchOpts), 0, 0)
    call = library().bpf_map_lookup_batch
    result = call(fd, position, following, keys, values, ctypes.byref(count), ctypes.byref(opts))
    if result != -errno.ENOENT:
        checked(result, subject)
    rest = None if result == -errno.ENOENT else following.raw
    return keys.raw, values.raw, count.value, rest
