"""Writes docs/messages.md from the contracts: `python -m scripts.messages > docs/messages.md`."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Iterator

from libdsec.wire import envelope, subjects
from libdsec.wire.model import Message

INTRO = """# Messages

Generated from `libdsec/wire` by `make docs`; a test compares the two.

A payload is JSON, bytes in it are base64. A receiver ignores fields it does not know. `*` in a
subject stands for what the sender fills in: a project, a node, a lane. An error reply has the
header `Dsec-Error` and an `ErrorReply` as its payload.
"""


def declared(kind: type) -> Iterator[tuple[str, object]]:
    """The declarations of one kind in subjects.py, in the order they are written there."""
    return ((name, value) for name, value in vars(subjects).items() if isinstance(value, kind))


def type_name(annotation: object) -> str:
    """A field's type as a reader would say it."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return type_name(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(a) for a in typing.get_args(annotation))
    if annotation is type(None):
        return "none"
    if origin is not None:
        inner = ", ".join(type_name(a) for a in typing.get_args(annotation) if a is not Ellipsis)
        return f"{origin.__name__}[{inner}]"
    return getattr(annotation, "__name__", str(annotation))


def fields_of(model: type[Message]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        default = (
            "" if field.is_required() else f" = `{field.get_default(call_default_factory=True)!r}`"
        )
        yield f"| `{name}` | {type_name(field.annotation)}{default} |"


def referenced(models: set[type[Message]]) -> set[type[Message]]:
    """Every message reachable through the fields of these."""
    todo, seen = list(models), set(models)
    while todo:
        for field in todo.pop().model_fields.values():
            for inner in messages_in(field.annotation):
                if inner not in seen:
                    seen.add(inner)
                    todo.append(inner)
    return seen


def messages_in(annotation: object) -> Iterator[type[Message]]:
    if inspect.isclass(annotation) and issubclass(annotation, Message):
        yield annotation
    for arg in typing.get_args(annotation):
        yield from messages_in(arg)


def render() -> str:
    lines = [INTRO]
    used: set[type[Message]] = set()
    lines += [
        "## Requests",
        "",
        "| name | subject | request | reply | answered by |",
        "|---|---|---|---|---|",
    ]
    for name, rpc in declared((envelope.Rpc, envelope.StreamingRpc)):  # type: ignore[arg-type]
        assert isinstance(rpc, envelope.Rpc | envelope.StreamingRpc)
        used |= {rpc.request, rpc.reply}
        stream = "stream of, ending in " if isinstance(rpc, envelope.StreamingRpc) else ""
        types_ = f"{rpc.request.__name__} | {stream}{rpc.reply.__name__}"
        lines.append(f"| {name} | `{rpc.subject()}` | {types_} | {rpc.owner} |")
    lines += ["", "## Events", "", "| name | subject | message |", "|---|---|---|"]
    for name, event in declared(envelope.Event):
        assert isinstance(event, envelope.Event)
        used.add(event.message)
        lines.append(f"| {name} | `{event.subject()}` | {event.message.__name__} |")
    lines += [
        "",
        "## Streams",
        "",
        "| name | subjects | kind | kept | bounds |",
        "|---|---|---|---|---|",
    ]
    for _, s in declared(envelope.Stream):
        assert isinstance(s, envelope.Stream)
        kind = "work queue" if s.work_queue else "log"
        full = "refuses" if s.discard_new else "forgets the oldest"
        names = ", ".join(f"`{x}`" for x in s.subjects)
        lines.append(
            f"| {s.name} | {names} | {kind} | {s.max_age_s:g} s | "
            f"{s.max_msgs} messages, {s.max_bytes >> 20} MiB; full: {full} |"
        )
    lines += ["", "Consumers of PLACEMENTS, shared by all schedulers:", ""]
    lines += [f"* `{d.name}`: `{d.filter_subject}`, ack within {d.ack_wait_s:g} s, "
              f"{d.max_ack_pending} at once" for d in subjects.LANES.values()]  # fmt: skip
    lines += ["", "## Buckets", "", "| name | message | kept |", "|---|---|---|"]
    for bucket in subjects.BUCKETS:
        used.add(bucket.message)
        kept = f"{bucket.ttl_s:g} s" if bucket.ttl_s else "until removed"
        lines.append(f"| {bucket.name} | {bucket.message.__name__} | {kept} |")
    lines += [
        "",
        f"Redis: `{subjects.REDIS_NODES}`, a hash from node to its last heartbeat.",
        "",
        "## Fields",
        "",
    ]
    for model in sorted(referenced(used), key=lambda m: m.__name__):
        doc = inspect.cleandoc(model.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        lines += [
            f"### {model.__name__}",
            "",
            doc,
            "",
            "| field | type |",
            "|---|---|",
            *fields_of(model),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(render())
