"""What the journal says about sandboxes: what each was asked to be, how it stands, how it ended.

    origin.<id>   Origin: the caller's whole specification; written when its process runs, for good
    status.<id>   Status: small, rewritten at every change of state
    dead.<id>     Dead: kept for a while, so that callers learn why instead of NotFound
    node          NodeRecord: incarnation, cordoned, draining

What was accepted and does not run yet is in the placement ledger's own entries. Times named `_mono`
are CLOCK_MONOTONIC, valid for one boot of the machine: a sandbox does not outlive that either.
Secrets are in `origin` because every later command gets them; root alone can read the journal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import structlog
from pydantic import Field, ValidationError

from libdsec.errors import DeathReason
from libdsec.wire.layer import ImageConfig
from libdsec.wire.model import Message
from libdsec.wire.sandbox import Lifetime, PolicySpec, SandboxSpec, State

from .journal import Journal, JournalFullError

M = TypeVar("M", bound=Message)

_log = structlog.get_logger("edge.record")


class Origin(Message):
    """What a sandbox was asked to be; never changes."""

    sandbox_id: str
    project: str
    request_id: str
    index: int  # of the item within its request
    spec: SandboxSpec
    image: ImageConfig  # of its layers together
    digests: tuple[str, ...]  # of its layers, from the bottom
    created_at: float


class Process(Message):
    """PID 1 as it can be found again."""

    pid: int
    start_ticks: int
    boot_id: str


class Status(Message):
    """What changes while a sandbox lives."""

    state: State = State.ACCEPTED
    process: Process | None = None
    policy: PolicySpec = PolicySpec()
    generation: int = 0
    phase: str | None = None
    policy_env: dict[str, str] = Field(default_factory=dict)
    hosts: dict[str, str] = Field(default_factory=dict)
    hosts_written: bool = True  # /etc/hosts inside says what `hosts` says
    lifetime: Lifetime = Lifetime()
    lived_s: float = 0.0  # of the lifetime, up to `since_mono`
    since_mono: float = 0.0  # when it last began to run, or to be paused
    epoch: int = 0
    ending: DeathReason | None = None  # decided, and being carried out
    phases_ms: dict[str, float] = Field(default_factory=dict)


class Dead(Message):
    """What is left to say about a sandbox that is gone."""

    sandbox_id: str
    project: str
    request_id: str
    reason: DeathReason
    at: float
    detail: str = ""


class NodeRecord(Message):
    incarnation: str
    cordoned: bool = False
    draining: bool = False


class Records:
    """The journal in the edge's own words. What is saved survives the process's end at once, and
    the machine's after `journal.sync()`.

    Promises (`save`, `save_node`) raise JournalFullError. What has happened already does not wait
    for room: a full disk must not keep a sandbox from being paused or stopped. A successor then
    finds an older status, and asks the kernel about whatever the kernel knows.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.unsaved = 0

    def save(self, origin: Origin, status: Status) -> None:
        self.journal.put(f"origin.{origin.sandbox_id}", origin.encode())
        self.journal.put(f"status.{origin.sandbox_id}", status.encode())

    def save_status(self, sandbox_id: str, status: Status) -> None:
        with self._if_there_is_room(sandbox_id):
            self.journal.put(f"status.{sandbox_id}", status.encode())

    def bury(self, dead: Dead) -> None:
        """In this order: whatever a crash cuts off, the id is never forgotten."""
        with self._if_there_is_room(dead.sandbox_id):
            self.journal.put(f"dead.{dead.sandbox_id}", dead.encode())
            self.journal.drop(f"status.{dead.sandbox_id}")
            self.journal.drop(f"origin.{dead.sandbox_id}")

    def forget(self, sandbox_id: str) -> None:
        with self._if_there_is_room(sandbox_id):
            self.journal.drop(f"dead.{sandbox_id}")

    @contextmanager
    def _if_there_is_room(self, sandbox_id: str) -> Iterator[None]:
        try:
            yield
        except JournalFullError as err:
            self.unsaved += 1
            _log.error("not journaled", sandbox=sandbox_id, error=str(err))

    def save_node(self, node: NodeRecord) -> None:
        self.journal.put("node", node.encode())

    def node(self) -> NodeRecord | None:
        text = self.journal.get("node")
        return self._read("node", text, NodeRecord) if text is not None else None

    def lost(self) -> set[str]:
        """Sandboxes that were ready once and of which not enough can be read to keep them.

        Call it after `alive`. Their ids alone are known, so nobody can be told why they are gone;
        but none of them may be started anew as if it had never run.
        """
        damaged = (line.split(b" ", 2)[1] for line in self.journal.damaged if b" " in line)
        keys = [key.decode(errors="replace") for key in damaged]
        keys += [key for key, _ in self.journal.items("status.")]
        ids = {key.partition(".")[2] for key in keys if key.startswith(("origin.", "status."))}
        lost = {i for i in ids if self.journal.get(f"origin.{i}") is None}
        for sandbox_id in lost:
            self.journal.drop(f"status.{sandbox_id}")
        return lost

    def alive(self) -> list[tuple[Origin, Status]]:
        """Every sandbox that ran and was not buried; what cannot be read is set aside."""
        found = []
        for key, text in self.journal.items("origin."):
            sandbox_id = key.partition(".")[2]
            status_key = f"status.{sandbox_id}"
            if self.journal.get(f"dead.{sandbox_id}") is not None:
                self.journal.drop(status_key)
                self.journal.drop(key)
                continue
            origin = self._read(key, text, Origin)
            status = self._read(status_key, self.journal.get(status_key) or b"", Status)
            if origin is not None and status is not None:
                found.append((origin, status))
            elif origin is not None:
                self.journal.set_aside(key)
        return found

    def dead(self) -> list[Dead]:
        found = (self._read(key, text, Dead) for key, text in self.journal.items("dead."))
        return [dead for dead in found if dead is not None]

    def _read(self, key: str, text: bytes, model: type[M]) -> M | None:
        try:
            return model.model_validate_json(text)
        except ValidationError:
            if self.journal.get(key) is not None:
                self.journal.set_aside(key)
            return None
