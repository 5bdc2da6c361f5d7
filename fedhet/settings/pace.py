"""The settings of a round's pace: `[pace]`. They change what a run computes.

The name is from Bonawitz et al., Towards Federated Learning at Scale: System Design, MLSys 2019.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from fedhet.settings.schema import CountOrNone, NonNegative, Positive, Schema

NO_CLOCK, DRAWN_CLOCK = "none", "log-normal"
_TIMEOUT = re.compile(r"(\d+(?:\.\d+)?)(x?)")
LONGEST = 1e6
"""The longest timeout, in seconds or in times of the usual round."""


def _enough(value: float) -> float:
    if value > 1 and value != int(value):
        raise ValueError("it takes a share > 0 and <= 1, or a number of clients from 2")
    return value


def _timeout(value: str) -> str:
    found = _TIMEOUT.fullmatch(value)
    if value and (found is None or not 0 < float(found[1]) <= LONGEST):
        raise ValueError("it takes seconds, such as 600, or times of the usual round, such as 3x")
    return value


class PaceSettings(Schema):
    """When a round closes, what late answers are worth, and which clients are asked."""

    mode: Literal["synchronous", "asynchronous"] = Field(
        "synchronous",
        description="synchronous: a round waits for clients that were asked in it; asynchronous "
        "(FedBuff): every 'enough' answers of any round make the next version, and count less the "
        "older they are",
    )
    over_selection: Annotated[float, Field(ge=0, le=10)] = Field(
        0.0,
        description="share of clients that are asked in addition to 'fraction', so that a round "
        "need not wait for the slowest",
    )
    enough: Annotated[float, Field(gt=0, le=1e6), AfterValidator(_enough)] = Field(
        1.0,
        description="answers with which a round closes: up to 1 a share of 'fraction' of the "
        "clients, from 2 on a number",
    )
    grace: NonNegative = Field(
        0.0, description="seconds for which a round waits for further answers when it has enough"
    )
    timeout: Annotated[str, AfterValidator(_timeout)] = Field(
        "",
        description="when a round closes, however few have answered: seconds, or times of the "
        "usual round, such as 3x; empty = when it has enough",
    )
    max_age: CountOrNone = Field(
        100,
        description="rounds after which a late answer is not used any more; 0 = none is used",
    )
    server_lr: Positive = Field(
        1.0, description="asynchronous: factor of the mean change of the weights (eta of FedBuff)"
    )
    select: Literal["random", "power-of-choice", "oort"] = Field(
        "random",
        description="how a round's clients are chosen: at random, those with the highest loss of "
        "some drawn by their numbers of samples, or by loss and speed (Oort)",
    )
    candidates: CountOrNone = Field(
        0, description="power-of-choice: clients that are drawn; 0 = twice as many as are chosen"
    )
    clock: str = Field(
        NO_CLOCK,
        description="the clock of a simulation: none is this machine's; log-normal: each client's "
        "speed and bandwidth are drawn; or a CSV file of measured devices (docs/rounds.md)",
    )
    spread: Annotated[float, Field(ge=0, le=5)] = Field(
        1.0, description="clock = log-normal: standard deviation of the logarithms"
    )
    sample_ms: Positive = Field(
        1.0, description="clock = log-normal: median of the milliseconds per training sample"
    )
    mbit: Positive = Field(
        20.0, description="clock = log-normal: median of the bandwidth, in Mbit per second"
    )
    drop_outs: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="in a simulation, the share of the asked clients that do not reply in a round, "
        "drawn for each client and round",
    )
    stragglers: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="in a simulation, the share of the asked clients that are slow in a round"
    )
    slowdown: Annotated[float, Field(ge=1, le=1000)] = Field(
        3.0, description="factor by which a straggler takes longer"
    )

    @property
    def is_simulated(self) -> bool:
        """Return whether rounds close by a simulated clock."""
        return self.clock != NO_CLOCK

    @property
    def is_asynchronous(self) -> bool:
        """Return whether answers of any round make the next version."""
        return self.mode == "asynchronous"

    @property
    def may_be_late(self) -> bool:
        """Return whether rounds may close before all that were asked have answered."""
        closes_early = self.over_selection > 0 or self.enough != 1 or bool(self.timeout)
        return self.is_asynchronous or closes_early

    def seconds_at_most(self, usual: float) -> float:
        """Return the seconds after which a round closes, if the usual round takes `usual`."""
        found = _TIMEOUT.fullmatch(self.timeout)
        if found is None:
            return float("inf")
        return float(found[1]) * (usual if found[2] else 1.0)

    @model_validator(mode="after")
    def _what_needs_another(self) -> PaceSettings:
        if self.server_lr != 1 and not self.is_asynchronous:
            raise ValueError(
                f"setting 'pace.server-lr' = {self.server_lr:g} is not allowed: it takes 1 unless "
                "'pace.mode' is asynchronous"
            )
        if self.candidates and self.select != "power-of-choice":
            raise ValueError(
                f"setting 'pace.candidates' = {self.candidates} is not allowed: it takes 0 unless "
                "'pace.select' is power-of-choice"
            )
        return self


SIMULATED_ONLY: Mapping[str, Any] = {"clock": NO_CLOCK, "drop_outs": 0.0, "stragglers": 0.0}
"""The settings of simulations alone, by field, with the value that a deployment takes."""
