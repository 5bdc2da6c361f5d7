"""FedSA-LoRA strategy: FedAvg of the adapters' factors A.

Pengxin Guo, Shuang Zeng, Yanran Wang, Huijie Fan, Feifei Wang and Liangqiong Qu, Selective
Aggregation for Low-Rank Adaptation in Federated Learning, ICLR 2025. The factors B and the heads
stay on the clients, as in the authors' configuration.
"""

from fedhet.methods.fedsa import SPEC, FedSaSettings
from fedhet.models import is_adapted
from fedhet.strategies.fedavg import FedAvgStrategy


class FedSaStrategy(FedAvgStrategy):
    """Strategy that averages the factors A, weighted by each client's number of samples."""

    spec = SPEC
    settings: FedSaSettings

    def init(self) -> None:
        """Build a new model, and log a notice if it has no adapters."""
        if not is_adapted(model := self.reference_client.model):
            self.log.notice(
                f"model {model} has no adapters, so fedsa averages its extractor like fedper; "
                "models with adapters have names such as encoder-1-lora8:NAME"
            )
        super().init()
