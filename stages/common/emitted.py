"""What the readers of a request can see already: where whoever takes it over goes on."""

from pipeline import wire
from pipeline.errors import UnknownRequest
from pipeline.messages import Delta
from pipeline.transport import Transport


async def emitted_tokens(transport: Transport, request_id: str) -> list[int]:
    """Output tokens in the result stream, in order; none of a request that is gone, as the next commit will tell.

    Raises:
        WireError: An entry of the stream cannot be read.
    """
    token_ids: list[int] = []
    while True:
        try:
            entries = await transport.read_results(request_id, len(token_ids), 0)
        except UnknownRequest:
            return token_ids
        deltas = [wire.unpack(entry.data, Delta) for entry in entries if entry.offset is not None]
        if not deltas:
            return token_ids
        for delta in deltas:
            token_ids.extend(delta.token_ids)
