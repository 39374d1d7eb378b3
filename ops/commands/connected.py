"""The client of the stack that is there, for commands that talk to one and never start any.

Owns the connection. Knows nothing about what is asked.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ops.commands.common import command_settings
from ops.finding import find_stack
from pipeline.client.client import Client
from pipeline.client.errors import NoStack
from pipeline.connect import open_transport
from pipeline.errors import InvalidRequest


@asynccontextmanager
async def stack_client(model: str | None = None, *, lasting: bool = False) -> AsyncIterator[Client]:
    """Yield a client of the running stack; `settings.model` is what that serves, unless it was asked for another.

    Raises:
        NoStack: neither `sluice up` nor SLUICE_REDIS_URL says where one is.
        InvalidRequest: the model that was asked for is not the one that `sluice up` serves.
        ServerError: the server does not answer, or is not fit.
    """
    wanted = command_settings(model)
    try:
        found = await find_stack(wanted, lasting=lasting)
    except NoStack as error:
        raise NoStack(f"{error}. Start one with `sluice up` in another terminal") from None
    if "model" in wanted.model_fields_set and wanted.model != found.settings.model:
        raise InvalidRequest(
            "model", f"`sluice up` (process {found.up_pid}) serves {found.settings.model}, not {wanted.model}"
        )
    transport = await open_transport(found.settings)
    try:
        yield Client(transport, found.settings)
    finally:
        await transport.close()
