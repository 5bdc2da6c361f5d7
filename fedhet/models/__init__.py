"""Models by name: an extractor and a classifier for any input shape and number of classes."""

from fedhet.models.het import HetModel
from fedhet.models.info import ModelInfo
from fedhet.models.pool import deal
from fedhet.models.registry import build, describe, names, shapes
from fedhet.models.setting import ModelName

__all__ = ["HetModel", "ModelInfo", "ModelName", "build", "deal", "describe", "names", "shapes"]
