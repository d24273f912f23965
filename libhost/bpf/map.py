"""One BPF map as a dictionary of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from libhost.bpf import libbpf

_BATCH = 1024


@dataclass(frozen=True)
class Map:
    """The descriptor is borrowed from the object that loaded the map."""

    name: str
    fd: int
    key_size: int
    value_size: int

    def put(self, key: bytes, value: bytes) -> None:
        libbpf.map_update(self.fd, key, value, 0, f"map {self.name}")

    def put_many(self, keys: Sequence[bytes], value: bytes) -> None:
        """The same value under many keys, in one system call."""
        if keys:
            packed = b"".join(keys)
            values = value * len(keys)
            libbpf.map_update_batch(self.fd, packed, values, len(keys), f"map {self.name}")

    def get(self, key: bytes) -> bytes | None:
        return libbpf.map_lookup(self.fd, key, self.value_size, f"map {self.name}")

    def delete(self, key: bytes) -> bool:
        return libbpf.map_delete(self.fd, key, f"map {self.name}")

    def delete_many(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.delete(key)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """A pass over the map. Elements added or removed meanwhile may be missed or repeated."""
        position: bytes | None = None
        while True:
            keys, values, count, position = libbpf.map_lookup_batch(
                self.fd, position, self.key_size, self.value_size, _BATCH, f"map {self.name}"
            )
            for i in range(count):
                yield (
                    keys[i * self.key_size : (i + 1) * self.key_size],
                    values[i * self.value_size : (i + 1) * self.value_size],
                )
            if position is None:
                return
