"""Declaration of FedRolex: HeteroFL with submodels that roll over the channels."""

from dataclasses import replace

from fedhet.methods import heterofl
from fedhet.methods.spec import Protection

EXTENDS = "heterofl"
"""Method whose client FedRolex uses."""


class FedRolexSettings(heterofl.HeteroFlSettings):
    """Settings of FedRolex, identical to the settings of HeteroFL."""


SPEC = replace(
    heterofl.SPEC,
    settings=FedRolexSettings,
    title="submodels of several widths that roll over the channels in each round",
    paper="Alam et al., FedRolex: Model-Heterogeneous Federated Learning",
    late="refused",  # The channels of an earlier round's submodel have moved since.
    privacy=Protection(
        unsupported="DP-SGD requires group norms, which depend on the order of the channels"
    ),
)
