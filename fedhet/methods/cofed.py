"""CoFED: its settings, and the messages between its halves."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field

from fedhet.methods.spec import MethodSpec
from fedhet.settings.run import Optimizer
from fedhet.settings.schema import Count, CountOrNone, MethodSettings
from fedhet.wire.contract import Contract, ScalarField, TensorField, all_or_none
from fedhet.wire.identity import is_name

EQUAL, SAMPLES = "equal", "samples"
MOST_WEIGHT = 1e6


def given_weights(credibility: str) -> dict[str, float]:
    """Parse weights by client, as "site-a=2,site-b=0.5". Raises ValueError for malformed text."""
    if credibility in (EQUAL, SAMPLES):
        return {}
    weights: dict[str, float] = {}
    for part in credibility.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        weight = float(number)
        if not is_name(name) or name in weights or not 0 <= weight <= MOST_WEIGHT:
            raise ValueError(part)
        weights[name] = weight
    return weights


def _is_credibility(text: str) -> str:
    try:
        given_weights(text)
    except ValueError:
        raise ValueError(
            f"it takes {EQUAL}, {SAMPLES}, or weights from 0 to {MOST_WEIGHT:g} by client, each "
            "once, such as site-a=2,site-b=0.5"
        ) from None
    return text


def words(text: str) -> list[str]:
    """Return the words in a comma-separated text."""
    return [word.strip() for word in text.split(",")]


def numbers(text: str) -> list[float]:
    """Return the numbers in a comma-separated text. Raises ValueError for anything else."""
    return [float(word) for word in words(text)]


def _are_numbers(high: float) -> AfterValidator:
    """Return a check that a text holds numbers above 0 and at most `high`, none twice."""

    def check(text: str) -> str:
        rule = f"it takes numbers above 0 and at most {high:g}, comma-separated, none twice"
        try:
            found = numbers(text)
        except ValueError:
            raise ValueError(rule) from None
        if not all(0 < number <= high for number in found) or len({*found}) < len(found):
            raise ValueError(rule)
        return text

    return AfterValidator(check)


def _are_optimizers(text: str) -> str:
    known = get_args(Optimizer)
    if not {*words(text)} <= {*known} or len({*words(text)}) < len(words(text)):
        raise ValueError(f"it takes some of {', '.join(known)}, comma-separated, none twice")
    return text


class CofedSettings(MethodSettings):
    """Settings of CoFED."""

    threshold: Annotated[float, Field(ge=0, le=1)] = Field(
        0.3, description="alpha of Eq. 18: a class takes an instance by more than this share"
    )
    credibility: Annotated[str, AfterValidator(_is_credibility)] = Field(
        EQUAL,
        description="a participant's weight in the vote: equal (1), samples (its training samples) "
        "or given, as site-a=2,site-b=0.5; 1 for who is not named",
    )
    iterations: Count = Field(
        1,
        description="iterations of predicting, voting and update training; rounds = iterations + 1",
    )
    margin: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="a participant abstains where the probabilities of its two best classes differ "
        "by at most this; 0 = it never does, as in the paper's text",
    )
    update_epochs: CountOrNone = Field(
        0, description="epochs of a network's update training; 0 = local-epochs"
    )
    update_batch_size: Count = Field(1000, description="samples per minibatch of update training")
    search: Literal["none", "grid"] = Field(
        "none",
        description="grid: each participant with a network tries the combinations below on a held-"
        "out part of its own data, and trains with the best (Section 5.2)",
    )
    search_optimizers: Annotated[str, AfterValidator(_are_optimizers)] = Field(
        "adam,sgd", description="search = grid: optimisers to try"
    )
    search_rates: Annotated[str, _are_numbers(1e3)] = Field(
        "0.002,0.004,0.006,0.008,0.01",
        description="search = grid: learning rates to try; sgd tries ten times each",
    )
    search_decays: Annotated[str, _are_numbers(1.0)] = Field(
        "1,0.99",
        description="search = grid: factors to try, by which the rate falls after each epoch",
    )
    search_updates: Annotated[str, _are_numbers(1e3)] = Field(
        "0.1,2",
        description="search = grid: factors on the rate found, to try in update training",
    )
    search_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="search = grid: share of a participant's own training data held out"
    )

    def fixed_rounds(self) -> int:
        """Return one round of local training plus one of update training per iteration."""
        return self.iterations + 1


INSTRUCTIONS = Contract(
    (
        ScalarField("predict", bool, "is the public set to be predicted after training?"),
        TensorField(
            "labels",
            "uint",
            ("N",),
            "each public instance's pseudolabel in R_i, C for none",
            required=False,
            numbers="L",
        ),
    )
)
REPLIES = Contract(
    all_or_none(
        TensorField(
            "predictions",
            "uint",
            ("N",),
            "each public instance's class, in the smallest type; with cofed.margin, C for none",
            numbers="L",
        ),
        TensorField("space", "uint", ("P",), "the classes that the model distinguishes", ids="C"),
    )
)
SPEC = MethodSpec(
    title="pseudolabels on public data by vote; tasks and models of any kind",
    paper="Cao et al., Cross-Silo Heterogeneous Model Federated Multitask Learning (CoFED)",
    headline="common",
    settings=CofedSettings,
    kinds=("private", "local"),
    needs_public=True,
    any_model=True,
    instructions=INSTRUCTIONS,
    replies=REPLIES,
)
