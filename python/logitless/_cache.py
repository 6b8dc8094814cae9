"""A bounded cache for what is looked up at every call: one lookup where a key was used lately."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Cache(Generic[K, V]):
    """Holds the last ``size`` values used at least, and twice as many at most.

    Values that are used move from the old half to the young one, which becomes the old one when it is full. Threads
    may use it at once: at worst a value is made twice.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: K) -> V | None:
        found = self._young.get(key)
        if found is None:
            found = self._old.pop(key, None)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: K, value: V) -> None:
        if len(self._young) >= self._size:
            self._old, self._young = self._young, {}
        self._young[key] = value
