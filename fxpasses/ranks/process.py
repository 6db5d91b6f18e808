"""Which process a rank is, and whether it still runs: what the operating system says of one that was killed, which says nothing itself."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

_PROC = Path("/proc")


@dataclasses.dataclass(frozen=True)
class Process:
    """A process, for others of the same machine.

    Attributes:
        machine: since its last boot, and the namespace of numbers; ``""`` where there is no ``/proc``, and nobody can tell.
        number: of the process.
        started: clock ticks from the boot to its start: numbers are given again.
    """

    machine: str
    number: int
    started: str

    @classmethod
    def own(cls) -> Process:
        """This process."""
        try:
            boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
            machine = f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
            return cls(machine, os.getpid(), _state(os.getpid())[1])
        except OSError:
            return cls("", os.getpid(), "")

    def has_ended(self) -> bool:
        """Whether it runs no more. That of another machine counts as running, as does any where there is no ``/proc``."""
        if not self.machine or self.machine != Process.own().machine:
            return False
        try:
            state, started = _state(self.number)
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in "ZX" or started != self.started


def _state(number: int) -> tuple[str, str]:
    """State and start of a process (proc(5), ``/proc/PID/stat``: fields 3 and 22; the second, its name, may hold anything)."""
    fields = (_PROC / str(number) / "stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
