"""The settings of what messages weigh: `[wire]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedhet.settings.schema import Schema


class WireSettings(Schema):
    """How the floating-point tensors of messages are encoded."""

    encoding: Literal["float32", "float16", "int8", "top-k"] = Field(
        "float32",
        description="how weights and other large tensors travel: as they are; in half precision; "
        "as integers of one byte, rounded at random without bias; or, of weights that a client "
        "sends, the largest changes alone, while the rest is added to its next ones. Other than "
        "with float32, weights travel as differences",
    )
    keep: Annotated[float, Field(gt=0, le=0.5)] = Field(
        0.15,
        description="top-k: share of each tensor's changes that is sent; besides, each number "
        "costs one bit",
    )

    resend: bool = Field(
        True,
        description="float32: whether weights are sent to a client that has them already; no "
        "number depends on it. With the other encodings they never are",
    )
