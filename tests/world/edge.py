"""A node of the small DSec: its sandboxes, their life, its layers."""

from __future__ import annotations

import hashlib
import io
import tarfile
import time
from pathlib import Path
from typing import Any

from libdsec.bus import Bus, Call
from libdsec.errors import (
    AlreadyExists,
    Conflict,
    DataLoss,
    DeathReason,
    InvalidArgument,
    NotFound,
    SandboxDead,
)
from libdsec.wire.envelope import Rpc
from libdsec.wire.ids import new_incarnation, new_sandbox_id
from libdsec.wire.layer import (
    LayerInfo,
    LayerListing,
    LayerQuery,
    PublishBegin,
    PublishChunk,
    PublishCommit,
    PublishProgress,
    PublishStarted,
)
from libdsec.wire.model import Empty
from libdsec.wire.node import NodeCapabilities, NodeCommand
from libdsec.wire.sandbox import (
    AuditLog,
    ById,
    Denial,
    ExtendSandbox,
    Listing,
    ManyOutcome,
    PauseResult,
    PauseSandbox,
    PolicyApplied,
    ResumeResult,
    SandboxInfo,
    SandboxMetrics,
    SandboxSpec,
    Selection,
    SetNetwork,
    SetPhase,
    State,
    StopSandbox,
)
from libdsec.wire.subjects import (
    AUDIT,
    EXTEND,
    INFO,
    LAYER_BEGIN,
    LAYER_CHUNK,
    LAYER_COMMIT,
    LAYER_INFO,
    LAYER_LIST,
    LAYER_REMOVE,
    LIST,
    METRICS,
    NODE_CAPABILITIES,
    NODE_CORDON,
    NODE_DRAIN,
    NODE_UNCORDON,
    PAUSE,
    PAUSE_MANY,
    Q_LAYERS,
    REPORT_SPANS,
    RESUME,
    RESUME_MANY,
    SET_NETWORK,
    SET_PHASE,
    STOP,
    STOP_MANY,
    TRACE,
)
from libdsec.wire.trace import ReportSpans, SpanRecord, Spans, TraceQuery

from .commands import Commands
from .tree import Tree

CHUNK_BYTES = 64 << 10


class Box:
    """One sandbox's state."""

    def __init__(self, info: SandboxInfo, spec: SandboxSpec, project: str) -> None:
        self.info = info
        self.spec = spec
        self.project = project
        self.network = spec.policy.network

    def become(self, **changes: object) -> SandboxInfo:
        self.info = self.info.model_copy(update=changes)
        return self.info


class Edge:
    """Serves everything an edge does, `commands` and `tree` included."""

    def __init__(self, node: str, home: Path) -> None:
        self.node = node
        self.incarnation = new_incarnation()
        home.mkdir(parents=True, exist_ok=True)
        self.home = home
        self.commands = Commands(home)
        self.tree = Tree(home)
        self.boxes: dict[str, Box] = {}
        self.stops: list[str] = []
        self.spans: list[SpanRecord] = []
        self.layers: dict[str, LayerInfo] = {}
        self.archives: dict[str, bytes] = {}
        self.orders: list[str] = []
        self._uploads: dict[str, tuple[PublishBegin, bytearray]] = {}

    async def serve(self, bus: Bus) -> None:
        self.bus = bus
        await self.commands.serve(bus, self.node)
        await self.tree.serve(bus, self.node)
        own: tuple[tuple[Any, Any], ...] = (
            (INFO, self.info), (METRICS, self.metrics), (PAUSE, self.pause), (RESUME, self.resume),
            (EXTEND, self.extend), (SET_NETWORK, self.set_network), (SET_PHASE, self.set_phase),
            (AUDIT, self.audit), (STOP, self.stop), (LAYER_CHUNK, self.chunk),
            (LAYER_COMMIT, self.commit),
        )  # fmt: skip
        scattered: tuple[tuple[Any, Any], ...] = (
            (LIST, self.list), (PAUSE_MANY, self.pause_many), (RESUME_MANY, self.resume_many),
            (STOP_MANY, self.stop_many), (TRACE, self.trace),
        )  # fmt: skip
        shared: tuple[tuple[Any, Any], ...] = (
            (LAYER_BEGIN, self.begin), (LAYER_LIST, self.list_layers),
            (LAYER_INFO, self.layer_info), (LAYER_REMOVE, self.remove_layer),
        )  # fmt: skip
        for rpc, handler in own:
            await bus.serve(rpc, handler, project="*", node=self.node)
        for rpc, handler in scattered:
            await bus.serve(rpc, handler, project="*")
        for rpc, handler in shared:
            await bus.serve(rpc, handler, project="*", queue=Q_LAYERS)
        await self._serve_order("cordon", NODE_CORDON)
        await self._serve_order("uncordon", NODE_UNCORDON)
        await self._serve_order("drain", NODE_DRAIN)
        await bus.serve(NODE_CAPABILITIES, self.capabilities, node=self.node)
        await bus.subscribe(REPORT_SPANS, self.report, project="*", node=self.node)

    async def _serve_order(self, verb: str, rpc: Rpc[NodeCommand, Empty]) -> None:
        async def order(message: NodeCommand, call: Call) -> Empty:
            self.orders.append(f"{verb} {message.node}")
            return Empty()

        await self.bus.serve(rpc, order, node=self.node)

    async def close(self) -> None:
        await self.commands.close()

    def accept(self, spec: SandboxSpec, project: str, request_id: str) -> str:
        """A new sandbox, ready at once."""
        if spec.image == "missing":
            raise NotFound(f"there is no layer {spec.image!r}", hint="`dsec layers list` shows all")
        sandbox_id = new_sandbox_id(self.node, self.incarnation)
        info = SandboxInfo(
            sandbox_id=sandbox_id, node=self.node, backend=spec.backend, state=State.READY,
            labels=spec.labels, image=spec.image, created_at=time.time(), phase=spec.phase,
            request_id=request_id, phases_ms={"start": 1.0}, generation=1,
        )  # fmt: skip
        self.boxes[sandbox_id] = Box(info, spec, project)
        return sandbox_id

    def kill(self, sandbox_id: str, reason: DeathReason) -> None:
        self.boxes[sandbox_id].become(state=State.DEAD, death=reason.value)

    def box(self, sandbox_id: str, call: Call, *, dead: bool = False) -> Box:
        box = self.boxes.get(sandbox_id)
        if box is None or box.project != call.project:
            raise NotFound(f"sandbox {sandbox_id} is not here")
        if box.info.state is State.DEAD and not dead:
            raise SandboxDead.for_reason(sandbox_id, box.info.death)
        return box

    async def info(self, message: ById, call: Call) -> SandboxInfo:
        return self.box(message.sandbox_id, call, dead=True).info

    async def metrics(self, message: ById, call: Call) -> SandboxMetrics:
        self.box(message.sandbox_id, call)
        return SandboxMetrics(
            cpu_usage_s=1.5, memory_bytes=1 << 20, memory_limit_bytes=1 << 30, swap_bytes=0,
            disk_bytes=0, disk_limit_bytes=1 << 30, processes=2, oom_kills=0,
        )  # fmt: skip

    async def pause(self, message: PauseSandbox, call: Call) -> PauseResult:
        info = self.box(message.sandbox_id, call).become(state=State.PAUSED)
        return PauseResult(
            state=info.state, frozen_ms=1.0, reclaimed_bytes=7 if message.reclaim else 0,
            resident_bytes=1,
        )  # fmt: skip

    async def resume(self, message: ById, call: Call) -> ResumeResult:
        info = self.box(message.sandbox_id, call).become(state=State.READY)
        return ResumeResult(state=info.state, paused_s=0.5, thaw_ms=1.0)

    async def extend(self, message: ExtendSandbox, call: Call) -> SandboxInfo:
        box = self.box(message.sandbox_id, call)
        now = time.time()
        return box.become(
            idle_expires_at=now + message.idle_timeout_s if message.idle_timeout_s else None,
            expires_at=now + message.max_lifetime_s if message.max_lifetime_s else None,
        )

    async def set_network(self, message: SetNetwork, call: Call) -> PolicyApplied:
        box = self.box(message.sandbox_id, call)
        box.network = message.network
        return PolicyApplied(generation=box.become(generation=box.info.generation + 1).generation)

    async def set_phase(self, message: SetPhase, call: Call) -> PolicyApplied:
        box = self.box(message.sandbox_id, call)
        if message.name not in box.spec.phases:
            raise InvalidArgument(f"there is no phase {message.name!r}")
        info = box.become(phase=message.name, generation=box.info.generation + 1)
        return PolicyApplied(generation=info.generation)

    async def audit(self, message: ById, call: Call) -> AuditLog:
        self.box(message.sandbox_id, call)
        denial = Denial(at=1.0, kind="network", process="curl", target="tcp 10.0.0.5:443", count=3)
        return AuditLog(denials=(denial,))

    async def stop(self, message: StopSandbox, call: Call) -> SandboxInfo:
        self.stops.append(message.sandbox_id)
        box = self.box(message.sandbox_id, call)
        return box.become(state=State.DEAD, death=message.reason)

    def _selected(self, selection: Selection, call: Call) -> list[Box]:
        return [
            box
            for box in self.boxes.values()
            if box.project == call.project
            and box.info.state is not State.DEAD
            and selection.labels.items() <= box.info.labels.items()
        ]

    async def list(self, selection: Selection, call: Call) -> Listing:
        found = [box.info for box in self._selected(selection, call)]
        kept = found[: selection.limit]
        return Listing(node=self.node, sandboxes=tuple(kept), dropped=len(found) - len(kept))

    async def pause_many(self, selection: Selection, call: Call) -> ManyOutcome:
        return self._many(selection, call, State.PAUSED)

    async def resume_many(self, selection: Selection, call: Call) -> ManyOutcome:
        return self._many(selection, call, State.READY)

    async def stop_many(self, selection: Selection, call: Call) -> ManyOutcome:
        return self._many(selection, call, State.DEAD)

    def _many(self, selection: Selection, call: Call, state: State) -> ManyOutcome:
        found = self._selected(selection, call)
        if not selection.dry_run:
            for box in found:
                box.become(state=state)
        return ManyOutcome(node=self.node, done=tuple(box.info.sandbox_id for box in found))

    # --- traces, orders, layers -----------------------------------------------------------------

    async def report(self, message: ReportSpans, call: Call) -> None:
        self.spans.extend(message.spans)

    async def trace(self, query: TraceQuery, call: Call) -> Spans:
        asked = [
            span
            for span in self.spans
            if span.trace_id == query.trace_id
            or span.attributes.get("messaging.message.conversation_id") == query.request_id
        ]
        return Spans(service="edge", instance=self.node, spans=tuple(asked))

    async def capabilities(self, message: Empty, call: Call) -> NodeCapabilities:
        return NodeCapabilities(
            node=self.node, facts={"kvm": "no"}, reasons={"kvm": "no /dev/kvm on this machine"}
        )

    async def begin(self, message: PublishBegin, call: Call) -> PublishStarted:
        upload_id = f"up{len(self._uploads)}"
        self._uploads[upload_id] = (message, bytearray())
        return PublishStarted(
            node=self.node, upload_id=upload_id, chunk_bytes=CHUNK_BYTES, expires_s=60
        )

    async def chunk(self, message: PublishChunk, call: Call) -> PublishProgress:
        data = self._uploads[message.upload_id][1]
        if message.offset > len(data):
            raise Conflict(f"chunk at {message.offset}, {len(data)} are here")
        data[message.offset :] = message.data
        return PublishProgress(received=len(data))

    async def commit(self, message: PublishCommit, call: Call) -> LayerInfo:
        begin, data = self._uploads.pop(message.upload_id)
        if hashlib.sha256(data).hexdigest() != message.sha256 or len(data) != message.size_bytes:
            raise DataLoss("the archive is not what was sent")
        version = begin.version or str(1 + sum(i.name == begin.name for i in self.layers.values()))
        ref = f"{call.project}/{begin.name}@{version}"
        if ref in self.layers:
            raise AlreadyExists(f"layer {ref} is there", hint="publish another version")
        with tarfile.open(fileobj=io.BytesIO(bytes(data))) as archive:
            files = sum(member.isfile() for member in archive)
        self.archives[ref] = bytes(data)
        self.layers[ref] = LayerInfo(
            space=call.project, name=begin.name, version=version, kind=begin.kind, files=files,
            digest=hashlib.blake2b(bytes(data), digest_size=32).hexdigest(), config=begin.config,
            size_bytes=len(data), created_at=time.time(),
        )  # fmt: skip
        return self.layers[ref]

    async def list_layers(self, query: LayerQuery, call: Call) -> LayerListing:
        found = [i for i in self.layers.values() if query.kind in (None, i.kind)]
        kept = found[: query.limit]
        return LayerListing(layers=tuple(kept), dropped=len(found) - len(kept))

    async def layer_info(self, query: LayerQuery, call: Call) -> LayerInfo:
        for info in reversed(self.layers.values()):
            if query.ref in (info.ref, f"{info.name}@{info.version}", info.name):
                return info
        raise NotFound(f"there is no layer {query.ref!r}")

    async def remove_layer(self, query: LayerQuery, call: Call) -> LayerInfo:
        return self.layers.pop((await self.layer_info(query, call)).ref)
