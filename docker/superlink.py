"""Run flower-superlink without logging successful requests, which would fill the log."""

import logging

from flwr.superlink.cli import flower_superlink


def failed(record: logging.LogRecord) -> bool:
    """Return whether a line of uvicorn's access log is about a rejected or failed request."""
    return not isinstance(record.args, tuple) or int(str(record.args[-1])) >= 400


logging.getLogger("uvicorn.access").addFilter(failed)
flower_superlink()
