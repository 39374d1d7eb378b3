"""The status of a stack as one page for people.

Owns wording and layout. Knows nothing about where the figures come from.
"""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ops.status.state import PACE_WINDOW_S, ProcessRow, StackStatus
from pipeline.batch.record import BatchRecord
from pipeline.counters import DIVERGENCES, MEANINGS
from pipeline.finished_log import output_tokens_per_s
from pipeline.keys import PRIORITIES, RETURNED, STAGES, Priority
from pipeline.overview import KvState, Overview, ServerState
from pipeline.queue_state import QueueState

GOOD, WARN, BAD, DIM = "green", "yellow", "bold red", "dim"
STATE_STYLE = {"ready": GOOD, "registered": GOOD, "starting": WARN, "stopping": WARN, "gone": WARN, "backing_off": BAD}


def page(status: StackStatus) -> RenderableType:
    """Return the whole page."""
    overview = status.overview
    return Group(
        *_head(status),
        "",
        _processes(status.processes),
        "",
        _queues(overview),
        "",
        *_figures(overview),
        *_problems(status),
    )


def size(num_bytes: float) -> str:
    """Return a number of bytes as people read it."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def age(seconds: float | None) -> str:
    """Return a duration as people read it."""
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def _head(status: StackStatus) -> list[Text]:
    settings = status.found.settings
    runs = (
        f"`sluice up` (process {status.found.up_pid}) in {settings.home}" if status.found.up_pid else "no `sluice up`"
    )
    return [
        Text.assemble((settings.model, "bold"), f"   namespace {status.overview.namespace}   {runs}"),
        Text(_server(status.overview.server)),
    ]


def _server(server: ServerState) -> str:
    limit = "no limit" if server.max_memory_bytes is None else size(server.max_memory_bytes)
    return f"{server.version} at {server.address}   memory {size(server.used_memory_bytes)} of {limit}"


def _processes(rows: Sequence[ProcessRow]) -> Table:
    table = _table("process", "pid", "state", "restarts", "up", "renewed")
    hosts = {row.host for row in rows if row.host is not None}
    for row in rows:
        name = row.name if len(hosts) < 2 or row.host is None else f"{row.name} on {row.host}"
        table.add_row(
            name,
            "-" if row.pid is None else str(row.pid),
            Text(row.state.replace("_", " "), STATE_STYLE.get(row.state, "")),
            "-" if row.num_restarts is None else Text(str(row.num_restarts), WARN if row.num_restarts else ""),
            age(row.uptime_s),
            "-" if row.renewed_s is None else f"{age(row.renewed_s)} ago",
        )
    return table


def _queues(overview: Overview) -> Table:
    """A row a stage; what is not there is left blank, so that what is stands out."""
    table = _table("queue")
    for priority in PRIORITIES:
        for column, width in ((priority, 13), ("in work", 7), ("oldest", 6)):  # wide enough not to jump
            style = "" if column == priority else DIM
            table.add_column(column, justify="right", style=style, min_width=width, no_wrap=True)
    for stage in STAGES:
        table.add_row(stage, *(cell for priority in PRIORITIES for cell in _queue_cells(overview, stage, priority)))
    return table


def _queue_cells(overview: Overview, stage: str, priority: Priority) -> tuple[str, str, str]:
    for queue in overview.queues:
        if (queue.stage, queue.priority) == (stage, priority) and queue.num_entries:
            in_work = f"{queue.num_held} by {queue.num_holders}" if queue.num_held else ""
            return f"{queue.num_waiting} waiting", in_work, age(queue.oldest_s)
    return "-", "", ""


def _figures(overview: Overview) -> list[Text]:
    waiting = sum(overview.num_waiting(stage) for stage in STAGES if stage != "compressor")
    held = {stage: overview.num_held(stage) for stage in STAGES if stage != "compressor"}
    in_work = ", ".join(f"{num} in {stage}" for stage, num in held.items() if num) or "none in work"
    pace = output_tokens_per_s(overview.ended, overview.at_us, PACE_WINDOW_S)
    lines = [
        f"requests   {waiting} waiting, {in_work}; {pace:.0f} tokens/s over the last {PACE_WINDOW_S:.0f} s",
        f"ended      {_ended(overview)}",
        f"KV pool    {_kv(overview.kv)}",
    ]
    lines += [f"returned   {_returned(queue)}" for queue in _sent_back(overview)]
    lines += [f"batch      {_batch(batch, overview.at_us)}" for batch in overview.batches]
    return [Text(line) for line in lines]


def _sent_back(overview: Overview) -> list[QueueState]:
    """The queue of what went back to prefill, where it holds anything; it hardly ever does."""
    return [queue for queue in overview.queues if queue.priority == RETURNED and queue.num_entries]


def _returned(queue: QueueState) -> str:
    state = f"{queue.num_waiting} waiting, {queue.num_held} in work, the oldest for {age(queue.oldest_s)}"
    return f"{state}: their KV was lost, and is computed again"


def _batch(batch: BatchRecord, at_us: int) -> str:
    failed = f", {batch.failed} failed" if batch.failed else ""
    lines = f"{batch.num_finished} of {batch.total or '?'} lines{failed}"
    began_s = (at_us / 1000 - (batch.started_ms or batch.created_ms)) / 1000
    since = f", began {age(max(began_s, 0))} ago" if not batch.is_over else ""
    return f"{batch.id}   {batch.state.replace('_', ' ')}   {lines}{since}   {batch.options.target}"


def _ended(overview: Overview) -> str:
    counts = ", ".join(f"{overview.num_ended(state)} {state}" for state in ("finished", "failed", "cancelled"))
    if not overview.ended:
        return "none lately"
    since_s = (overview.at_us - overview.ended[0].ended_us) / 1e6
    return f"{counts} (the last {len(overview.ended)}, within {age(since_s)})"


def _kv(kv: KvState | None) -> str:
    if kv is None:
        return "not known: nobody samples, and it is not on this host"
    share = 100 * kv.used_bytes / kv.quota_bytes
    promised = f"; {size(kv.promised_bytes)} promised to {kv.num_promised} requests" if kv.num_promised else ""
    return f"{size(kv.used_bytes)} of {size(kv.quota_bytes)} ({share:.1f} %), {kv.num_blobs} blobs{promised}"


def _problems(status: StackStatus) -> list[Text]:
    problems: list[Text] = []
    if status.overview.dead:
        letters = ", ".join(f"{num} of {stage}" for stage, num in status.overview.dead.items())
        problems.append(Text(f"dead       {letters}: messages that could not be processed", WARN))
    problems += _rare(status.overview.counters)
    if status.missing:
        problems.append(Text(f"missing    no process of: {', '.join(status.missing)}", BAD))
    return problems


def _rare(counters: Mapping[str, int]) -> list[Text]:
    """A line for each counter that is not zero, in the order in which they are declared."""
    counted = [(name, counters[name]) for name in MEANINGS if counters.get(name)]
    labels = ["rare" if number == 0 else "" for number in range(len(counted))]
    return [
        Text(f"{label:<10} {num} {MEANINGS[name]}", BAD if name == DIVERGENCES else DIM)
        for label, (name, num) in zip(labels, counted, strict=True)
    ]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style=DIM)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number in {0, 2} else "right", no_wrap=True)
    return table
