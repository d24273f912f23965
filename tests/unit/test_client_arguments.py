"""What a caller writes: refused here, by name and with the way out, when it can never work."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from libdsec import (
    DeathReason,
    DSecContainerRunArgs,
    DSecError,
    ExecTimeout,
    FileNotFound,
    InvalidArgument,
    Network,
    Policy,
    SandboxDead,
    errors,
)
from libdsec.spec import build_spec
from libdsec.wire import defaults as d
from libdsec.wire.layer import LayerInfo, LayerKind
from libdsec.wire.sandbox import Backend, Lifetime, NetworkNone, Qos, Resources


def test_the_defaults_are_those_of_the_contract() -> None:
    spec = build_spec({"image": "busybox"})
    assert (spec.backend, spec.qos) == (Backend.CONTAINER, Qos.BEST_EFFORT)
    assert (spec.resources, spec.lifetime) == (Resources(), Lifetime())
    assert spec.policy.network == NetworkNone()
    assert (spec.user, spec.workdir, spec.phase, spec.phases) == (None, None, None, {})


def test_everything_given_travels() -> None:
    layer = LayerInfo(
        space="p", name="repo", version="3", digest="d", kind=LayerKind.WORKSPACE,
        size_bytes=1, files=1, created_at=0,
    )  # fmt: skip
    spec = build_spec(
        {
            "image": "python@1", "workspace": layer, "toolkits": ["a@1", "b"],
            "cpus": 0.5, "memory_mib": 64, "pids": 10, "qos": "latency-sensitive",
            "env": {"A": ""}, "secrets": {"TOKEN": "t"}, "labels": {"job": "j/1"},
            "user": "1000", "workdir": "/w", "idle_timeout_s": 5,
            "policy": Policy(network=Network.allow(rules=["tcp:10.0.0.5:443"])),
        }
    )  # fmt: skip
    assert (spec.workspace, spec.toolkits) == ("p/repo@3", ("a@1", "b"))
    assert spec.model_dump()["policy"]["network"] == {
        "mode": "allow", "services": (), "rules": ("tcp:10.0.0.5:443",)
    }  # fmt: skip
    assert (spec.env, spec.secrets, spec.user) == ({"A": ""}, {"TOKEN": "t"}, "1000")


@pytest.mark.parametrize(
    ("arguments", "complaint", "hint"),
    [
        ({"image": ""}, "image is empty", "name"),
        ({"image": "No Such"}, "layer reference", "name[@version]"),
        ({"backend": "docker"}, "unknown backend 'docker'", "container, microvm, vm"),
        ({"qos": "fast"}, "unknown qos 'fast'", "best-effort"),
        ({"cpus": 0}, "cpus=0 is impossible", "from 0.05 to 256"),
        ({"cpus": float("nan")}, "cpus=nan", "0.05"),
        ({"memory_mib": 1}, "memory_mib=1 is impossible", "from 16 to"),
        ({"memory_mib": 1.5}, "memory_mib=1.5", ""),
        ({"pids": True}, "pids=True", "8"),
        ({"disk_mib": 10**9}, "disk_mib", "16"),
        ({"memory_mib": 64, "shm_mib": 65}, "shm_mib=65 is more than memory_mib=64", "memory"),
        ({"max_lifetime_s": float("inf")}, "max_lifetime_s", "above 0"),
        ({"idle_timeout_s": 0}, "idle_timeout_s", "above 0"),
        ({"labels": {"a b": "c"}}, "label 'a b'", "letters"),
        ({"labels": {"a": "x" * 64}}, "label 'a': value", "63"),
        ({"labels": {f"l{i}": "x" for i in range(65)}}, "65 labels", ""),
        ({"env": {"A-B": "x"}}, "env: 'A-B'", ""),
        ({"env": {"A": 3}}, "env: A", ""),
        ({"env": {"A": "x"}, "secrets": {"A": "y"}}, "both in env and in secrets", ""),
        ({"toolkits": "a@1"}, "toolkits is a list", "['a@1']"),
        ({"toolkits": [f"t{i}" for i in range(101)]}, "101 toolkits", ""),
        ({"workdir": "w"}, "workdir 'w' is not absolute", "/"),
        ({"user": ""}, "user", "root"),
        ({"policy": Policy(), "phases": {"a": Policy()}}, "both policy and phases", "first"),
        ({"phases": {}}, "phases is empty", ""),
        ({"phases": {"a": {}}}, "phase 'a' is a dict", ""),
        ({"policy": {"network": "none"}}, "policy is a dict", ""),
        ({"env": {"A": "x" * (600 << 10)}}, "more than", "files"),
        ({"memory": 5}, "no argument memory", "memory_mib"),
    ],
)
def test_a_mistake_is_named_with_the_way_out(
    arguments: dict[str, Any], complaint: str, hint: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        build_spec({"image": "busybox", **arguments})  # type: ignore[typeddict-item]
    assert complaint in caught.value.message
    assert hint in caught.value.hint


def test_a_secret_is_in_no_message() -> None:
    for secrets in ({"TOKEN": "hunter2\0"}, {"BAD NAME": "hunter2"}):
        with pytest.raises(InvalidArgument) as caught:
            build_spec({"image": "busybox", "secrets": secrets})
        assert "hunter2" not in str(caught.value)


def test_the_first_phase_applies_and_the_order_is_kept() -> None:
    phases = {"setup": Policy(network=Network.public()), "solve": Policy(), "score": Policy()}
    spec = build_spec({"image": "busybox", "phases": phases})
    assert (spec.phase, list(spec.phases)) == ("setup", ["setup", "solve", "score"])
    assert spec.policy == phases["setup"].spec()


def test_policies_and_networks_are_checked_where_they_are_written() -> None:
    for wrong in ({"networks": None}, {"network": "none"}, {"protected_paths": 3}):
        with pytest.raises(InvalidArgument, match="Policy"):
            Policy(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="no field 'networks'"):
        Policy(networks=None)  # type: ignore[call-arg]
    for path in ("tests/**", "/tests/../etc", ""):
        with pytest.raises(InvalidArgument, match="protected"):
            Policy(protected_paths=(path,)).spec()
    with pytest.raises(InvalidArgument, match=r"services=\['pypi'\]"):
        Network.allow(services="pypi")
    with pytest.raises(InvalidArgument, match="rules"):
        Network.allow(rules=["tcp:10.0.0.5:443", " "])


def test_network_rules_of_the_report_allow_only_what_is_true() -> None:
    args = DSecContainerRunArgs(container_image="x", network_rules={"npm": False, "pypi": True})
    assert args.policy().network == Network.allow(services=["pypi"])
    closed = DSecContainerRunArgs(container_image="x", network_rules={"npm": False})
    assert closed.policy().network == Network.none()
    assert (closed.memory_limit_mb, closed.ttl_running_stop) == (d.MEMORY_MIB, d.IDLE_TIMEOUT_S)
    with pytest.raises(InvalidArgument, match="memory_limit"):
        DSecContainerRunArgs(container_image="x", memory_limit=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match="container_image"):
        DSecContainerRunArgs()  # type: ignore[call-arg]


def test_errors_are_named_by_their_class_and_survive_a_pickle() -> None:
    for code, kind in errors.ERRORS.items():
        snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in kind.__name__).lstrip("_")
        assert code == kind.code == snake
        err = kind("what", hint="how", request_id="r", trace_id="t", retry_after_s=2.0)
        back = pickle.loads(pickle.dumps(err))
        assert type(back) is kind
        assert (back.message, back.hint, back.request_id, back.retry_after_s) == (
            "what", "how", "r", 2.0
        )  # fmt: skip
        assert str(back) == "what (how) [request r]"
    dead = pickle.loads(pickle.dumps(SandboxDead("x", reason=DeathReason.OOM)))
    assert dead.reason is DeathReason.OOM
    assert isinstance(pickle.loads(pickle.dumps(ExecTimeout("x"))), DSecError)
    assert FileNotFound("x").errno == 2
