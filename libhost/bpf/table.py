"""The rules of every sandbox of a node, as they are in force.

The kernel's maps are the only state. Beside them this class keeps an index of the rules' keys,
read from the kernel when it opens, so that replacing a rule set does not walk everyone's rules.

Invariants, whatever step the process is killed after:
  * what is in no map is denied, so a half-registered sandbox can reach nothing;
  * a generation is loaded completely before one store makes it the active one;
  * a sandbox's record is written first and removed last, so its remains can always be found;
  * a slot's number is not given out again before its rules are gone.

Not here: what rules mean (services.policy), and who may change them.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Final, Self

from libhost.bpf import layout, pins
from libhost.bpf.hook import LinkHook, LinkMechanism, attach_to_cgroup, probe_link_mechanism
from libhost.bpf.layout import UNKNOWN_SLOT, Counters, Denial, InForce, Sandbox, as_u32, u32, u64
from libhost.bpf.libbpf import BpfObject
from libhost.bpf.map import Map
from libhost.bpf.rule import Address, Mode, Rule
from libhost.errors import BusyError, UnsupportedError
from libhost.paths import NodePaths

_U32_MAX: Final = 0xFFFFFFFF
OBJECT: Final = Path("/usr/lib/dsec/policy.bpf.o")

_SIZES: Final = {
    "rules": (32, 1),
    "sandboxes": (layout.SANDBOX_ID_SIZE, 32),
    "slots": (4, 24),
    "cgroups": (8, 4),
    "links": (4, 4),
    "counts": (4, 40),
    "denials": (28, 40),
}


class PolicyTable:
    """open -> (register -> load -> activate -> ... -> remove)* -> close. Safe for threads."""

    def __init__(
        self, bpf: BpfObject, hook: LinkHook, cgroup: Path, directory: Path, lock_fd: int
    ) -> None:
        self._bpf = bpf
        self._hook = hook
        self._cgroup = cgroup
        self._directory = directory
        self._attached_to = 0
        self._lock_fd = lock_fd
        self._lock = Lock()
        maps = {n: Map(n, bpf.map_fd(n), key, value) for n, (key, value) in _SIZES.items()}
        self._rules, self._sandboxes, self._slots = (
            maps["rules"], maps["sandboxes"], maps["slots"],
        )  # fmt: skip
        self._cgroups, self._links = maps["cgroups"], maps["links"]
        self._counts, self._denials = maps["counts"], maps["denials"]
        self._known: dict[str, Sandbox] = {}
        self._in_force: dict[int, InForce] = {}
        self._loaded: dict[int, dict[int, dict[bytes, bytes]]] = defaultdict(dict)
        self._last_slot = UNKNOWN_SLOT

    @classmethod
    def open(
        cls,
        paths: NodePaths,
        cgroup: Path,
        *,
        mechanism: LinkMechanism | None = None,
        object_path: Path = OBJECT,
    ) -> Self:
        """Take over what is pinned for this node, or begin; the programs are then this build's.

        Raises BusyError if another process has the table, UnsupportedError naming what the host
        lacks, OSError with the kernel's own words if the programs do not load.
        """
        if not object_path.exists():
            hint = "build it with `make -C libhost/bpf`"
            raise UnsupportedError("network policy", f"{object_path} is not there", hint)
        lock_fd = pins.lock(paths)
        try:
            directory = pins.pin_directory(paths)
            bpf = BpfObject(str(object_path))
            try:
                for name in _SIZES:
                    bpf.set_pin(name, str(directory / name))
                bpf.set_constants(u32(_depth(cgroup) + 2))  # <parent>/<class>/<sandbox>
                bpf.load()
                hook = LinkHook.of(bpf, mechanism or probe_link_mechanism())
                table = cls(bpf, hook, cgroup, directory, lock_fd)
                table._adopt()
                table._attach()
            except BaseException:
                bpf.close()
                raise
        except BaseException:
            os.close(lock_fd)
            raise
        return table

    @property
    def mechanism(self) -> LinkMechanism:
        return self._hook.mechanism

    def sandboxes(self) -> Mapping[str, Sandbox]:
        """Every sandbox that has a record, also one whose registration was cut short."""
        with self._lock:
            return MappingProxyType(dict(self._known))

    def in_force(self, sandbox_id: str) -> InForce | None:
        """None if the sandbox is not known."""
        with self._lock:
            known = self._known.get(sandbox_id)
            return self._in_force.get(known.slot, InForce()) if known else None

    def holds(self, sandbox_id: str, active: InForce, rules: Collection[Rule]) -> bool:
        """Whether exactly this is in force for the sandbox."""
        with self._lock:
            known = self._known.get(sandbox_id)
            if known is None or self._in_force.get(known.slot) != active:
                return False
            wanted = _pack(known.slot, active.generation, rules)
            return self._loaded[known.slot].get(active.generation, {}) == wanted

    def register(
        self,
        sandbox_id: str,
        cgroup_id: int,
        *,
        ifindex: int = 0,
        address: Address | None = None,
    ) -> int:
        """Give the sandbox a slot, sealed until a generation is activated. Idempotent.

        ``ifindex`` is the host end of its veth, 0 for none; it is filtered when this returns.
        Raises BusyError if the cgroup or the interface is another sandbox's.
        """
        with self._lock:
            known = self._known.get(sandbox_id)
            slot = known.slot if known else self._free_slot()
            record = Sandbox(slot, cgroup_id, ifindex, address)
            self._attach()
            self._refuse_foreign(record)
            if known and known != record:
                self._unlink(known)
            self._sandboxes.put(layout.pack_sandbox_id(sandbox_id), record.pack())
            self._known[sandbox_id] = record
            self._last_slot = slot if known is None else self._last_slot
            if self._counts.get(u32(slot)) is None:
                self._counts.put(u32(slot), Counters().pack())
            active = self._in_force.setdefault(slot, InForce())
            self._slots.put(u32(slot), active.pack(address))
            if ifindex:
                self._links.put(u32(ifindex), u32(slot))
                self._hook.attach(ifindex)
            self._cgroups.put(u64(cgroup_id), u32(slot))
            return slot

    def load(self, sandbox_id: str, generation: int, rules: Collection[Rule]) -> None:
        """Make ``rules`` the content of a generation that is not active.

        Raises OSError ENOSPC if the node's table is full; the generation is then empty.
        """
        with self._lock:
            slot = self._known[sandbox_id].slot
            if generation == self._in_force[slot].generation:
                raise ValueError(f"generation {generation} of {sandbox_id} is in force")
            wanted = _pack(slot, generation, rules)
            present = self._loaded[slot].get(generation, {})
            self._loaded[slot][generation] = present | wanted
            self._rules.delete_many(present.keys() - wanted.keys())
            try:
                for verdict in (layout.ALLOW, layout.DENY):
                    keys = [key for key, value in wanted.items() if value == verdict]
                    self._rules.put_many(keys, verdict)
            except OSError:
                self._drop_generation(slot, generation)
                raise
            self._loaded[slot][generation] = wanted

    def activate(self, sandbox_id: str, generation: int, mode: Mode) -> None:
        """Put a loaded generation in force with one store, then forget the others."""
        with self._lock:
            known = self._known[sandbox_id]
            active = InForce(generation, mode)
            self._slots.put(u32(known.slot), active.pack(known.address))
            self._in_force[known.slot] = active
            for other in [g for g in self._loaded[known.slot] if g != generation]:
                self._drop_generation(known.slot, other)

    def remove(self, sandbox_id: str) -> bool:
        """Forget a sandbox and its rules; from here on it is denied everything. Idempotent."""
        with self._lock:
            known = self._known.get(sandbox_id)
            if known is None:
                return False
            self._unlink(known)
            self._slots.delete(u32(known.slot))
            self._in_force.pop(known.slot, None)
            for generation in list(self._loaded[known.slot]):
                self._drop_generation(known.slot, generation)
            del self._loaded[known.slot]
            self._drop_denials(known.slot)
            self._counts.delete(u32(known.slot))
            self._sandboxes.delete(layout.pack_sandbox_id(sandbox_id))
            del self._known[sandbox_id]
            return True

    def sweep(self, known_ids: Collection[str]) -> list[str]:
        """Remove every sandbox that is not listed; returns the ids removed."""
        strangers = sorted(set(self.sandboxes()) - set(known_ids))
        return [sandbox_id for sandbox_id in strangers if self.remove(sandbox_id)]

    def denials(self, sandbox_id: str) -> list[Denial]:
        """What the sandbox was refused, oldest first."""
        return self._read_denials(self._known[sandbox_id].slot)

    def stray_denials(self) -> list[Denial]:
        """What was refused to sockets and links of no sandbox."""
        return self._read_denials(UNKNOWN_SLOT)

    def counters(self, sandbox_id: str) -> Counters:
        return self._read_counters(self._known[sandbox_id].slot)

    def stray_counters(self) -> Counters:
        return self._read_counters(UNKNOWN_SLOT)

    def close(self) -> None:
        """Let go of the table; everything in force stays in force. Idempotent."""
        if self._lock_fd >= 0:
            self._bpf.close()
            os.close(self._lock_fd)
            self._lock_fd = -1

    # --- below, the lock is held or not yet shared

    def _adopt(self) -> None:
        """Read what the kernel holds; finish or undo what a killed predecessor left half done."""
        for key, value in self._sandboxes.items():
            self._known[layout.unpack_sandbox_id(key)] = Sandbox.unpack(value)
        live = {known.slot for known in self._known.values()}
        found = {as_u32(key): InForce.unpack(value) for key, value in self._slots.items()}
        self._slots.delete_many([u32(slot) for slot in found if slot not in live])
        self._in_force = {slot: found.get(slot, InForce()) for slot in live}
        self._adopt_rules()
        for owners in (self._cgroups, self._links):
            owners.delete_many([k for k, slot in owners.items() if as_u32(slot) not in live])
        stale = [k for k, _ in self._counts.items() if as_u32(k) not in live | {UNKNOWN_SLOT}]
        self._counts.delete_many(stale)
        if self._counts.get(u32(UNKNOWN_SLOT)) is None:
            self._counts.put(u32(UNKNOWN_SLOT), Counters().pack())
        self._denials.delete_many(
            [k for k, _ in self._denials.items() if as_u32(k[:4]) not in live | {UNKNOWN_SLOT}]
        )
        self._last_slot = max(live, default=UNKNOWN_SLOT)
        for known in self._known.values():
            if known.ifindex:
                self._reattach(known.ifindex)

    def _attach(self) -> None:
        """Also when the node's cgroup was removed and made anew: the links of the old one died."""
        if self._cgroup.stat().st_ino != self._attached_to:
            self._attached_to = attach_to_cgroup(self._bpf, self._cgroup, self._directory)

    def _adopt_rules(self) -> None:
        leftovers: list[bytes] = []
        for key, verdict in self._rules.items():
            slot, generation = layout.rule_owner(key)
            active = self._in_force.get(slot)
            if active and active.generation == generation:
                self._loaded[slot].setdefault(generation, {})[key] = verdict
            else:
                leftovers.append(key)
        self._rules.delete_many(leftovers)

    def _reattach(self, ifindex: int) -> None:
        try:
            self._hook.attach(ifindex)
        except OSError:
            # Gone with its sandbox; what is still there keeps the program it has.
            if _is_there(ifindex):
                raise

    def _free_slot(self) -> int:
        """The next number in turn, so that one is not used again soon after it was free."""
        slot = self._last_slot % _U32_MAX + 1
        while slot in self._in_force:
            slot = slot % _U32_MAX + 1
        return slot

    def _refuse_foreign(self, record: Sandbox) -> None:
        cgroup_owner = self._cgroups.get(u64(record.cgroup_id))
        if cgroup_owner is not None and as_u32(cgroup_owner) != record.slot:
            raise BusyError(f"cgroup {record.cgroup_id}", "another sandbox was registered for it")
        link_owner = self._links.get(u32(record.ifindex)) if record.ifindex else None
        if link_owner is not None and as_u32(link_owner) != record.slot:
            raise BusyError(f"interface {record.ifindex}", "another sandbox was registered for it")

    def _unlink(self, known: Sandbox) -> None:
        self._cgroups.delete(u64(known.cgroup_id))
        if known.ifindex:
            self._links.delete(u32(known.ifindex))

    def _drop_generation(self, slot: int, generation: int) -> None:
        self._rules.delete_many(self._loaded[slot].pop(generation, {}))

    def _drop_denials(self, slot: int) -> None:
        if self._read_counters(slot).recorded:
            mine = [k for k, _ in self._denials.items() if as_u32(k[:4]) == slot]
            self._denials.delete_many(mine)

    def _read_denials(self, slot: int) -> list[Denial]:
        mine = [Denial.unpack(k, v) for k, v in self._denials.items() if as_u32(k[:4]) == slot]
        return sorted(mine, key=lambda denial: denial.last_boottime_ns)

    def _read_counters(self, slot: int) -> Counters:
        raw = self._counts.get(u32(slot))
        return Counters.unpack(raw) if raw else Counters()


def _pack(slot: int, generation: int, rules: Collection[Rule]) -> dict[bytes, bytes]:
    """Keys and verdicts; of two rules that differ only in their verdict the denying one counts."""
    ordered = sorted(rules, key=lambda rule: not rule.allow)
    return {
        layout.pack_rule(slot, generation, rule): layout.ALLOW if rule.allow else layout.DENY
        for rule in ordered
    }


def _is_there(ifindex: int) -> bool:
    """Asked by number: of an interface on its way out, sysfs answers EINVAL."""
    try:
        socket.if_indextoname(ifindex)
    except OSError:
        return False
    return True


def _depth(cgroup: Path) -> int:
    """Levels between a cgroup and the root of its hierarchy, which is where the device changes."""
    device = cgroup.stat().st_dev
    levels = 0
    while cgroup.parent.stat().st_dev == device:
        cgroup = cgroup.parent
        levels += 1
    return levels
