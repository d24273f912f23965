"""What every service is told from outside: environment variables `DSEC_*`, read once at start.

A service subclasses `ServiceSettings` with its own fields. Nothing else below `services/` reads the
environment; values are passed on as plain arguments.
"""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from libdsec.wire.ids import NODE

_USERINFO = re.compile(r"//[^/@\s\"]*@")


def _default_instance() -> str:
    return f"{socket.gethostname().split('.')[0]}-{os.getpid()}"


class ServiceSettings(BaseSettings):
    """Settings that all services share."""

    model_config = SettingsConfigDict(
        env_prefix="DSEC_", frozen=True, extra="ignore", env_nested_delimiter="__"
    )

    node: str = Field("", description="name of the node this process serves; empty: of none")
    instance: str = Field(
        default_factory=_default_instance, description="tells replicas apart in logs and traces"
    )

    nats_servers: tuple[str, ...] = Field(
        ("nats://127.0.0.1:4222",), description="servers to connect to, as a JSON list"
    )
    nats_user: str = Field("", description="user name; empty: none is asked for")
    nats_password: SecretStr = Field(SecretStr(""), description="password of that user")
    nats_password_file: Path | None = Field(None, description="file with the password instead")
    nats_creds: Path | None = Field(None, description="credentials file instead of both")
    nats_inbox_prefix: str = Field("", description="where replies arrive; empty: by node and user")
    nats_connect_timeout_s: float = Field(10.0, gt=0, description="for the first connection")

    redis_url: str = Field("", description="the coarse view's Redis or Valkey; empty: none")

    http_host: str = Field("127.0.0.1", description="where /metrics and health are served")
    http_port: int = Field(9464, ge=0, le=65535, description="its port; 0: any free one")
    http_port_file: Path | None = Field(None, description="file to write the port in use to")

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level"
    )
    log_format: Literal["json", "console"] = Field("json", description="json for machines")

    trace_sample_ratio: float = Field(
        0.01, ge=0, le=1, description="share of traces exported besides errors and slow ones"
    )
    trace_slow_s: float = Field(5.0, gt=0, description="a hop slower than this is exported")
    span_ring_size: int = Field(20_000, ge=100, description="finished spans kept in memory")

    drain_timeout_s: float = Field(20.0, gt=0, description="for work in flight after SIGTERM")
    loop_lag_limit_s: float = Field(5.0, gt=0, description="unhealthy when the loop stalls longer")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.node and not NODE.fullmatch(self.node):
            raise ValueError(f"DSEC_NODE {self.node!r} is not of [a-z0-9-], at most 24 characters")
        if self.nats_password.get_secret_value() and self.nats_password_file:
            raise ValueError("give DSEC_NATS_PASSWORD or DSEC_NATS_PASSWORD_FILE, not both")
        return self

    def password(self) -> str | None:
        """The NATS password, wherever it is kept; None when there is none."""
        if self.nats_password_file is not None:
            return self.nats_password_file.read_text().strip()
        return self.nats_password.get_secret_value() or None

    def redacted(self) -> dict[str, Any]:
        """All values for people to read; secrets are stars, those inside of addresses too."""
        shown: dict[str, Any] = json.loads(_USERINFO.sub("//***@", self.model_dump_json()))
        return shown


def has_otlp_endpoint() -> bool:
    """Whether the standard OTEL_* variables name somewhere to export traces to."""
    return bool(
        os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    )
