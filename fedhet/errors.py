"""The errors a user can cause. Each message is one line: what, where, and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedhetError(Exception):
    """Base of every error that fedhet raises on bad input; the command line prints its message."""


class SettingsError(FedhetError):
    """A setting that does not exist, or a value that it does not allow."""


class DataError(FedhetError):
    """A dataset, partition or site folder that is absent, malformed or too small."""


class ModelError(FedhetError):
    """A model name that does not exist, or a model that does not fit the data."""


class StateError(FedhetError):
    """A saved state that is absent, truncated, or of another run, method or model."""


class KnowledgeError(FedhetError):
    """A payload that breaks the contract; names the sender and the field."""

    def __init__(self, sender: str, field: str, fault: str) -> None:
        super().__init__(f"{sender}: {field}: {fault}")
        self.sender, self.field, self.fault = sender, field, fault


def nearest(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the existing name closest to `name`, or ""."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""
