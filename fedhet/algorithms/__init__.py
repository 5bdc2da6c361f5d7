"""Algorithms of the methods, one module per family, without I/O and without Flower.

This file contains the types that the methods' declarations share; importing it does not import
PyTorch.
"""

from typing import Literal

DigestLoss = Literal["mae", "mse", "cross-entropy"]
"""Loss of a model's predictions against a consensus; see `distillation.digest_losses`."""
ScoreKind = Literal["logits", "probabilities"]
"""Kind of scores in a consensus of several models."""
FeatureNorm = Literal["none", "rms", "unit"]
"""Scaling of features before they are compared; see `classwise.class_feature_loss`."""
RelationKind = Literal["en+ta", "en", "ta"]
"""Terms of UM-pFSSL's Eq. 13: entropy and test accuracy, or only one of them (Table III)."""
Divergence = Literal["forward", "reverse"]
"""Direction of the divergence in UM-pFSSL's Eq. 5: KL(pseudo-label || model), or the reverse."""
Margin = Literal["largest", "nearest"]
"""Distance between classes that defines FedTGP's margin; see `feature_models.adaptive_margin`."""
PrototypeDistance = Literal["euclidean", "mse"]
"""Distance between features and prototypes: of the class means of a batch, or of each sample.
See `classwise.class_mean_distance` and `classwise.class_feature_loss`."""
Aggregation = Literal["average", "sparsity", "svd", "rank-partition", "freeze-a"]
"""Aggregation rules for LoRA adapters with different ranks; see `adapters`."""
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of the factors A [r, Q] and B [P, r] of an adapter in a state dict."""
Part = Literal["all", "trained", "all-but-norms", "extractor", "head", "lora-a"]
"""Part of a model that is sent.

- "all": the full model;
- "trained": the parameters, without the running statistics of batch norms;
- "all-but-norms": all tensors except the tensors of batch norms;
- "extractor": the layers before the head;
- "head": the head;
- "lora-a": the factors A of adapters, or the extractor of a model without adapters.
"""
MIN_SCALE = 1e-6
"""Minimum standard deviation of a variational weight, since the KL divergence divides by it."""
