"""What queues and pool of a stack held, read once for a command.

Owns the connection for it. Knows nothing about what the samples are for.
"""

from pipeline.connect import open_client
from pipeline.keys import Keys
from pipeline.samples import Sample, SampleLog
from pipeline.server_url import read_address
from pipeline.settings import Settings


async def read_samples(settings: Settings, since_us: int, until_us: int) -> list[Sample]:
    """Return the samples of a time, oldest first.

    Raises:
        ServerError: the server of the settings does not answer.
    """
    client = open_client(settings)
    try:
        log = SampleLog(client, read_address(settings.redis_url or "").shown, Keys(settings.namespace))
        return await log.read(since_us, until_us)
    finally:
        await client.aclose()
