"""Programs are started with what they were given and nothing else, and end in time."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from libhost import command
from libhost.command import CommandFailedError


def run(script: str, **options: object) -> command.Completed:
    return command.run(["sh", "-c", script], timeout_s=5, **options)  # type: ignore[arg-type]


def test_streams_and_exit_code_are_kept_apart() -> None:
    done = run("echo out; echo err >&2; exit 3", ok=frozenset({3}))
    assert (done.stdout, done.stderr, done.exit_code) == (b"out\n", b"err\n", 3)


def test_failure_says_what_was_run_and_what_it_said() -> None:
    with pytest.raises(CommandFailedError, match=r"sh -c .* exited with 4: wrong thing"):
        run("echo wrong thing >&2; exit 4")


def test_death_by_signal_is_a_negative_code() -> None:
    assert run("kill -TERM $$", ok=frozenset({-signal.SIGTERM})).exit_code == -signal.SIGTERM


def test_timeout_kills_and_reaps(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="sleep 30"):
        command.run(["sleep", "30"], timeout_s=0.1)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_descendant_that_keeps_the_pipe_delays_nothing() -> None:
    done = run("sleep 30 & echo $!")
    os.kill(int(done.stdout), signal.SIGKILL)


def test_output_is_capped() -> None:
    done = run("head -c 3000000 /dev/zero")
    assert len(done.stdout) == command.CAPTURE_MAX_BYTES


def test_descriptors_arrive_under_their_numbers_whatever_ours_are(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
    first, second = (os.open(tmp_path / name, os.O_RDONLY) for name in ("first", "second"))
    try:
        crossed = {first: second, second: first}
        done = run(f"cat /proc/self/fd/{first} /proc/self/fd/{second}", fds=crossed)
        assert done.stdout == b"secondfirst"
        assert run(f"cat /proc/self/fd/{first}", fds={first: first}).stdout == b"first"
    finally:
        os.close(first)
        os.close(second)


def test_child_has_no_other_descriptor_of_ours(tmp_path: Path) -> None:
    secret = os.open(tmp_path / "secret", os.O_CREAT | os.O_RDWR)
    try:
        assert str(tmp_path) not in run("ls -l /proc/self/fd").stdout.decode()
    finally:
        os.close(secret)


def test_environment_is_small_and_input_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    done = run("cat; env", env={"ADDED": "1"})
    names = {line.split("=")[0] for line in done.stdout.decode().splitlines()}
    assert {"ADDED", "PATH", "LANG"} <= names
    assert "SECRET_TOKEN" not in names


def test_ignored_signals_are_reset() -> None:
    ignored = run("grep SigIgn /proc/self/status").stdout.split()[1]
    assert not int(ignored, 16) & (1 << (signal.SIGPIPE - 1))


def test_log_takes_the_output_and_is_read_on_failure(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    with pytest.raises(CommandFailedError, match="after"):
        run("echo after; exit 1", log=log)
    assert log.read_text() == "before\nafter\n"


def test_missing_program_is_named() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        command.run(["no-such-program"], timeout_s=1)
    assert caught.value.filename == "no-such-program"
