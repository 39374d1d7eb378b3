"""All slots of a stack in the order of the Procfile, and the numbers they go by.

Owns which numbers are taken. Knows nothing about when slots come and go: that is the supervisor's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.supervision.crashes import RestartPolicy
from ops.supervision.process import Echo, Launch, ProcessLog
from ops.supervision.slot import Slot, slot_name


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all processes of a stack have in common."""

    environment: Mapping[str, str]
    cwd: Path
    log_dir: Path
    echo: Echo | None = None


class Slots:
    """The slots that there are at the moment, those that are leaving included."""

    def __init__(
        self, commands: Mapping[str, tuple[str, ...]], surroundings: Surroundings, policy: RestartPolicy
    ) -> None:
        """Start with none; `commands` has the command of each stage, in the order of the Procfile."""
        self._commands = commands
        self._surroundings = surroundings
        self._policy = policy
        self._slots: list[Slot] = []

    def __iter__(self) -> Iterator[Slot]:
        """Go through them as they are now, whatever comes and goes meanwhile."""
        return iter(tuple(self._slots))

    def add(self, stage: str) -> Slot:
        """Add a slot under the lowest free number: one that is leaving keeps its name and its log to itself."""
        taken = {slot.number for slot in self.of(stage)}
        number = next(number for number in range(1, len(taken) + 2) if number not in taken)
        around, name = self._surroundings, slot_name(stage, number)
        log = ProcessLog(around.log_dir / f"{name}.log", name, around.echo)
        launch = Launch(self._commands[stage], around.environment, around.cwd)
        slot = Slot(stage, number, launch, log, self._policy)
        self._slots.append(slot)
        order = list(self._commands)
        self._slots.sort(key=lambda slot: (order.index(slot.stage), slot.number))
        return slot

    def remove(self, slot: Slot) -> None:
        """Free its number."""
        self._slots.remove(slot)

    def of(self, stage: str) -> list[Slot]:
        """Return those of a stage by number."""
        return [slot for slot in self._slots if slot.stage == stage]

    def staying(self, stage: str) -> list[Slot]:
        """Return those of a stage that were not told to leave, by number."""
        return [slot for slot in self.of(stage) if not slot.leaving.is_set()]

    def in_groups(self, order: Sequence[str]) -> list[list[Slot]]:
        """Return them stage by stage in this order; all of the other stages together, last."""
        rest = [slot for slot in self._slots if slot.stage not in order]
        return [group for group in (*map(self.of, order), rest) if group]
