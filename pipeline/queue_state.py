"""What a work stream looks like from outside: how many wait, how many are being worked on, and since when.

Owns the four numbers and the question for them. Knows nothing about who asks. The numbers of a stream are one text,
made by scripts/queue_state.lua:

    entries, of them being worked on, by how many processes, age of the oldest in ms
"""

from dataclasses import dataclass
from typing import Final, Self, cast

from pipeline.keys import HANDBACK, POOLED_STAGES, STAGES, Keys, Lane, lanes_of
from pipeline.redis_calls import RedisCalls

QUEUES: Final[tuple[tuple[str, Lane], ...]] = tuple((stage, lane) for stage in STAGES for lane in lanes_of(stage))
"""Every queue, in the order in which requests meet them."""


@dataclass(frozen=True, slots=True)
class QueueState:
    """One work stream in one moment; held entries are being worked on, the others wait."""

    stage: str
    priority: Lane
    num_entries: int = 0
    num_held: int = 0
    num_holders: int = 0
    oldest_s: float = 0.0
    """Since the oldest entry arrived, held or not."""

    @property
    def num_waiting(self) -> int:
        """Entries that nobody works on."""
        return self.num_entries - self.num_held

    @classmethod
    def parse(cls, stage: str, priority: Lane, numbers: bytes) -> Self:
        """Return the state that four numbers describe; of an empty queue there are none.

        Raises:
            ValueError: they are no such numbers.
        """
        if not numbers:
            return cls(stage, priority)
        num_entries, num_held, num_holders, oldest_ms = (int(word) for word in numbers.split())
        return cls(stage, priority, num_entries, num_held, num_holders, oldest_ms / 1000)


def queues_of(pool_id: str | None) -> list[tuple[str, Lane]]:
    """Return the queues around a pool; without one, those that need none."""
    return [queue for queue in QUEUES if pool_id is not None or queue[0] not in POOLED_STAGES]


async def read_queues(calls: RedisCalls, keys: Keys, pool_id: str | None) -> list[QueueState]:
    """Return all queues in their order, in one round trip; without a pool, those that need none.

    Raises:
        ServerError: there is no answer.
    """
    queues = queues_of(pool_id)
    streams = [keys.stream(stage, priority, pool_id) for stage, priority in queues]
    reply = cast("list[bytes]", await calls.script("queues", streams, [HANDBACK, *(stage for stage, _ in queues)]))
    return [QueueState.parse(*queue, numbers) for queue, numbers in zip(queues, reply, strict=True)]
