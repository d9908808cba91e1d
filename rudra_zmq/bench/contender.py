"""What all that start processes for a benchmark have in common: a folder, a beginning that leaves nothing, an end."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import TypeVar

from rudra_zmq.bench.control import Group
from rudra_zmq.bench.folder import Folder

C = TypeVar("C", bound="Contender")


class Contender(abc.ABC):
    """``with Contender(...)``: started inside, ended behind."""

    def __init__(self) -> None:
        self._temporary = Folder()
        self._folder = self._temporary.path
        self._group: Group | None = None

    def __enter__(self: C) -> C:
        try:
            self._start()
        except BaseException:  # an interrupt too: no process may be left
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abc.abstractmethod
    def _start(self) -> None:
        """Start the processes, and wait until they are ready."""

    @abc.abstractmethod
    def close(self) -> None:
        """End them, and remove the folder. Harmless twice."""
