"""Structured logs: one JSON object a line on standard error, or coloured lines on a terminal.

Owns the set-up of structlog. Knows nothing about what is logged; events are snake_case, ids are bound once
per message, and no prompt or output text is ever an argument.
"""

import logging
import sys
from typing import Literal

import structlog

LogLevel = Literal["debug", "info", "warning", "error"]


def configure_logs(stage: str, level: LogLevel = "info") -> None:
    """Set logging up for this process; call it once, from `__main__`."""
    renderers: list[structlog.typing.Processor] = (
        # Plain tracebacks: the pretty ones print local variables, and those hold prompts.
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if sys.stderr.isatty()
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(stage=stage)
    # Libraries that use the standard logger: warnings and worse, on the same stream.
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
