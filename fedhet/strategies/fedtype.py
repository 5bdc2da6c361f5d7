"""FedType strategy: averaging of the proxies (Section 3.3).

Jiaqi Wang, Chenxu Zhao, Lingjuan Lyu, Quanzeng You, Mengdi Huai and Fenglong Ma, Bridging Model
Heterogeneity in Federated Learning via Uncertainty-based Asymmetrical Reciprocity Learning, ICML
2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedhet.algorithms.local_models import START_SCALE, equal_scales
from fedhet.algorithms.weights import interpolate
from fedhet.base.arrays import Array, group
from fedhet.config.resolve import Config
from fedhet.methods.fedtype import SPEC, FedTypeSettings
from fedhet.models import to_arrays
from fedhet.strategies.base import ServerModel
from fedhet.strategies.fedavg import FedAvgStrategy
from fedhet.wire.identity import ClientInfo


class FedTypeStrategy(FedAvgStrategy):
    """Strategy that averages proxies, including the standard deviations of variational proxies."""

    spec = SPEC
    settings: FedTypeSettings  # type: ignore[assignment]

    def init(self) -> None:
        """Build a new proxy."""
        model = self.build_model(self.settings.proxy)
        variational = self.settings.aggregation == "pfedbayes"
        scale = {"scale": equal_scales(model, START_SCALE)} if variational else {}
        self._set_averages({"proxy": to_arrays(model), **scale})

    @classmethod
    def saved_models(
        cls, config: Config, directory: Path, state: Mapping[str, Array], client: ClientInfo
    ) -> Mapping[str, ServerModel]:
        """Return the averaged proxy."""
        settings: Any = config.method_settings
        return {"global": ServerModel(group(state, "proxy"), settings.proxy, field="proxy")}

    def server_update(
        self, before: Mapping[str, Array], average: dict[str, Array]
    ) -> dict[str, Array]:
        """Return the average or, with pFedMe, (1 - beta) before + beta average."""
        beta = self.settings.moreau_beta if self.settings.aggregation == "pfedme" else 1.0
        return interpolate(before, average, beta)
