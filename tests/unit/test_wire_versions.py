"""What keeps old and new parts able to read each other."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest

from libdsec.errors import ERRORS, DeathReason, Internal, InvalidArgument, SandboxDead
from libdsec.wire import envelope, ids, subjects
from libdsec.wire.error import ErrorReply
from libdsec.wire.execution import ExecRequest
from libdsec.wire.model import Message
from libdsec.wire.node import Heartbeat, Load
from libdsec.wire.sandbox import NetworkAllow, PolicySpec, SandboxSpec


def declared_models() -> list[type[Message]]:
    models: set[type[Message]] = set()
    for value in vars(subjects).values():
        if isinstance(value, envelope.Rpc | envelope.StreamingRpc):
            models |= {value.request, value.reply}
        elif isinstance(value, envelope.Event | envelope.Bucket):
            models.add(value.message)
    return sorted(models, key=lambda m: m.__name__)


@pytest.mark.parametrize("model", declared_models(), ids=lambda m: m.__name__)
def test_message_tolerates_fields_of_a_newer_sender(model: type[Message]) -> None:
    assert model.model_config.get("extra") == "ignore"
    assert model.model_config.get("frozen") is True


@pytest.mark.parametrize("model", declared_models(), ids=lambda m: m.__name__)
def test_message_says_what_it_is(model: type[Message]) -> None:
    assert inspect.getmodule(model).__name__.startswith("libdsec.wire.")  # type: ignore[union-attr]


@pytest.mark.parametrize("model", declared_models(), ids=lambda m: m.__name__)
def test_none_is_never_another_default(model: type[Message]) -> None:
    """None is left out on the wire, so a reader would put another default in its place."""
    for name, field in model.model_fields.items():
        optional = type(None) in get_args(field.annotation)
        assert not optional or field.default is None, f"{model.__name__}.{name}: {field.default}"


def test_a_command_without_limit_arrives_as_one() -> None:
    unlimited = ExecRequest(sandbox_id="s", exec_id="e", argv=("server",), timeout_s=None)
    assert ExecRequest.model_validate_json(unlimited.encode()).timeout_s is None


def test_older_reader_drops_an_addition_and_keeps_the_rest() -> None:
    spec = SandboxSpec(
        image="python@1", policy=PolicySpec(network=NetworkAllow(services=("pypi",)))
    )
    newer = spec.encode()[:-1] + b',"gpu":{"kind":"any"}}'
    assert SandboxSpec.model_validate_json(newer) == spec


def test_bytes_survive_the_wire_exactly() -> None:
    every_byte = bytes(range(256))
    from libdsec.wire.files import FileChunk

    chunk = FileChunk(data=every_byte, size_bytes=256, eof=True, version="1")
    assert FileChunk.model_validate_json(chunk.encode()).data == every_byte


def test_heartbeat_of_the_longest_names_fits_a_kibibyte() -> None:
    beat = Heartbeat(
        node="n" * 24,
        incarnation="abcdef",
        session="s" * 24,
        seq=2**53,
        backends=("container", "microvm", "vm"),
        capabilities=("publish", "egress", "disk=quota", "protected_paths", "swap", "core_sched"),
        running=100_000,
        paused=100_000,
        creating=100_000,
        max_sandboxes=100_000,
        free_memory_mib=2**30,
        free_disk_mib=2**30,
        load=Load(memory=0.123456789, ls_cpu=0.123456789, creating=0.1234567, sandboxes=0.123456),
    )
    assert len(beat.encode()) <= 1024


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_error_comes_back_as_its_own_class(code: str) -> None:
    err = ERRORS[code]("it broke", hint="mend it", request_id="r1", retry_after_s=1.5)
    back = ErrorReply.model_validate_json(ErrorReply.of(err).encode()).exception()
    assert type(back) is type(err)
    assert (back.message, back.hint, back.request_id, back.retry_after_s) == (
        "it broke", "mend it", "r1", 1.5,
    )  # fmt: skip


def test_death_reason_travels() -> None:
    err = SandboxDead("gone", reason=DeathReason.OOM)
    back = ErrorReply.of(err).exception()
    assert isinstance(back, SandboxDead)
    assert back.reason is DeathReason.OOM


def test_error_of_a_newer_server_keeps_its_name() -> None:
    back = ErrorReply(code="gpu_on_fire", message="hot").exception()
    assert isinstance(back, Internal)
    assert "gpu_on_fire" in back.message


def test_sandbox_id_routes_to_its_node() -> None:
    made = ids.new_sandbox_id("rack-7", ids.new_incarnation())
    assert ids.SANDBOX.fullmatch(made)
    assert ids.sandbox_node(made) == "rack-7"


@pytest.mark.parametrize("bad", ["", "n1", "n1_abc_def", "N1_abcdef_abcdefghjkmn", "a/b_c_d", "*"])
def test_malformed_sandbox_id_is_named(bad: str) -> None:
    with pytest.raises(InvalidArgument, match="sandbox id"):
        ids.sandbox_node(bad)


@pytest.mark.parametrize("bad", ["", "*", "a.b", ">", "A", "x" * 65])
def test_project_that_is_no_subject_token_is_refused(bad: str) -> None:
    with pytest.raises(InvalidArgument, match="project"):
        ids.check_project(bad)


def test_no_two_declarations_share_a_subject() -> None:
    templates = [
        value.template
        for value in vars(subjects).values()
        if isinstance(value, envelope.Rpc | envelope.StreamingRpc | envelope.Event)
    ]
    assert len(templates) == len(set(templates))
