"""The mathematics of the methods, one family a module, and the choices that declarations share.

A declaration imports these choices without PyTorch, which the algorithms need.
"""

from typing import Literal

DigestLoss = Literal["mae", "mse", "cross-entropy"]
"""The distance of a model's predictions from a consensus; see `distillation.digest_losses`."""
ScoreKind = Literal["logits", "probabilities"]
"""What a consensus of several models consists of."""
FeatureNorm = Literal["none", "rms", "unit"]
"""The scale in which features are compared; see `classwise.class_feature_loss`."""
RelationKind = Literal["en+ta", "en", "ta"]
"""The terms of UM-pFSSL's Eq. 13 that count: entropy and test accuracy, or one (Table III)."""
Divergence = Literal["forward", "reverse"]
"""The direction of UM-pFSSL's Eq. 5: KL(pseudo-label || own), or KL(own || pseudo-label)."""
Margin = Literal["largest", "nearest"]
"""The distance between classes that is FedTGP's margin; see `feature_models.adaptive_margin`."""
PrototypeDistance = Literal["euclidean", "mse"]
"""The distance of features to prototypes: of a batch's class means, or of each sample's features;
see `classwise.class_mean_distance` and `classwise.class_feature_loss`."""
Part = Literal["all", "trained", "all-but-norms", "extractor", "head"]
"""The part of a model that travels: the whole model; its trained tensors, without the running
statistics of batch norms; all tensors but those of batch norms; the layers before the head; the
head."""
MIN_SCALE = 1e-6
"""The smallest standard deviation of a variational model's weight: the KL divergence divides by
it."""
