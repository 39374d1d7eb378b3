"""Messages, transport, flow control and the worker harness: what moves between stages, and how."""
