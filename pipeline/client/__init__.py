"""The client: enqueue prompts, stream tokens from any offset, gather results, cancel; docs/client.md is its guide.

The only `__init__` with imports: `from pipeline.client import Client` is what people outside this project write and
keep, so it must not move when a file here is split or renamed. Inside the project, import from the files.
"""

from pipeline.batch.results import Completion
from pipeline.client.asks import NewRequest, Submitted, make_ask
from pipeline.client.client import Client
from pipeline.client.errors import QueueFull, Stalled
from pipeline.messages import ChatMessage, Delta, Failure, Terminal

__all__ = [
    "ChatMessage",
    "Client",
    "Completion",
    "Delta",
    "Failure",
    "NewRequest",
    "QueueFull",
    "Stalled",
    "Submitted",
    "Terminal",
    "make_ask",
]
