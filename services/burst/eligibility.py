"""May a request go to the cloud? A function of the request and of what the operator allows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from libdsec.wire.burst import BurstQuestion
from libdsec.wire.sandbox import Backend


@dataclass(frozen=True)
class Ruling:
    eligible: bool
    reason: str


@dataclass(frozen=True)
class CloudRules:
    """`projects` empty: every project may; `synced`: digests that the cloud's store has."""

    synced: Collection[str]
    projects: Collection[str] = ()


def may_leave(question: BurstQuestion, rules: CloudRules) -> Ruling:
    """The first rule that holds a request back, or that none does."""
    if question.spec.backend is not Backend.CONTAINER:
        return Ruling(False, f"{question.spec.backend} sandboxes stay local; only containers leave")
    if rules.projects and question.project not in rules.projects:
        return Ruling(False, f"project {question.project} does not allow the cloud")
    missing = [digest for digest in question.digests if digest not in rules.synced]
    if missing or not question.digests:
        return Ruling(False, f"{len(missing)} of {len(question.digests)} layers are not there")
    return Ruling(True, "a container whose layers are all there")
