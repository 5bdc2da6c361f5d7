"""Models by name: an extractor and a classifier for any input shape and number of classes."""

from fedhet.models.classical import ClassicalInfo, Classifier, Refitted
from fedhet.models.het import HetModel, Within, load_weights, on_host, to_arrays
from fedhet.models.info import ModelInfo, base_and_width, narrow_name
from fedhet.models.registry import (
    DRAWN,
    WITHOUT_GRADIENTS,
    assign,
    build,
    build_any,
    check,
    check_name,
    describe,
    is_registered,
    names,
    private_pool,
    shapes,
    without_batch_norms,
)
from fedhet.models.user_model import is_user_model

__all__ = [
    "DRAWN", "WITHOUT_GRADIENTS", "ClassicalInfo", "Classifier", "HetModel", "ModelInfo",
    "Refitted", "Within", "assign", "base_and_width", "build", "build_any", "check", "check_name",
    "describe", "is_registered", "is_user_model", "load_weights", "names", "narrow_name", "on_host",
    "private_pool", "shapes", "to_arrays", "without_batch_norms",
]  # fmt: skip
