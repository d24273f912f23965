"""Every subject, stream, durable, bucket and Redis key of DSec, on one screen.

dsec.v1.p.<project>....     what a caller may say; the server's permissions guard the project token
dsec.v1.node.<node>....     inside; a node's credential speaks for its own node only
dsec.v1.nodes...., ops      inside; to all nodes, and from operators
"""

from __future__ import annotations

from . import (
    burst,
    deadletter,
    execution,
    files,
    layer,
    lifecycle,
    node,
    placement,
    policy,
    sandbox,
    snapshot,
    trace,
)
from .defaults import CLAIM_RETENTION_S, LANE_BUCKETS
from .envelope import Bucket, Durable, Event, Rpc, Stream, StreamingRpc
from .ids import bucket_of
from .model import Empty
from .sandbox import Backend, Qos

_EDGE = "dsec.v1.p.{project}.edge.{node}."
_NODE = "dsec.v1.node.{node}."

# --- a caller asks for sandboxes ---
PLACE = Event("dsec.v1.p.{project}.place.{tail}", placement.PlaceRequest)
CANCEL = Rpc("dsec.v1.p.{project}.cancel", placement.CancelRequest, Empty, "a scheduler")


def lane_tail(project: str, qos: Qos, backend: Backend) -> str:
    """The lane a request waits in, as PLACE's tail: class x capability x hash of the project."""
    return f"{qos.lane}.{backend.value}.{bucket_of(project, LANE_BUCKETS):03d}"


def lane_subject(project: str, qos: Qos, backend: Backend) -> str:
    return PLACE.subject(project=project, tail=lane_tail(project, qos, backend))


# --- a caller speaks to a sandbox's edge ---
EXEC = StreamingRpc(_EDGE + "exec", execution.ExecRequest, execution.ExecDone, "the edge")
ATTACH = StreamingRpc(_EDGE + "attach", execution.AttachExec, execution.ExecDone, "the edge")
EXEC_CREDIT = Event(_EDGE + "credit", execution.ExecCredit)
EXEC_INPUT = Rpc(_EDGE + "input", execution.ProcessInput, Empty, "the edge")
EXEC_SIGNAL = Rpc(_EDGE + "signal", execution.ProcessSignal, Empty, "the edge")
PROCESSES = Rpc(_EDGE + "processes", sandbox.ById, execution.ProcessListing, "the edge")
FILE_READ = Rpc(_EDGE + "files.read", files.FileRead, files.FileChunk, "the edge")
FILE_WRITE = Rpc(_EDGE + "files.write", files.FileWrite, files.FileWritten, "the edge")
FILE_LIST = Rpc(_EDGE + "files.list", files.FilePath, files.DirListing, "the edge")
FILE_STAT = Rpc(_EDGE + "files.stat", files.FilePath, files.FileStat, "the edge")
FILE_REMOVE = Rpc(_EDGE + "files.remove", files.FileRemove, Empty, "the edge")
FILE_RENAME = Rpc(_EDGE + "files.rename", files.FileRename, Empty, "the edge")
FILE_MAKE_DIR = Rpc(_EDGE + "files.mkdir", files.FileMakeDir, Empty, "the edge")
FILE_SYMLINK = Rpc(_EDGE + "files.symlink", files.FileSymlink, Empty, "the edge")
INFO = Rpc(_EDGE + "info", sandbox.ById, sandbox.SandboxInfo, "the edge")
METRICS = Rpc(_EDGE + "metrics", sandbox.ById, sandbox.SandboxMetrics, "the edge")
PAUSE = Rpc(_EDGE + "pause", sandbox.PauseSandbox, sandbox.PauseResult, "the edge")
RESUME = Rpc(_EDGE + "resume", sandbox.ById, sandbox.ResumeResult, "the edge")
EXTEND = Rpc(_EDGE + "extend", sandbox.ExtendSandbox, sandbox.SandboxInfo, "the edge")
SET_NETWORK = Rpc(_EDGE + "set_network", sandbox.SetNetwork, sandbox.PolicyApplied, "the edge")
SET_PHASE = Rpc(_EDGE + "set_phase", sandbox.SetPhase, sandbox.PolicyApplied, "the edge")
AUDIT = Rpc(_EDGE + "audit", sandbox.ById, sandbox.AuditLog, "the edge")
STOP = Rpc(_EDGE + "stop", sandbox.StopSandbox, sandbox.SandboxInfo, "the edge")
REPORT_SPANS = Event(_EDGE + "spans", trace.ReportSpans)

# Scatter: every edge answers for the project in the subject.
LIST = Rpc("dsec.v1.p.{project}.edges.list", sandbox.Selection, sandbox.Listing, "any edge")
PAUSE_MANY = Rpc(
    "dsec.v1.p.{project}.edges.pause", sandbox.Selection, sandbox.ManyOutcome, "any edge"
)
RESUME_MANY = Rpc(
    "dsec.v1.p.{project}.edges.resume", sandbox.Selection, sandbox.ManyOutcome, "any edge"
)
STOP_MANY = Rpc(
    "dsec.v1.p.{project}.edges.stop", sandbox.Selection, sandbox.ManyOutcome, "any edge"
)

# --- layers: any edge with the `publish` capability answers (queue group `layers`) ---
LAYER_BEGIN = Rpc(
    "dsec.v1.p.{project}.layers.begin",
    layer.PublishBegin,
    layer.PublishStarted,
    "an edge that publishes layers",
)
LAYER_CHUNK = Rpc(_EDGE + "layers.chunk", layer.PublishChunk, layer.PublishProgress, "the edge")
LAYER_COMMIT = Rpc(_EDGE + "layers.commit", layer.PublishCommit, layer.LayerInfo, "the edge")
LAYER_LIST = Rpc(
    "dsec.v1.p.{project}.layers.list",
    layer.LayerQuery,
    layer.LayerListing,
    "an edge that publishes layers",
)
LAYER_INFO = Rpc(
    "dsec.v1.p.{project}.layers.info",
    layer.LayerQuery,
    layer.LayerInfo,
    "an edge that publishes layers",
)
LAYER_REMOVE = Rpc(
    "dsec.v1.p.{project}.layers.remove",
    layer.LayerQuery,
    layer.LayerInfo,
    "an edge that publishes layers",
)

# --- what any caller may ask a scheduler ---
NODES = Rpc("dsec.v1.p.{project}.nodes", Empty, node.NodeListing, "a scheduler")
QUEUE = Rpc(
    "dsec.v1.p.{project}.queue", deadletter.QueueQuery, deadletter.QueueListing, "a scheduler"
)
TRACE = Rpc("dsec.v1.p.{project}.trace", trace.TraceQuery, trace.Spans, "any service")  # scatter

# --- operators ---
DLQ_LIST = Rpc(
    "dsec.v1.ops.dlq.list", deadletter.DeadLetterQuery, deadletter.DeadLetterListing, "a scheduler"
)
DLQ_REPLAY = Rpc(
    "dsec.v1.ops.dlq.replay",
    deadletter.DeadLetterAction,
    deadletter.DeadLetterOutcome,
    "a scheduler",
)
DLQ_DISCARD = Rpc(
    "dsec.v1.ops.dlq.discard",
    deadletter.DeadLetterAction,
    deadletter.DeadLetterOutcome,
    "a scheduler",
)
NODE_CORDON = Rpc("dsec.v1.ops.node.{node}.cordon", node.NodeCommand, Empty, "the edge")
NODE_UNCORDON = Rpc("dsec.v1.ops.node.{node}.uncordon", node.NodeCommand, Empty, "the edge")
NODE_DRAIN = Rpc("dsec.v1.ops.node.{node}.drain", node.NodeCommand, Empty, "the edge")
NODE_CAPABILITIES = Rpc(
    "dsec.v1.ops.node.{node}.capabilities", Empty, node.NodeCapabilities, "the edge"
)
BURST_STATUS = Rpc("dsec.v1.ops.burst.status", Empty, burst.BurstStatus, "the burst service")
LIST_ALL = Rpc(
    "dsec.v1.ops.edges.list", sandbox.Selection, sandbox.Listing, "any edge"
)  # scatter, every project

# --- between the services ---
OFFER = Rpc(_NODE + "offer", placement.Offer, placement.OfferReply, "the edge")
WHOHAS = Rpc("dsec.v1.nodes.whohas", placement.WhoHas, placement.Holding, "any edge")  # scatter
RETRY = Rpc(_NODE + "retry", placement.RetryRequest, placement.RetryReply, "a scheduler")
VERDICT = Event(_NODE + "verdict", placement.Verdict)
ANNOUNCE = Rpc(_NODE + "announce", placement.Verdict, Empty, "the edge")  # again, to a new inbox
WITHDRAW = Rpc(_NODE + "withdraw", placement.Verdict, Empty, "the edge")  # the request is cancelled
INQUIRE = Rpc(_NODE + "inquire", placement.Inquiry, placement.Verdicts, "a scheduler")
HEARTBEAT = Event(_NODE + "heartbeat", node.Heartbeat)
HEARTBEAT_ACK = Event(_NODE + "heartbeat_ack", node.HeartbeatAck)
POLICY_APPLY = Rpc(
    _NODE + "policy.apply", policy.ApplyPolicy, policy.PolicyInForce, "the policy service"
)
POLICY_CHECK = Rpc(
    _NODE + "policy.check", policy.CheckPolicy, policy.PolicyInForce, "the policy service"
)
POLICY_REMOVE = Rpc(_NODE + "policy.remove", policy.RemovePolicy, Empty, "the policy service")
POLICY_AUDIT = Rpc(
    _NODE + "policy.audit", policy.AuditPolicy, policy.PolicyAudit, "the policy service"
)
POLICY_RECONCILE = Rpc(
    _NODE + "policy.reconcile", policy.ReconcilePolicy, policy.Reconciled, "the policy service"
)
POLICY_HEALTH = Event(_NODE + "policy.health", policy.PolicyHealth)
SNAPSHOT_FREEZE = Rpc(
    _NODE + "snapshot.freeze", snapshot.FreezeRequest, snapshot.Frozen, "the snapshotter"
)
SNAPSHOT_THAW = Rpc(
    _NODE + "snapshot.thaw", snapshot.ThawRequest, snapshot.Thawed, "the snapshotter"
)
SNAPSHOT_HEALTH = Event(_NODE + "snapshot.health", snapshot.SnapshotterHealth)
BURST_ASK = Rpc("dsec.v1.burst.ask", burst.BurstQuestion, burst.BurstAnswer, "the burst service")
LIFECYCLE = Event(_NODE + "event.lifecycle", lifecycle.LifecycleBatch)
DEAD_LETTER = Event("dsec.v1.dlq.{tail}", deadletter.DeadLetter)

# --- streams and their consumers ---
PLACEMENTS = Stream(
    "PLACEMENTS", ("dsec.v1.p.*.place.>",), work_queue=True, max_age_s=86_400, max_bytes=4 << 30,
    max_msgs=500_000, discard_new=True, allow_ttl=True,
)  # fmt: skip
EVENTS = Stream(
    "EVENTS", ("dsec.v1.node.*.event.>",), work_queue=False, max_age_s=7 * 86_400,
    max_bytes=8 << 30, max_msgs=50_000_000, discard_new=False,
)  # fmt: skip
DLQ = Stream(
    "DLQ", ("dsec.v1.dlq.>",), work_queue=False, max_age_s=14 * 86_400, max_bytes=1 << 30,
    max_msgs=100_000, discard_new=False,
)  # fmt: skip
STREAMS = (PLACEMENTS, EVENTS, DLQ)


def _lane(qos: Qos, backend: Backend) -> Durable:
    return Durable(
        f"scheduler-{qos.lane}-{backend.value}", PLACEMENTS,
        f"dsec.v1.p.*.place.{qos.lane}.{backend.value}.*",
        ack_wait_s=15, max_deliver=-1, max_ack_pending=256,
    )  # fmt: skip


LANES = {(q, b): _lane(q, b) for q in Qos for b in Backend}

# --- buckets ---
CLAIMS = Bucket("DSEC_CLAIMS", placement.Claim, ttl_s=CLAIM_RETENTION_S)  # key: claim_key()
LAYERS = Bucket("DSEC_LAYERS", layer.LayerInfo)  # key <space>.<name, base32>.<version, base32>
BUCKETS = (CLAIMS, LAYERS)

# --- Redis: one hash, one round trip ---
REDIS_NODES = "dsec:v1:nodes"  # node → its last Heartbeat

# --- queue groups ---
Q_SCHEDULERS = "schedulers"
Q_WATCHERS = "watchers"
Q_LAYERS = "layers"
Q_BURST = "burst"
