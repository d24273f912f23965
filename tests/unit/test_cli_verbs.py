"""The `dsec` command against a small DSec: what it prints, and what it leaves with."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from libdsec import DeathReason, SandboxDead, Unavailable, client
from libdsec.cli.app import app
from libdsec.wire.deadletter import DeadLetter
from libdsec.wire.node import NodeState
from libdsec.wire.placement import PlaceRequest
from tests.world.memory import MemoryServer, memory_bus
from tests.world.world import World

Dsec = Callable[..., Result]


@pytest.fixture
def world(
    tmp_path: Path, memory: MemoryServer, unconfigured: Path, monkeypatch: pytest.MonkeyPatch
) -> World:
    """Each command has an event loop of its own, so the world is served anew on each of them."""
    world = World(tmp_path / "w", nodes=2)
    monkeypatch.setattr("libdsec.placing._LINGER_S", 0.05)
    monkeypatch.setattr("libdsec.operations._TRACE_S", 0.1)
    opening = client.DSecClient.open

    async def open_in_the_world(self: client.DSecClient) -> None:
        memory.subscriptions.clear()
        world.buses.clear()
        await world.start(lambda name: memory_bus(memory, name))
        await opening(self)

    monkeypatch.setattr(client.DSecClient, "open", open_in_the_world)
    return world


@pytest.fixture
def dsec(world: World, monkeypatch: pytest.MonkeyPatch) -> Dsec:
    monkeypatch.setenv("DSEC_SERVERS", "memory://")

    def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(app, [*arguments], input=stdin)

    return run


@pytest.fixture
def sandbox(dsec: Dsec) -> str:
    done = dsec("create", "busybox", "--label", "job=a")
    assert done.exit_code == 0, done.stderr
    return str(done.stdout.strip())


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_create_prints_ids_or_a_json_line_each(dsec: Dsec, world: World) -> None:
    plain = dsec("create", "busybox", "-n", "3", "--service", "pypi", "-e", "A=b=c")
    assert plain.exit_code == 0
    ids = plain.stdout.split()
    assert len(ids) == 3
    spec, *others = [box.spec for edge in world.edges for box in edge.boxes.values()]
    assert others == [spec, spec]
    assert spec.env == {"A": "b=c"}
    assert spec.policy.network.mode == "allow"
    [made] = lines(dsec("create", "busybox", "--json").stdout)
    assert set(made) == {"sandbox_id", "node", "request_id", "phases_ms"}
    assert dsec("create", "busybox", "--memory-mib", "32").exit_code == 0  # below shm's default
    refused = dsec("create", "busybox", "--memory-mib", "1")
    assert (refused.exit_code, "16 to 1,048,576" in refused.stderr) == (2, True)


def test_exit_codes_tell_who_is_at_fault(dsec: Dsec, world: World, sandbox: str) -> None:
    assert dsec("exec", sandbox, "true").exit_code == 0
    failed = dsec("exec", sandbox, "-c", "exit 7")
    assert (failed.exit_code, "ended with 7" in failed.stderr) == (1, True)
    assert dsec("exec", sandbox).exit_code == 2
    assert dsec("nonsense").exit_code == 2
    assert dsec("create", "busybox", "--backend", "docker").exit_code == 2
    assert dsec("create", "busybox", "--label", "novalue").exit_code == 2
    assert dsec("exec", "n1_aaaaaa_bbbbbbbbbbbb", "true").exit_code == 3
    assert dsec("create", "missing").exit_code == 3


def test_an_error_has_its_hint_and_request_id(dsec: Dsec) -> None:
    plain = dsec("create", "missing")
    assert plain.stdout == ""
    assert "dsec: there is no layer 'missing'" in plain.stderr
    assert "hint: `dsec layers list`" in plain.stderr
    assert "(dsec trace " in plain.stderr
    [told] = lines(dsec("create", "missing", "--json").stderr)
    error = told["error"]
    assert isinstance(error, dict)
    assert error["code"] == "not_found"
    assert error["request_id"]


def test_without_dsec_it_says_what_to_do(unconfigured: Path) -> None:
    done = CliRunner().invoke(app, ["ps"])
    assert done.exit_code == 3
    assert "dsec up" in done.stderr


def test_exec_passes_bytes_through(dsec: Dsec, sandbox: str) -> None:
    done = dsec("exec", sandbox, "-c", r"printf 'a\377b'; echo err >&2")
    assert done.stdout_bytes == b"a\xffb"
    assert done.stderr == "err\n"
    fed = dsec("exec", "-i", sandbox, "cat", stdin=b"\x00in")
    assert fed.stdout_bytes == b"\x00in"
    options = dsec("exec", sandbox, "--", "echo", "--json", "-n")
    assert options.stdout == "--json -n\n"
    [result] = lines(dsec("exec", "--json", sandbox, "-c", r"printf '\377'; exit 3").stdout)
    assert result["exit_code"] == 3
    assert result["stdout_base64"] == "/w=="


def test_exec_that_times_out_failed_with_what_it_printed(dsec: Dsec, sandbox: str) -> None:
    done = dsec("exec", "--timeout", "0.3", sandbox, "-c", "echo begun; sleep 30")
    assert (done.exit_code, done.stdout) == (1, "begun\n")
    assert "timeout of 0.3 s" in done.stderr
    told = dsec("exec", "--json", "--timeout", "0.3", sandbox, "-c", "echo begun; sleep 30")
    [result] = lines(told.stdout)
    assert (told.exit_code, result["stdout"], result["timed_out"]) == (1, "begun\n", True)
    assert "exec_timeout" in told.stderr


def test_exec_whose_reader_has_left_ends_the_command(
    dsec: Dsec, world: World, sandbox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(stream: object, piece: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("libdsec.cli.commands._write", closed)
    done = dsec("exec", sandbox, "-c", "echo begun; exec sleep 30")
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", "")
    [command] = world.edge.commands.known.values()
    assert command.done is not None
    assert command.done.signal == 9


def test_shell_runs_lines_and_says_that_nothing_carries_over(dsec: Dsec, sandbox: str) -> None:
    done = dsec("shell", sandbox, stdin="echo one\n\nfalse\necho two\nexit\necho three\n")
    assert done.exit_code == 0
    assert done.stdout == "one\ntwo\n"
    assert "carry over" in done.stderr


def test_cp_goes_both_ways(dsec: Dsec, world: World, sandbox: str, tmp_path: Path) -> None:
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / "d/e/f").write_text("data")
    assert dsec("cp", str(tmp_path / "d"), f"{sandbox}:copy").exit_code == 0
    [done] = lines(dsec("cp", "--json", f"{sandbox}:copy/e/f", str(tmp_path / "back")).stdout)
    assert (done["files"], done["size_bytes"]) == (1, 4)
    assert (tmp_path / "back").read_text() == "data"
    assert dsec("cp", "a", "b").exit_code == 2
    assert dsec("cp", f"{sandbox}:nothing", str(tmp_path / "x")).exit_code == 1
    absent = dsec("cp", "--json", str(tmp_path / "nothing"), f"{sandbox}:x")
    assert absent.exit_code == 1
    [told] = lines(absent.stderr)
    assert told["error"]["code"] == "file_not_found"  # type: ignore[index]


def test_ps_lists_and_names_who_is_silent(dsec: Dsec, world: World, sandbox: str) -> None:
    world.scheduler.states["n2"] = NodeState.LOST
    done = dsec("ps")
    assert sandbox in done.stdout
    assert "ready" in done.stdout
    assert "job=a" in done.stdout
    assert "node n2 did not answer" in done.stderr
    [info] = lines(dsec("ps", "--json", "-l", "job=a").stdout)
    assert info["sandbox_id"] == sandbox
    assert dsec("ps", "--json", "-l", "job=b").stdout == ""


def test_stop_pause_and_resume_by_id_or_label(dsec: Dsec, world: World, sandbox: str) -> None:
    box = world.edge.boxes[sandbox]
    assert dsec("pause", sandbox).exit_code == 0
    assert box.info.state == "paused"
    assert dsec("resume", "-l", "job=a").stdout == f"{sandbox}\n"
    assert box.info.state == "ready"
    assert dsec("stop", "-l", "job=a", "--dry-run").stdout == f"{sandbox}\n"
    assert dsec("create", "busybox", "--label", "job=a").exit_code == 0
    few = dsec("stop", "-l", "job=a", "--limit", "1", "--dry-run")
    assert few.stderr == "dsec: 1 more are left as they are\n"
    assert box.info.state == "ready"
    assert dsec("stop", sandbox).exit_code == 0
    assert box.info.state == "dead"
    gone = dsec("stop", sandbox, "n1_aaaaaa_bbbbbbbbbbbb")
    assert gone.exit_code == 3
    assert "dead: stopped" in gone.stderr
    assert dsec("stop").exit_code == 2
    assert dsec("stop", sandbox, "-l", "job=a").exit_code == 2


def test_layers_are_published_listed_and_removed(dsec: Dsec, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/f").write_text("x")
    made = dsec("layers", "publish", str(tmp_path / "src"), "tool@1", "--kind", "toolkit")
    assert made.stdout.startswith("default/tool@1  toolkit")
    [listed] = lines(dsec("layers", "list", "--json").stdout)
    assert (listed["name"], listed["version"]) == ("tool", "1")
    assert "default/tool@1" in dsec("layers", "list", "--kind", "toolkit").stdout
    assert dsec("layers", "info", "tool").exit_code == 0
    assert dsec("layers", "remove", "tool").exit_code == 2
    assert dsec("layers", "remove", "tool@1").exit_code == 0
    assert dsec("layers", "info", "tool").exit_code == 3
    assert dsec("layers", "publish", str(tmp_path / "no"), "x", "--kind", "base").exit_code == 2


def test_nodes_and_orders_to_them(dsec: Dsec, world: World) -> None:
    done = dsec("nodes")
    assert "n1" in done.stdout
    assert "25%" in done.stdout
    assert [view["state"] for view in lines(dsec("nodes", "--json").stdout)] == ["live", "live"]
    found = dsec("nodes", "--capabilities")
    assert "no /dev/kvm on this machine" in found.stdout
    for verb in ("cordon", "uncordon", "drain"):
        assert dsec(verb, "n1").exit_code == 0
    assert world.edge.orders == ["cordon n1", "uncordon n1", "drain n1"]
    assert dsec("cordon", "NO SUCH").exit_code == 2


def test_the_queue_and_dead_letters(dsec: Dsec, world: World) -> None:
    assert "be.container" in dsec("queue").stdout
    world.scheduler.letters = {
        seq: DeadLetter(
            seq=seq, at=0, subject="a.b", stream="PLACEMENTS", reason="malformed", payload=b"\xff"
        )
        for seq in (4, 5)
    }
    assert "malformed" in dsec("dlq", "list").stdout
    assert "1 more" in dsec("dlq", "list", "--limit", "1").stderr
    assert dsec("dlq", "replay", "4").stdout == "4\n"
    done = dsec("dlq", "discard", "5", "6")
    assert (done.exit_code, done.stdout) == (3, "5\n")
    assert "6: there is no such letter" in done.stderr
    assert world.scheduler.letters == {}


def test_a_request_is_traced_with_its_root(dsec: Dsec, world: World) -> None:
    [made] = lines(dsec("create", "busybox", "--json").stdout)
    request = str(made["request_id"])
    drawn = dsec("trace", request)
    assert drawn.exit_code == 0
    assert "create  libdsec" in drawn.stdout
    assert "not covered by any span" in drawn.stdout
    [found] = lines(dsec("trace", request, "--json").stdout)
    assert found["request_id"] == request
    assert dsec("trace", "0" * 24).exit_code == 3


def test_progress_goes_to_standard_error_only(dsec: Dsec, world: World) -> None:
    async def waits(request: PlaceRequest, call: object) -> None:
        await world.scheduler.tell(request, "no room", position=2)
        await world.scheduler.place_all(request, call)  # type: ignore[arg-type]

    world.scheduler.place = waits
    done = dsec("create", "busybox")
    assert "no room; position 2" in done.stderr
    assert "no room" not in done.stdout


def test_a_large_upload_does_not_fill_a_file_with_progress(dsec: Dsec, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/f").write_bytes(bytes(8 << 20))
    done = dsec("layers", "publish", str(tmp_path / "src"), "big@1", "--kind", "toolkit")
    assert done.exit_code == 0
    assert 1 <= done.stderr.count("publishing big@1: ") < 10  # of 33 pieces


def test_a_create_that_fails_in_part_leaves_with_3_and_prints_the_rest(
    dsec: Dsec, world: World
) -> None:
    async def half(request: PlaceRequest, call: object) -> None:
        made = world.edge.accept(request.spec, "default", request.request_id)
        why = SandboxDead("it fell over", reason=DeathReason.AGENT)
        await world.scheduler.announce(request, {0: made}, {1: why, 2: Unavailable("later")})

    world.scheduler.place = half
    done = dsec("create", "busybox", "-n", "3")
    assert done.exit_code == 3
    assert len(done.stdout.split()) == 1
    assert "it fell over" in done.stderr
    assert "2 of 3 were not made" in done.stderr


def test_a_refused_exec_says_why(dsec: Dsec, world: World, sandbox: str) -> None:
    world.edge.kill(sandbox, DeathReason.OOM)
    done = dsec("exec", sandbox, "true")
    assert (done.exit_code, "oom" in done.stderr) == (3, True)


@pytest.mark.parametrize(
    "verb", ["pack", "project", "quota", "burst", "capacity", "call", "logs x"]
)
def test_verbs_that_are_not_built_say_so(dsec: Dsec, verb: str) -> None:
    done = dsec(*verb.split())
    assert done.exit_code == 3
    assert "yet" in done.stderr


def test_the_version_is_that_of_the_distribution(dsec: Dsec) -> None:
    assert dsec("--version").stdout == f"{metadata.version('libdsec')}\n"
