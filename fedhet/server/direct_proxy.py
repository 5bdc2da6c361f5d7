"""A client as Flower's server sees it, if it is called and not sent messages."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, cast

from flwr.common import DisconnectRes, EvaluateIns, EvaluateRes, FitIns, FitRes
from flwr.server.client_proxy import ClientProxy


class DirectProxy(ClientProxy):
    """Passes each of the server's calls on to `call`."""

    @abstractmethod
    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Call the client's method `name`; `timeout` in seconds, None: none."""

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
