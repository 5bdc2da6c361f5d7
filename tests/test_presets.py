"""Presets against the numbers in the papers, and combined presets."""

from collections import Counter

import pytest

from fedhet import models
from fedhet.base.errors import SettingsError
from fedhet.config.resolve import resolve
from fedhet.config.sources import gather, preset_names, read_preset

# FedType, Appendix F and Section 4.1.
FEDTYPE = {
    "method": "fedtype",
    "clients": 100,
    "rounds": 100,
    "fraction": 0.2,
    "data.partition": "dirichlet",
    "data.alpha": 0.5,
    "models.pool": [
        "resnet18",
        "resnet34",
        "resnet50",
        "resnet101",
        "resnet152",
        "vgg11",
        "vgg13",
        "vgg16",
        "vgg19",
    ],
    "training.optimizer": "adam",
    "training.lr": 0.0001,
    "training.batch-size": 16,
    "training.local-epochs": 5,
    "fedtype.proxy": "resnet18",
    "fedtype.lambda": 0.5,
    "fedtype.k-reg": 5,
    "fedtype.theta": 0.1,
}
# Algorithm 1 line by line, with the equations and appendices that it names.
ALGORITHM_1 = {
    "data.test-fraction": 0.2,  # Appendix C: "training, testing, and conformal learning sets in a
    "fedtype.calibration": 0.1,  # 7:2:1 ratio"
    "fedtype.calibrate-on": "held",  # "with the validation data D'", which is disjoint from D
    "fedtype.epoch-data": "part",  # "Divide the shuffled D into R parts"; "for each x in D^r"
    "fedtype.order": "joint",  # "Update the models w and p by optimizing J"
    "fedtype.proxy-loss": "kl",  # Eq. 2: J has CE of w alone; Eq. 1 teaches p
    "fedtype.backward": "conformal",
    "fedtype.teacher": "proxy",
    "fedtype.set-loss": "sum",  # Eq. 3: the sum over k in S
    "fedtype.labels": "own",  # "the complete set of class labels in D_i"
    "fedtype.eta": "consensus",  # Eq. 8
    "fedtype.g": "g1",  # Eq. 7
    "fedtype.shrinks": "both",  # S and L are both "via Eq. (6)", which has g
    "fedtype.u": "random",  # "a predefined randomized factor"
    "fedtype.quantile": "corrected",  # Appendix B, step 3: (1 - theta)(n + 1) / n
    "fedtype.infinite": "imitate",
    "fedtype.lambda": 0.5,  # Appendix F
    "fedtype.k-reg": 5,
    "fedtype.theta": 0.1,
}
# UM-pFSSL, section VI-A.
UM_PFSSL = {
    "method": "um-pfssl",
    "clients": 100,
    "rounds": 201,  # the first of them is the warm-up
    "fraction": 0.1,
    "data.partition": "dirichlet",
    "data.alpha": 0.5,
    "data.labeled-alpha": 0.5,
    "models.pool": ["resnet9"],
    "training.optimizer": "sgd",
    "training.lr": 0.0001,
    "training.momentum": 0.9,
    "training.batch-size": 64,
    "training.local-epochs": 5,
    "um-pfssl.helpers": 5,
    "um-pfssl.replace": 2,
    "um-pfssl.search-rounds": 30,
    "um-pfssl.refresh": 10,
    "um-pfssl.relation": "en+ta",
    "um-pfssl.divergence": "reverse",  # Eq. 5: KL(f(x), pseudo-label)
    "data.test-fraction": 0.2,
}
# Felo and Velo, Section 4; what it leaves open is as in HeteroFL's code (utils.py, data.py and
# train_classifier_fed.py, with SGD), whose defaults it names: crops by 4 and mirrored images too.
FELO = {
    "rounds": 100,  # Table 4
    "data.alpha": 0.5,
    "data.test-fraction": 0.0,  # all images are trained on, and all models judged on the test set
    "data.max-samples": 0,
    "data.public-fraction": 0.0,
    "training.optimizer": "sgd",
    "training.lr": 0.1,
    "training.momentum": 0.9,
    "training.weight-decay": 5e-4,
    "training.batch-size": 10,
    "training.local-epochs": 5,
    "training.clip": 1.0,
    "training.augment": "crop-flip",
    "training.schedule": "constant",  # HeteroFL's first fall of the rate is after 100 rounds
}
CLIENTS = {"cifar10": 20, "cinic10": 10}
POOLS = {  # depths of ResNets: Section 4, Section 4.3, Section 4.4
    "usual": (10, 14, 18, 22, 26),
    "homogeneous": (18,),
    "extreme": (10, 18, 26, 34, 50),
}
# data set, IID?, pool -> preset, and the share of clients that is sampled: 20 %, but all of them in
# the non-IID half of Table 2.
EXPERIMENTS = {
    ("cifar10", True, "usual"): ("cifar10-iid", 0.2),
    ("cifar10", False, "usual"): ("cifar10", 0.2),
    ("cinic10", True, "usual"): ("cinic10,iid", 0.2),
    ("cinic10", False, "usual"): ("cinic10", 0.2),
    ("cifar10", True, "homogeneous"): ("cifar10,homogeneous,iid", 0.2),
    ("cifar10", False, "homogeneous"): ("cifar10-homogeneous", 1.0),
    ("cinic10", True, "homogeneous"): ("cinic10,homogeneous,iid", 0.2),
    ("cinic10", False, "homogeneous"): ("cinic10,homogeneous,all-sampled", 1.0),
    ("cifar10", True, "extreme"): ("cifar10,extreme,iid", 0.2),
    ("cifar10", False, "extreme"): ("cifar10-extreme", 0.2),
    ("cinic10", True, "extreme"): ("cinic10,extreme,iid", 0.2),
    ("cinic10", False, "extreme"): ("cinic10,extreme", 0.2),
}


@pytest.mark.parametrize(("dataset", "iid", "pool"), EXPERIMENTS)
@pytest.mark.parametrize("method", ["felo", "velo", "local"])
def test_felo_presets_equal_the_paper(method, dataset, iid, pool):
    """The presets also apply to local training, with the same split and budget."""
    names, fraction = EXPERIMENTS[dataset, iid, pool]
    own = "velo" if method == "velo" else "felo"
    config = resolve(gather(method, f"{own}-{names}"))
    found = config.flat()
    assert {key: found[key] for key in FELO} == FELO
    assert config.method.name == method
    assert found["data.dataset"].endswith(dataset)
    assert found["data.partition"] == ("iid" if iid else "dirichlet")
    assert (found["clients"], found["fraction"]) == (CLIENTS[dataset], fraction)
    run = config.run
    assigned = Counter(models.assign(run.models.pool, run.clients, run.seed, run.models.assignment))
    each = CLIENTS[dataset] // len(POOLS[pool])  # four clients of each model, or two; or all
    assert assigned == {f"resnet{depth}": each for depth in POOLS[pool]}
    if method != "local":
        printed = {"alpha": 1.0, "feature-weight": 1.0, "logit-weight": 1.0, "feature-norm": "none"}
        printed |= {"share-weights": True, "weighting": "clients", "feature-dim": 512}
        assert {key: found[f"{method}.{key}"] for key in printed} == printed
    if method == "velo":  # Algorithm 2, lines 4 to 7; 20 clients in 100 rounds send no more
        assert (found["velo.min-separation"], found["velo.interval"]) == (0, 1)
        assert found["velo.memory"] >= 20 * 100


@pytest.mark.parametrize("method", ["felo", "velo"])
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("cifar10-iid", "cifar10,iid"),
        ("cifar10-homogeneous", "cifar10,homogeneous,all-sampled"),
        ("cifar10-extreme", "cifar10,extreme"),
    ],
)
def test_combined_felo_presets_equal_named_presets(method, name, parts):
    whole, joined = (resolve(read_preset(f"{method}-{each}")).flat() for each in (name, parts))
    assert whole == joined


# FedGEMS, Section 4.1 and Table 13; Tables 10 and 11 for the models.
FEDGEMS = {
    "method": "fedgems",
    "clients": 16,
    "rounds": 200,
    "fraction": 1.0,
    "data.partition": "dirichlet",
    "data.alpha": 0.5,
    "data.public-fraction": 0.5,  # "a public and a private dataset with a ratio of 1:1"
    "models.pool": [
        "gems-resnet11",
        "gems-resnet14-a",
        "gems-resnet14-b",
        "gems-resnet14-c",
        "gems-resnet17-a",
        "gems-resnet17-b",
        "gems-resnet17-c",
        "gems-resnet17-d",
    ],
    "models.assignment": "cycle",  # Table 11: clients 1 and 9 have the first, 2 and 10 the second
    "training.optimizer": "adam",
    "training.lr": 0.001,
    "training.weight-decay": 0.0001,
    "training.batch-size": 256,
    "training.local-epochs": 1,
    "training.schedule": "plateau",  # "can reduce once the accuracy is stable"
    "training.keep-optimizer": True,
    "fedgems.server-model": "gems-resnet56",
    "fedgems.epsilon": 0.75,
    "fedgems.selective": True,
    "fedgems.public-epochs": 1,
    "fedgems.server-epochs": 1,
    "attack.kind": "none",
}
FEDGEMS_HOMOGENEOUS = {
    **{name: value for name, value in FEDGEMS.items() if name != "data.alpha"},
    "data.partition": "iid",
    "models.pool": ["gems-resnet11"],
}
# FedType, Appendix K: DistilBERT kept fixed below 3, 4 or 5 linear layers; 50 rounds.
FEDTYPE_TEXTS = {
    "rounds": 50,
    "data.alpha": 0.5,
    "models.pool": [f"encoder-{n}-frozen:distilbert" for n in (3, 4, 5)],
    "fedtype.proxy": "encoder-3-frozen:distilbert",
    "fedtype.aggregation": "fedavg",
}
FEDTYPE_ONE_TEXT_MODEL = FEDTYPE_TEXTS | {
    "models.pool": ["encoder-4-frozen:distilbert"],
    "fedtype.proxy": "encoder-4-frozen:distilbert",
}
# FedTGP, Table 2 for the clients, and run_me.sh of the authors' code for the settings: its lambda
# belongs to the mean squared error (the paper's 0.1 to the Euclidean distance).
FEDTGP = {
    "method": "fedtgp",
    "clients": 20,
    "rounds": 1000,
    "data.partition": "dirichlet",
    "data.alpha": 0.1,
    "models.pool": ["resnet10", "resnet18", "resnet34"],
    "training.optimizer": "sgd",
    "training.lr": 0.01,
    "training.batch-size": 10,
    "training.local-epochs": 1,
    "fedtgp.distance": "mse",
    "fedtgp.lambda": 10.0,
    "fedtgp.margin": "nearest",
    "fedtgp.feature-dim": 512,
    "fedtgp.max-margin": 100.0,
    "fedtgp.server-epochs": 100,
}
FED_ISIC = {"clients": 6, "fraction": 1.0, "rounds": 100}  # Appendix C: FLamby's centers
EIGHT = {"clients": 8, "fedgems.server-model": "gems-resnet20"}  # Appendix B.4
TABLE_8 = {"attack.kind": "paf", "attack.attackers": 0}  # 0 is one client a round, Section 4.3


@pytest.mark.usefixtures("encoders")
@pytest.mark.parametrize(
    ("name", "dataset", "expected"),
    [
        ("fedgems-cifar10", "cifar10", FEDGEMS),
        ("fedgems-cifar100", "cifar100", FEDGEMS),
        ("fedgems-cifar10-homogeneous", "cifar10", FEDGEMS_HOMOGENEOUS),
        ("fedgems-cifar100-homogeneous", "cifar100", FEDGEMS_HOMOGENEOUS),
        ("fedgems-cifar100,fedgems-eight", "cifar100", FEDGEMS | EIGHT),
        ("fedgems-cifar10-homogeneous,fedgems-eight", "cifar10", FEDGEMS_HOMOGENEOUS | EIGHT),
        ("fedgems-table8", "cifar10", FEDGEMS_HOMOGENEOUS | EIGHT | TABLE_8),
        ("fedtgp-cifar100", "cifar100", FEDTGP),
        ("table1-fmnist", "fashion-mnist", FEDTYPE),
        ("table1-cifar10", "cifar10", FEDTYPE),
        ("table1-cifar100", "cifar100", FEDTYPE),
        *(
            (f"table1-{name},fedtype-algorithm-1", dataset, FEDTYPE | ALGORITHM_1)
            for name, dataset in (("fmnist", "fashion-mnist"), ("cifar10", "cifar10"))
        ),
        ("table1-cifar100,fedtype-algorithm-1", "cifar100", FEDTYPE | ALGORITHM_1),
        ("fed-isic2019", "fed-isic2019:data/fed-isic2019", FEDTYPE | FED_ISIC),
        (
            "fed-isic2019,fedtype-algorithm-1",
            "fed-isic2019:data/fed-isic2019",
            FEDTYPE | ALGORITHM_1 | FED_ISIC,
        ),
        ("table8-agnews", "text:data/agnews", FEDTYPE | FEDTYPE_TEXTS),
        ("table8-agnews,table8-homogeneous", "text:data/agnews", FEDTYPE | FEDTYPE_ONE_TEXT_MODEL),
        ("um-pfssl-fmnist", "fashion-mnist", UM_PFSSL),
        ("um-pfssl-cifar10", "cifar10", UM_PFSSL),
    ],
)
def test_preset_equals_the_paper(name, dataset, expected):
    found = resolve(read_preset(name)).flat()
    assert {key: found[key] for key in expected} == expected
    assert found["data.dataset"] == dataset


PAIRED = {"euclidean": 0.1, "mse": 10.0}


@pytest.mark.parametrize("name", [n for n in preset_names() if "fedtgp" in n])
def test_preset_pairs_distance_and_weight(name):
    own = resolve(read_preset(name)).method_settings
    weight, distance = own.pull
    assert weight == PAIRED[distance]


FULL_SIZE = [
    n for n in preset_names() if n.startswith("fedgems-cifar") and not n.endswith("-small")
]


@pytest.mark.parametrize("name", FULL_SIZE)
def test_fedgems_image_counts_equal_the_paper(name):
    """Half of 60,000 images is public.

    Five sixths of each half are for training, and 5,000 images for testing.
    """
    data = resolve(read_preset(name)).run.data
    training, testing = 50_000, 10_000  # CIFAR's own split
    public = training * data.public_fraction
    private = (training - public) * (1 - data.test_fraction)
    assert public == private == 60_000 / 2 * 5 / 6 == 25_000
    assert testing == 2 * 60_000 / 2 * 1 / 6
    assert (data.max_samples, data.max_test_samples, data.public_dataset) == (0, 0, "")


@pytest.mark.parametrize("alpha", [1, 0.5, 0.1])
@pytest.mark.parametrize("aggregation", ["fedavg", "fedprox", "pfedme", "pfedbayes"])
def test_every_column_and_row_of_fedtypes_table_1(alpha, aggregation):
    names = ["table1-cifar10"]
    names += [] if alpha == 0.5 else [f"alpha-{alpha}"]
    names += [] if aggregation == "fedavg" else [f"table1-{aggregation}"]
    found = resolve(read_preset(",".join(names))).flat()
    expected = {**FEDTYPE, "data.alpha": alpha, "fedtype.aggregation": aggregation}
    assert {key: found[key] for key in expected} == expected


def test_later_preset_overrides_an_earlier_one():
    assert read_preset("demo,alpha-0.1")["data.alpha"] == 0.1
    assert read_preset("alpha-0.1,demo")["data.alpha"] == 0.5


@pytest.mark.parametrize("names", ["demo,", ",demo", "demo,,demo", "demo alpha-1", "demo,alpha-2"])
def test_unknown_preset_in_a_list_raises(names):
    with pytest.raises(SettingsError, match="unknown preset"):
        read_preset(names)


CNN = "fedavg-cnn"
RESNETS = [f"htfl-resnet{depth}" for depth in (4, 6, 8, 10, 18, 34, 50, 101, 152)]
GOOGLENET, MOBILENET = "htfl-googlenet", "htfl-mobilenet-v2"
HTFL = {  # HtFLlib, system/main.py
    "htfe-img-2": [CNN, RESNETS[4]],
    "htfe-img-3": RESNETS[3:6],
    "htfe-img-4": [CNN, GOOGLENET, MOBILENET, RESNETS[4]],
    "htfe-img-5": [GOOGLENET, MOBILENET, *RESNETS[4:7]],
    "htfe-img-8": [CNN, GOOGLENET, MOBILENET, *RESNETS[4:]],
    "htfe-img-9": RESNETS,
    "htm-img-10": [CNN, GOOGLENET, MOBILENET, *RESNETS[4:], "htfl-vit-b-16", "htfl-vit-b-32"],
}


def test_every_family_of_htfllib_has_a_preset():
    assert {name for name in preset_names() if name.startswith(("htfe-", "htm-"))} == set(HTFL)


@pytest.mark.parametrize("name", HTFL)
def test_preset_is_the_family_of_htfllib(name):
    size = int(name.rpartition("-")[2])
    assert read_preset(name) == {"models.pool": HTFL[name]}
    assert len(HTFL[name]) == len(set(HTFL[name])) == size
    joined = resolve(read_preset(f"fedtgp-cifar100,{name}"))
    assert list(joined.run.models.pool) == HTFL[name]
    assert joined.method_settings.feature_dim == 512
    for model in HTFL[name]:
        models.check(model, "image", (3, 32, 32), 10, any_model=False)
