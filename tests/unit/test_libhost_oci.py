"""The container's configuration keeps its promises for every specification."""

from __future__ import annotations

import base64
from typing import Any

from libhost import seccomp
from libhost.oci import CAPABILITIES, ContainerSpec, build_config

FORBIDDEN = {
    "CAP_SYS_ADMIN",
    "CAP_SYS_PTRACE",
    "CAP_NET_RAW",
    "CAP_NET_ADMIN",
    "CAP_SYS_RESOURCE",
    "CAP_SYS_NICE",
    "CAP_MKNOD",
    "CAP_DAC_READ_SEARCH",
}


def config(own_netns: bool = True, **spec: Any) -> dict[str, Any]:
    return build_config(ContainerSpec(hostname="box", **spec), own_netns=own_netns)


def test_capabilities_are_the_floor_and_none_is_inherited() -> None:
    sets = config()["process"]["capabilities"]
    assert set(sets) == {"bounding", "effective", "permitted"}
    assert all(set(names) == set(CAPABILITIES) for names in sets.values())
    assert not FORBIDDEN & set(CAPABILITIES)


def test_no_user_namespace_and_network_only_if_it_has_none() -> None:
    def kinds(own_netns: bool) -> set[str]:
        return {n["type"] for n in config(own_netns=own_netns)["linux"]["namespaces"]}

    assert kinds(True) == {"pid", "ipc", "uts", "mount", "cgroup", "network"}
    assert kinds(False) == kinds(True) - {"network"}


def test_filter_travels_whole() -> None:
    data = config()["annotations"]["run.oci.seccomp_bpf_data"]
    assert base64.b64decode(data) == seccomp.compile_filter()


def test_agent_is_named_by_descriptor_with_its_own() -> None:
    args = config(agent_argv=("--pool-mib", "64"))["process"]["args"]
    assert args[:5] == ["/proc/self/fd/5", "--listen-fd", "3", "--cgroup-fd", "4"]
    assert args[5:] == ["--pool-mib", "64"]


def test_every_mount_is_nosuid_and_none_is_of_the_host() -> None:
    mounts = config(shm_mib=7)["mounts"]
    assert all("nosuid" in m["options"] for m in mounts)
    assert not [m for m in mounts if m["type"] in ("bind", "none")]
    shm = next(m for m in mounts if m["destination"] == "/dev/shm")
    assert "size=7m" in shm["options"]


def test_dangerous_files_are_masked_or_read_only() -> None:
    linux = config()["linux"]
    assert {"/proc/kcore", "/proc/kpagecgroup", "/proc/sysrq-trigger"} <= set(linux["maskedPaths"])
    assert "/proc/sys" in linux["readonlyPaths"]
