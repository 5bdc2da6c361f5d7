"""flower-superlink without its log lines of HTTP requests that succeeded: nearly all of its log."""

import logging

from flwr.superlink.cli import flower_superlink


def failed(record: logging.LogRecord) -> bool:
    """Say whether an access line of uvicorn is of a request that was refused or failed."""
    return not isinstance(record.args, tuple) or int(str(record.args[-1])) >= 400


logging.getLogger("uvicorn.access").addFilter(failed)
flower_superlink()
