"""flower-superlink without the log lines of successful HTTP requests: nearly all of its log."""

import logging

from flwr.superlink.cli import flower_superlink


def failed(record: logging.LogRecord) -> bool:
    """Tell whether an access line of uvicorn is for a request that was refused or failed."""
    return not isinstance(record.args, tuple) or int(str(record.args[-1])) >= 400


logging.getLogger("uvicorn.access").addFilter(failed)
flower_superlink()
