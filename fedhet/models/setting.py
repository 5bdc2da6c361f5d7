"""The type of a setting that names a model."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from fedhet.errors import ModelError
from fedhet.models.registry import check_name


def _known(name: str) -> str:
    try:
        check_name(name)
    except ModelError as error:
        raise ValueError(str(error)) from None
    return name


ModelName = Annotated[str, AfterValidator(_known)]
