"""The settings of the data: `[data]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from fedhet.kinds import KINDS
from fedhet.settings.schema import (
    A_DATASET,
    A_FOLDER,
    Bytes,
    Count,
    CountOrNone,
    Listed,
    Names,
    NonNegative,
    Positive,
    Range,
    Schema,
    Side,
    Tokens,
    Vocabulary,
    machine,
)

if TYPE_CHECKING:
    SampleKind = str
else:
    SampleKind = Literal[("auto", *KINDS)]


class DataSettings(Schema):
    """The data, its partition among clients, and its public and unlabelled parts."""

    dataset: Annotated[str, A_DATASET] = Field(
        "digits",
        description="a dataset's name, or a format and where the data lies, such as npz:DIR, as "
        "`fedhet datasets` lists them",
    )
    sample_kind: SampleKind = Field(
        "auto",
        description="the kind of samples; auto = that of 'dataset'; needed where sites have "
        "folders of their own, of which 'dataset' says nothing",
    )
    data_dir: Annotated[str, A_FOLDER] = machine("data", "the folder of torchvision's datasets")
    download: bool = machine(False, "whether a missing dataset may be downloaded")
    partition: Literal["dirichlet", "iid", "shards", "classes", "superclasses"] = Field(
        "dirichlet", description="how the training set is divided among the clients"
    )
    by: str = Field(
        "",
        description="text:FILE, table:FILE, or signal:DIR with train.npz: the column (array) that "
        "says to whom a sample belongs; each client is one person or site, those with the most "
        "samples first; empty = partitioned by 'partition'",
    )
    alpha: Positive = Field(
        0.5, description="concentration of the Dirichlet distribution; a smaller one is more skewed"
    )
    shards: Count = Field(2, description="partition = shards: shards of each client")
    classes_per_client: Count = Field(2, description="partition = classes: classes of each client")
    superclasses: Literal["cifar100"] | Annotated[tuple[Names, ...], Listed] = Field(
        (),
        description="lists of classes that are joined into superclasses, or cifar100 for those of "
        "CIFAR-100; none = not joined",
    )
    label_space: Range = Field(
        (6, 8), description="partition = superclasses: how many classes a client draws"
    )
    subclasses: Literal["all"] | Range = Field(
        "all", description="how many subclasses of each superclass a client holds; all is IID"
    )
    samples_per_class: Count = Field(
        50, description="partition = superclasses: samples of each class that a client holds"
    )
    min_samples: Count = Field(10, description="minimum number of samples of a client")
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.2,
        description="share of a client's samples held out as its own test split; 0 = none, which "
        "needs a common test set",
    )
    image_size: Side = Field(
        0,
        description="side to which images of imagefolder:DIR and hf:NAME are resized; 0 = not "
        "resized",
    )
    class_level: Annotated[int, Field(ge=0, le=4)] = Field(
        0,
        description="imagefolder:PATH, text:PATH: depth of the directories that name the class, "
        "below PATH or its train and test; 0 = 1, but refused if the tree can be read in two ways",
    )
    text_column: Names = Field(
        ("text",),
        description="the columns of the text, which are joined; numbers from 1 where the file has "
        "no header",
    )
    label_column: str = Field(
        "label", description="the column of the class; a number where the file has no header"
    )
    target: str = Field("", description="table:PATH: the column of the class")
    columns: Names = Field(
        (),
        description="table:PATH: the columns that are features; none = all but target and by",
    )
    categories: Names = Field(
        (),
        description="table:PATH: columns of words as they are written, such as codes; names the "
        "target, or the label column of texts, if its numbers are classes",
    )
    missing: Names = Field(
        (), description="table:PATH: further marks of missing values, such as -999"
    )
    decimal: Literal["auto", "point", "comma"] = Field(
        "auto",
        description="table:PATH: the decimal sign of numbers; auto = as the values show",
    )
    date_order: Literal["auto", "dmy", "mdy"] = Field(
        "auto",
        description="table:PATH: the order of day, month, and year in dates that are not ISO 8601; "
        "auto = as the values show",
    )
    tokenizer: str = Field(
        "words",
        description="words, which are numbered by their hashes; or a folder in $FEDHET_ENCODERS "
        "with the tokenizer.json of an encoder",
    )
    vocabulary: Vocabulary = Field(
        8192, description="tokenizer = words: size of the vocabulary; the same at every site"
    )
    max_tokens: Tokens = Field(
        128, description="maximum number of tokens of a text; the rest is cut off"
    )
    max_bytes: Bytes = machine(
        2 * 2**30,
        "maximum size in bytes of one dataset's arrays, images, texts or table; a larger one is "
        "refused before it is read",
    )
    max_samples: CountOrNone = Field(
        0, description="size of the seeded subset of the training set that is used; 0 = all"
    )
    max_test_samples: CountOrNone = Field(
        0, description="size of the seeded subset of the common test set that is used; 0 = all"
    )
    public_dataset: Annotated[str, A_DATASET] = Field(
        "",
        description="data that no client owns, named as 'dataset' is, generated (tables, texts), "
        "or unused (training samples that max-samples leaves out); empty = public-fraction",
    )
    public_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="share of the training set that is public and no client's; 0 = none, or 0.2 "
        "for a method that needs public data and has no public-dataset",
    )
    public_samples: CountOrNone = Field(
        0, description="size of the seeded subset of public-dataset, or rows to generate; 0 = all"
    )
    labelled_alpha: NonNegative = Field(
        0.0,
        description="concentration of the Dirichlet distribution that divides a client's samples "
        "into labelled and unlabelled ones; 0 = all are labelled, or 0.5 for a method that needs "
        "unlabelled data",
    )
    unseen: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="share of the clients, drawn by the seed, with which nobody trains: after the "
        "last round they judge the model that the method offers them, as it is and after one local "
        "epoch; 0 = none",
    )
    labelled_least: CountOrNone = Field(
        2,
        description="minimum number of labelled and of unlabelled samples of a client; 0 = a "
        "client may lack either",
    )

    @model_validator(mode="after")
    def _public_data_has_one_source(self) -> DataSettings:
        if self.public_dataset and self.public_fraction:
            raise ValueError(
                f"setting 'data.public-fraction' = {self.public_fraction} is not allowed: it takes "
                f"0 with a 'data.public-dataset', which is {self.public_dataset!r}"
            )
        return self
