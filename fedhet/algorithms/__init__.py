"""Algorithms of the methods, with one module per family.

The modules perform no I/O and do not import Flower.

This file defines types that the method declarations share. It does not import PyTorch.
"""

from typing import Literal

DigestLoss = Literal["mae", "mse", "cross-entropy"]
"""Loss between a model's predictions and a consensus; see `distillation.digest_losses`."""
Reduction = Literal["mean", "none"]
"""Reduction of the losses in a batch: their mean, or "none" for the loss of each sample."""
ScoreKind = Literal["logits", "probabilities"]
"""Kind of scores in a consensus of several models."""
FeatureNorm = Literal["none", "rms", "unit"]
"""Scaling of features in a loss that compares features; see `classwise.class_feature_loss`."""
RelationKind = Literal["en+ta", "en", "ta"]
"""Terms in UM-pFSSL's Eq. 13: entropy and test accuracy, or only one of the two (Table III)."""
Divergence = Literal["forward", "reverse"]
"""Direction of the divergence in UM-pFSSL's Eq. 5: KL(pseudo-label || model), or the reverse."""
Margin = Literal["largest", "nearest"]
"""Distance between class centers for FedTGP's margin; see `feature_models.adaptive_margin`."""
PrototypeDistance = Literal["euclidean", "mse"]
"""Distance between features and prototypes: "euclidean" compares the mean features of each class in
a batch (`classwise.class_mean_distance`), and "mse" compares each sample's features
(`classwise.class_feature_loss`)."""
Guide = Literal["logits", "features"]
"""Output of a model that FedL2G's vectors guide; see `guiding`."""
Aggregation = Literal["average", "sparsity", "svd", "rank-partition", "freeze-a", "flora", "fedex"]
"""Aggregation rule for LoRA adapters with different ranks; see `adapters`."""
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of the factors A [r, Q] and B [P, r] of an adapter in a state dict."""
MERGED_A, MERGED_B = ".merged_A", ".merged_B"
"""Suffixes of the factors of a change that is merged into a frozen weight, in a state dict."""
Part = Literal["all", "trained", "all-but-norms", "extractor", "head", "lora-a"]
"""Part of a model to send.

- "all": the full model;
- "trained": the parameters, without the running statistics of batch-norm layers;
- "all-but-norms": all tensors except the tensors of batch-norm layers;
- "extractor": the layers before the head;
- "head": the head;
- "lora-a": the adapters' factors A, or the extractor if the model has no adapters.
"""


class MlpWidth(int):
    """Feature width that a model reaches with a two-layer MLP rather than with a linear adapter.

    The MLP follows the model's layers even if their width is already equal to this width.
    """


MIN_SCALE = 1e-6
"""Minimum standard deviation of a variational weight, which is a divisor in the KL divergence."""
