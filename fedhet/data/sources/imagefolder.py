"""A tree of images, one folder for each class: `imagefolder:PATH`."""

from __future__ import annotations

from fedhet.data.class_folders import read_tree
from fedhet.data.images import IMAGES
from fedhet.data.sources.base import Source
from fedhet.data.spec import Dataset, DataSpec


def read_images(place: str, spec: DataSpec) -> Dataset:
    """Read the tree. Raises DataError for any fault of its folders and files."""
    return read_tree(place, spec, IMAGES)


SOURCES = (Source("imagefolder", "a tree of images", read_images, "PATH", is_mapped=True),)
