"""Every default, retention and bound that a caller or an operator can meet, as a number.

docs/glossary.md is written from this file and a test compares the two.
"""

from __future__ import annotations

# What a sandbox gets when the caller does not say.
CPUS = 2.0
MEMORY_MIB = 2048
DISK_MIB = 4096
MAX_FILES = 1_000_000
SHM_MIB = 64
PIDS = 512
IDLE_TIMEOUT_S = 300.0
MAX_LIFETIME_S = 14_400.0
MAX_PAUSED_S = 86_400.0
CREATE_TIMEOUT_S = 120.0
EXEC_TIMEOUT_S = 600.0
MAX_OUTPUT_BYTES = 1 << 20

# The least and most a caller may ask for.
CPUS_RANGE = (0.05, 256.0)
MEMORY_MIB_RANGE = (16, 1 << 20)
DISK_MIB_RANGE = (16, 4 << 20)
MAX_FILES_RANGE = (64, 100_000_000)
SHM_MIB_RANGE = (0, 1 << 18)
PIDS_RANGE = (8, 1 << 20)
MAX_OUTPUT_LIMIT = 256 << 20
MAX_TOOLKITS = 100
MAX_LABELS = 64
CREATE_MANY_MESSAGE = 1024  # items per placement message; a larger job is several messages

# Liveness.
HEARTBEAT_S = 1.0
SUSPECT_AFTER_S = 3.0
LEASE_S = 10.0  # lost after this long without a heartbeat; a loser is gone within one lease
CLAIM_RETENTION_S = 86_400.0

# Outputs on the wire.
CHUNK_BYTES = 128 << 10  # one raw message
INLINE_BYTES = 64 << 10  # a result up to this size is one message
EXEC_WINDOW_BYTES = 1 << 20  # output in flight before the reader must grant credit
EXEC_PROGRESS_S = 5.0
FILE_CHUNK_BYTES = 256 << 10

# Placement.
SAMPLE_K = 3
OFFER_TIMEOUT_S = 2.0
WHOHAS_TIMEOUT_S = 1.0
LANE_BUCKETS = 256
