"""Streams, consumers and buckets, made to be what `libdsec.wire` declares.

`ensure_topology` may run in every replica at every start. It creates what is missing and updates
what differs; a difference that the server cannot apply to something that exists is an error, never
ignored: the client library's own `pull_subscribe` would silently keep an old configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from nats.errors import NoRespondersError
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import APIError, BadRequestError, NotFoundError, ServerError

from libdsec.bus import Bus
from libdsec.errors import Conflict, Unavailable
from libdsec.wire.envelope import Bucket, Durable, Stream
from libdsec.wire.model import Message

_API_TIMEOUT_S = 5
_MARKER_TTL_S = 60.0  # an expired key is announced to watchers, and forgotten after this long

Config = StreamConfig | ConsumerConfig
C = TypeVar("C", StreamConfig, ConsumerConfig)


async def ensure_topology(
    bus: Bus,
    *,
    streams: Iterable[Stream] = (),
    durables: Iterable[Durable] = (),
    buckets: Iterable[Bucket[Any]] = (),
    replicas: int | None = None,
) -> None:
    """Create or update; returns when all of it is as declared.

    Args:
        replicas: of every stream and bucket, where the deployment says otherwise than the wire.

    Raises:
        Conflict: something exists with a property that cannot be changed.
        Unavailable: JetStream does not answer.
    """
    js = bus.nats.jetstream(timeout=_API_TIMEOUT_S)
    for stream in streams:
        await _ensure_stream(js, stream_config(stream, replicas))
    for bucket in buckets:
        await _ensure_stream(js, bucket_config(bucket, replicas))
    for durable in durables:
        await _ensure_consumer(js, durable)


def stream_config(stream: Stream, replicas: int | None = None) -> StreamConfig:
    return StreamConfig(
        name=stream.name,
        subjects=list(stream.subjects),
        retention=RetentionPolicy.WORK_QUEUE if stream.work_queue else RetentionPolicy.LIMITS,
        max_age=stream.max_age_s,
        max_bytes=stream.max_bytes,
        max_msgs=stream.max_msgs,
        discard=DiscardPolicy.NEW if stream.discard_new else DiscardPolicy.OLD,
        duplicate_window=stream.duplicate_window_s,
        allow_msg_ttl=stream.allow_ttl,
        storage=StorageType.FILE,
        num_replicas=replicas or stream.replicas,
    )


def bucket_config(bucket: Bucket[Message], replicas: int | None = None) -> StreamConfig:
    """A KV bucket is a stream; this one also announces expiries, which watchers need to see."""
    return StreamConfig(
        name=f"KV_{bucket.name}",
        subjects=[f"$KV.{bucket.name}.>"],
        retention=RetentionPolicy.LIMITS,
        max_age=bucket.ttl_s,
        max_bytes=bucket.max_bytes,
        max_msgs_per_subject=bucket.history,
        discard=DiscardPolicy.NEW,
        duplicate_window=min(120.0, bucket.ttl_s) if bucket.ttl_s else 120.0,
        allow_direct=True,
        allow_rollup_hdrs=True,
        allow_msg_ttl=True,
        deny_delete=True,
        subject_delete_marker_ttl=_MARKER_TTL_S,
        storage=StorageType.FILE,
        num_replicas=replicas or 1,
    )


def consumer_config(durable: Durable) -> ConsumerConfig:
    """`max_deliver` is not the server's business: it would leave the message in the stream, seen by
    nobody. The consumer counts deliveries itself and dead-letters."""
    return ConsumerConfig(
        durable_name=durable.name,
        filter_subject=durable.filter_subject,
        deliver_policy=DeliverPolicy.ALL,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=durable.ack_wait_s,
        max_deliver=-1,
        max_ack_pending=durable.max_ack_pending,
    )


async def _ensure_stream(js: JetStreamContext, wanted: StreamConfig) -> None:
    assert wanted.name is not None
    name = wanted.name

    async def current() -> StreamConfig:
        return (await js.stream_info(name)).config

    await _ensure(f"stream {name}", wanted, current, js.add_stream, js.update_stream)


async def _ensure_consumer(js: JetStreamContext, durable: Durable) -> None:
    stream = durable.stream.name

    async def current() -> ConsumerConfig:
        config: ConsumerConfig = (await js.consumer_info(stream, durable.name)).config
        return config

    async def put(config: ConsumerConfig) -> Any:
        return await js.add_consumer(stream, config)

    what = f"consumer {durable.name} of stream {stream}"
    await _ensure(what, consumer_config(durable), current, put, put)


async def _ensure(
    what: str,
    wanted: C,
    current: Callable[[], Awaitable[C]],
    create: Callable[[C], Awaitable[Any]],
    update: Callable[[C], Awaitable[Any]],
) -> None:
    changes: dict[str, Any] = {}
    try:
        try:
            existing = await current()
        except NotFoundError:
            await create(wanted)  # another replica doing the same at this moment is no error
            existing = await current()
        changes = _differences(wanted, existing)
        if changes:
            await update(dataclasses.replace(existing, **changes))
            changes = _differences(wanted, await current())
    except (BadRequestError, ServerError) as err:
        raise _refused(what, changes, f": {err.description}") from err
    except (APIError, NoRespondersError, TimeoutError) as err:
        raise Unavailable(f"JetStream does not take {what}: {err}") from err
    if changes:
        raise _refused(what, changes)


def _refused(what: str, changes: dict[str, Any], why: str = "") -> Conflict:
    wanted = ", ".join(f"{name}={value}" for name, value in changes.items())
    return Conflict(
        f"{what} cannot be " + (f"given {wanted}" if changes else "made") + why,
        hint="if it exists and is empty, delete it with the nats command and start again",
    )


def _differences(wanted: Config, existing: Config) -> dict[str, Any]:
    """The fields we declare whose value is another one; None means the server may choose."""
    return {
        field.name: value
        for field in dataclasses.fields(wanted)
        if (value := getattr(wanted, field.name)) is not None
        and not _same(value, getattr(existing, field.name))
    }


def _same(wanted: Any, existing: Any) -> bool:
    # The server leaves out what is zero or false.
    return bool(wanted == existing) or (not wanted and not existing)
