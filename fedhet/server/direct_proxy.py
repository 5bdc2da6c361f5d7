"""A client as Flower's server sees it, if it is called and not sent messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self, cast

from flwr.common import DisconnectRes, EvaluateIns, EvaluateRes, FitIns, FitRes
from flwr.server.client_proxy import ClientProxy


class DirectProxy(ClientProxy):
    """Passes each of the server's calls on to `call`."""

    @abstractmethod
    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Call the client's method `name`; `timeout` in seconds, None: none."""

    @classmethod
    def fit_together(
        cls, proxies: Sequence[Self], instructions: Sequence[FitIns], timeout: float | None
    ) -> Sequence[FitRes | Exception | None]:
        """Let clients train at once, in one process; return what each has answered, or an error.

        None: the memory does not suffice for all, and the client must be asked alone. Here they
        train one after the other.
        """
        found: list[FitRes | Exception | None] = []
        for proxy, instruction in zip(proxies, instructions, strict=True):
            try:
                found.append(proxy.fit(instruction, timeout, None))
            except Exception as error:
                found.append(error)
        return found

    def get_properties(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        """Call the client."""
        return self.call("get_properties", ins, timeout)

    def get_parameters(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        """Call the client."""
        return self.call("get_parameters", ins, timeout)

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        """Call the client."""
        return cast(FitRes, self.call("fit", ins, timeout))

    def evaluate(
        self, ins: EvaluateIns, timeout: float | None, group_id: int | None
    ) -> EvaluateRes:
        """Call the client."""
        return cast(EvaluateRes, self.call("evaluate", ins, timeout))

    def reconnect(self, ins: Any, timeout: float | None, group_id: int | None) -> DisconnectRes:
        """Do nothing: there is no connection."""
        return DisconnectRes(reason="")
