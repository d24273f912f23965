"""One rollout: a sandbox, a recorded model, and a clean sandbox that decides the reward."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from libdsec import DSecClient, Network, Policy
from libdsec.sandbox import Sandbox

from .material import ANSWERS, BASE, TOOLKIT, WORKSPACE
from .recording import BROKEN, FILE, FIXED, HARNESS, REPO, Step

_TEST_TIMEOUT_S = 120.0


@dataclass
class Trajectory:
    """What one rollout did; one line of trajectories.jsonl."""

    rollout: int
    sandbox_id: str = ""
    node: str = ""
    reward: float = 0.0
    tests_before: dict[str, int] = field(default_factory=dict)
    tests_after: dict[str, int] = field(default_factory=dict)
    paused_s: float = 0.0
    reclaimed_bytes: int = 0
    denials: int = 0
    phases_ms: dict[str, float] = field(default_factory=dict)
    create_ms: float = 0.0
    exec_count: int = 0
    request_id: str = ""
    steps: list[dict[str, object]] = field(default_factory=list)
    state: str = "waiting"


Report = Callable[[Trajectory], None]


class Rollout:
    """Plays a recording against a sandbox and reports every change of `trajectory`."""

    def __init__(
        self, client: DSecClient, steps: tuple[Step, ...], index: int, say: Report
    ) -> None:
        self._client = client
        self._steps = steps
        self._say = say
        self.trajectory = Trajectory(rollout=index)

    async def run(self) -> Trajectory:
        t = self.trajectory
        begin = time.perf_counter()
        self._state("creating")
        async with await self._client.create(
            image=BASE,
            workspace=WORKSPACE,
            toolkits=[TOOLKIT],
            cpus=1.0,
            memory_mib=512,
            disk_mib=256,
            policy=Policy(network=Network.allow(services=["pypi"])),
            labels={"job": "demo", "rollout": str(t.rollout)},
            idle_timeout_s=120,
            timeout=60,
        ) as sandbox:
            t.create_ms = (time.perf_counter() - begin) * 1e3
            info = await sandbox.info()
            t.sandbox_id, t.node = sandbox.id, sandbox.node
            t.phases_ms, t.request_id = info.phases_ms, info.request_id
            for step in self._steps:
                await self._step(sandbox, step)
            t.denials = sum(d.count for d in (await sandbox.audit()).denials)
            submission = await self._submission(sandbox)
        self._state("scoring")
        t.reward = await self._score(submission)
        self._state("done")
        return t

    async def _step(self, sandbox: Sandbox, step: Step) -> None:
        if step.pause:
            await self._pause(sandbox, step.idle_s)
        else:
            await asyncio.sleep(step.idle_s)  # the model thinks
        self._state(step.kind)
        if step.kind == "write":
            text = await sandbox.files.read_text(FILE)
            await sandbox.files.write(FILE, text.replace(BROKEN, FIXED).encode())
            self.trajectory.steps.append({"call": "files.write", "path": FILE})
            return
        result = await sandbox.exec(
            list(step.argv), stdin=step.stdin.encode(), timeout=_TEST_TIMEOUT_S
        )
        self.trajectory.exec_count += 1
        self.trajectory.steps.append(
            {"call": " ".join(step.argv)[:200], "exit_code": result.exit_code,
             "duration_s": round(result.duration_s, 3), "stdout": result.stdout[:2000]}
        )  # fmt: skip
        if step.kind == "test":
            self._tests(json.loads(result.stdout))

    def _tests(self, said: dict[str, int]) -> None:
        counts = {"passed": said["passed"], "failed": said["failed"]}
        if self.trajectory.tests_before:
            self.trajectory.tests_after = counts
        else:
            self.trajectory.tests_before = counts

    async def _pause(self, sandbox: Sandbox, idle_s: float) -> None:
        self._state("paused")
        begin = time.perf_counter()
        paused = await sandbox.pause()
        self.trajectory.reclaimed_bytes = paused.reclaimed_bytes
        await asyncio.sleep(idle_s)
        await sandbox.resume()
        self.trajectory.paused_s = time.perf_counter() - begin

    async def _submission(self, sandbox: Sandbox) -> dict[str, bytes]:
        """The files this rollout changed."""
        said = await sandbox.exec(["python3", HARNESS, "changed", REPO])
        names = json.loads(said.stdout)["changed"]
        return {name: await sandbox.files.read(f"{REPO}/{name}") for name in names}

    async def _score(self, submission: dict[str, bytes]) -> float:
        """1.0 if hidden and visible tests pass in a sandbox the rollout has never touched."""
        async with await self._client.create(
            image=BASE,
            workspace=WORKSPACE,
            toolkits=[TOOLKIT, ANSWERS],
            cpus=1.0,
            memory_mib=512,
            disk_mib=128,
            labels={"job": "demo-score", "rollout": str(self.trajectory.rollout)},
            timeout=60,
        ) as judge:
            for name, data in submission.items():
                await judge.files.write(f"{REPO}/{name}", data)
            done = await judge.exec(
                ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "/answers",
                 f"{REPO}/toolz"],
                cwd=REPO, env={"PYTHONPATH": REPO}, timeout=_TEST_TIMEOUT_S,
            )  # fmt: skip
            return 1.0 if done.exit_code == 0 else 0.0

    def _state(self, state: str) -> None:
        self.trajectory.state = state
        self._say(self.trajectory)
