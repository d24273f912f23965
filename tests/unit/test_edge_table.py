"""What the journal says of sandboxes, and who may learn what about one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from libdsec.errors import DeathReason, InvalidArgument, NotFound, SandboxDead, Unavailable
from libdsec.wire.ids import new_sandbox_id
from libdsec.wire.layer import ImageConfig
from libdsec.wire.sandbox import Lifetime, SandboxSpec, State
from services.chassis.clock import Clock
from services.edge.adoption import promises
from services.edge.clocks import Clocks
from services.edge.holding import Holding
from services.edge.journal import Journal
from services.edge.record import Dead, NodeRecord, Origin, Records, Status
from services.edge.sandbox import Sandbox
from services.edge.table import DEAD_RETENTION_S, Table

SECRET = "a-secret-value"


class SetClock(Clock):
    wall = 1000.0
    mono = 50.0

    def wall_s(self) -> float:
        return self.wall

    def monotonic_s(self) -> float:
        return self.mono


def origin(project: str = "p", incarnation: str = "aaaaaa", **spec: object) -> Origin:
    return Origin(
        sandbox_id=new_sandbox_id("n1", incarnation),
        project=project,
        request_id="r1",
        index=0,
        spec=SandboxSpec(image="base@1", secrets={"TOKEN": SECRET}, **spec),  # type: ignore[arg-type]
        image=ImageConfig(),
        digests=("d1",),
        created_at=1.0,
    )


def sandbox(of: Origin, state: State = State.READY) -> Sandbox:
    holding = cast("Holding", SimpleNamespace())
    return Sandbox(of, Status(state=state), holding, Clocks(Lifetime(), 0), journaled=True)


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
async def records(tmp_path: Path):
    journal = Journal.open(tmp_path)
    yield Records(journal)
    journal.close()


@pytest.fixture
def table(records: Records, clock: SetClock) -> Table:
    return Table("n1", "aaaaaa", records, clock)


async def test_another_projects_sandbox_is_unknown_dead_or_alive(table: Table) -> None:
    one = sandbox(origin())
    table.add(one)
    assert table.find("p", one.id) is one
    with pytest.raises(NotFound):
        table.find("q", one.id)
    table.bury(dead_of(one.origin))
    with pytest.raises(NotFound):
        table.find("q", one.id)


async def test_a_dead_sandbox_is_told_with_its_reason_until_it_is_forgotten(
    table: Table, clock: SetClock, records: Records
) -> None:
    one = sandbox(origin())
    table.add(one)
    table.bury(dead_of(one.origin, DeathReason.OOM, at=clock.wall))
    with pytest.raises(SandboxDead) as caught:
        table.find("p", one.id)
    assert caught.value.reason is DeathReason.OOM
    clock.wall += DEAD_RETENTION_S + 1
    table.forget_old()
    with pytest.raises(NotFound):
        table.find("p", one.id)
    assert records.dead() == []


async def test_the_dead_are_bounded_and_the_oldest_are_forgotten(
    table: Table, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.edge.table.DEAD_LIMIT", 20)
    first, last = origin(), origin()
    table.bury(dead_of(first, at=clock.wall))
    for _ in range(19):
        table.bury(dead_of(origin(), at=clock.wall))
    assert table.dead(first.sandbox_id) is not None
    table.bury(dead_of(last, at=clock.wall))
    assert table.dead(first.sandbox_id) is None
    assert table.dead(last.sandbox_id) is not None


async def test_an_id_of_an_earlier_incarnation_was_lost_with_the_node(table: Table) -> None:
    with pytest.raises(SandboxDead) as caught:
        table.find("p", origin(incarnation="bbbbbb").sandbox_id)
    assert caught.value.reason is DeathReason.NODE_LOST
    with pytest.raises(NotFound):
        table.find("p", origin().sandbox_id)
    with pytest.raises(InvalidArgument):
        table.find("p", "not-an-id")


async def test_what_starts_or_ends_cannot_be_used(table: Table) -> None:
    one = sandbox(origin(), State.ACCEPTED)
    table.add(one)
    with pytest.raises(Unavailable):
        table.find("p", one.id)
    assert table.find_any("p", one.id) is one
    ready = sandbox(origin())
    ready.status = Status(state=State.READY, ending=DeathReason.EXPIRED)
    table.add(ready)
    with pytest.raises(SandboxDead) as caught:
        table.find("p", ready.id)
    assert caught.value.reason is DeathReason.EXPIRED


async def test_a_selection_needs_all_labels_and_the_project(table: Table) -> None:
    match = sandbox(origin(labels={"job": "1", "rollout": "7"}))
    for one in (match, sandbox(origin(labels={"job": "1"})), sandbox(origin("q"))):
        table.add(one)
    assert table.select("p", {"job": "1", "rollout": "7"}) == [match]
    assert len(table.select(None, {})) == 3


async def test_no_listing_holds_a_secret(table: Table, clock: SetClock) -> None:
    info = sandbox(origin(env={"A": "b"})).info("n1", clock)
    assert SECRET not in info.encode().decode()


async def test_records_survive_and_a_burial_leaves_only_the_dead(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    records = Records(journal)
    alive, gone = origin(), origin()
    for one in (alive, gone):
        records.save(one, Status(state=State.READY, lived_s=3.5))
    records.bury(dead_of(gone, DeathReason.KILLED))
    records.save_node(NodeRecord(incarnation="aaaaaa", cordoned=True))
    journal.close()
    journal = Journal.open(tmp_path)
    again = Records(journal)
    assert again.alive() == [(alive, Status(state=State.READY, lived_s=3.5))]
    assert [d.reason for d in again.dead()] == [DeathReason.KILLED]
    node = again.node()
    assert node is not None
    assert node.cordoned
    journal.close()


async def test_a_crash_between_the_lines_of_a_burial_never_revives(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    records, one = Records(journal), origin()
    records.save(one, Status())
    journal.put(f"dead.{one.sandbox_id}", dead_of(one).encode())  # and no further
    assert records.alive() == []
    assert journal.get(f"origin.{one.sandbox_id}") is None
    journal.close()


async def test_a_record_nobody_understands_is_set_aside(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    records, good = Records(journal), origin()
    records.save(good, Status())
    journal.put("origin.n1_aaaaaa_bad", b'{"sandbox_id": 5}')
    assert [o.sandbox_id for o, _ in records.alive()] == [good.sandbox_id]
    assert journal.quarantined == 1
    assert journal.get("origin.n1_aaaaaa_bad") is None
    journal.close()


@pytest.mark.parametrize("kind", ["origin", "status"])
async def test_a_sandbox_whose_record_is_damaged_is_known_to_be_lost(
    tmp_path: Path, kind: str
) -> None:
    journal = Journal.open(tmp_path)
    records, bad, good = Records(journal), origin(), origin()
    for one in (bad, good):
        records.save(one, Status())
    journal.close()
    text = (tmp_path / "journal").read_bytes()
    name = f"{kind}.{bad.sandbox_id} ".encode()
    (tmp_path / "journal").write_bytes(text.replace(name + b"{", name + b"["))
    journal = Journal.open(tmp_path)
    records = Records(journal)
    assert [o.sandbox_id for o, _ in records.alive()] == [good.sandbox_id]
    assert records.lost() == {bad.sandbox_id}
    journal.close()


def dead_of(one: Origin, reason: DeathReason = DeathReason.STOPPED, at: float = 1000.0) -> Dead:
    return Dead(
        sandbox_id=one.sandbox_id,
        project=one.project,
        request_id=one.request_id,
        reason=reason,
        at=at,
    )


async def test_a_promise_nobody_understands_is_set_aside(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    journal.put("placement.held.p/r1", b'{"epoch": 1, "accepted_ms": 1}')
    journal.put("placement.held.p/r2", b'{"epoch": "of another kind"}')
    assert [key for key, _ in promises(journal)] == ["placement.held.p/r1"]
    assert journal.quarantined == 1
    journal.close()
