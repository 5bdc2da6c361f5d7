"""Networks of torchvision with weights from a file, and networks of timm."""

import numpy as np
import pytest
import torch
import torchvision
from federation import permitted, run, small

from fedhet.base.errors import ModelError, SettingsError
from fedhet.models import build, shapes
from fedhet.models import libraries as pretrained_models
from fedhet.models.libraries import is_pretrained
from fedhet.models.vision import TORCHVISION

BASE = "shufflenet-v2-x0.5"


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """Randomly drawn weights in torch's cache."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    for cached in (pretrained_models._weights, pretrained_models._cached_network):
        cached.cache_clear()
    torch.manual_seed(5)
    network = torchvision.models.get_model(TORCHVISION[BASE], weights=None)
    network.train()
    with torch.no_grad():
        for _ in range(20):  # the batch norms' statistics, as training leaves them
            network(torch.randn(8, 3, 64, 64))
    url = torchvision.models.get_model_weights(TORCHVISION[BASE]).DEFAULT.url
    path = tmp_path / "hub" / "checkpoints" / url.rpartition("/")[2]
    path.parent.mkdir(parents=True)
    torch.save(network.state_dict(), path)
    yield path, network.eval()
    for cached in (pretrained_models._weights, pretrained_models._cached_network):
        cached.cache_clear()


def features_by_hand(network, x):
    """Return the features of images [N, C, H, W] in [-1, 1], with torchvision's own functions."""
    network.fc = torch.nn.Identity()
    made = []
    for image in x:
        unit = torchvision.transforms.functional.resize(
            ((image + 1) / 2).expand(3, -1, -1), [64, 64], antialias=False
        )
        made.append(
            torchvision.transforms.functional.normalize(
                unit, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
            )
        )
    with torch.no_grad():
        return network(torch.stack(made))


@pytest.mark.parametrize("how", ["pretrained", "frozen"])
@pytest.mark.parametrize("channels", [1, 3])
def test_features_equal_those_of_the_weights(weights, how, channels):
    _, network = weights
    x = torch.rand(3, channels, 8, 8) * 2 - 1
    model = build(f"{BASE}-{how}", (channels, 8, 8), 4, seed=0).eval()
    with torch.no_grad():
        found, logits = model.features_and_logits(x)
    expected = features_by_hand(network, x)
    spread = expected.std(0).max()
    assert spread > 0, "else any images would do"
    assert torch.allclose(found, expected, atol=float(spread) / 100)
    assert logits.shape == (3, 4)


def test_frozen_network_is_not_sent(weights):
    frozen = build(f"{BASE}-frozen", (1, 8, 8), 4, seed=0)
    assert set(frozen.state_dict()) == {"classifier.weight", "classifier.bias"}
    frozen.train()
    x = torch.rand(4, 1, 8, 8)
    alone, beside = frozen.extractor(x[:1]), frozen.extractor(x)[:1]
    assert torch.allclose(alone, beside, rtol=1e-3, atol=0)  # its batch norms do not see a batch
    torch.nn.functional.cross_entropy(
        frozen(torch.ones(2, 1, 8, 8)), torch.tensor([0, 1])
    ).backward()
    assert frozen.classifier.weight.grad is not None
    trained = build(f"{BASE}-pretrained", (1, 8, 8), 4, seed=0)
    assert all(parameter.requires_grad for parameter in trained.parameters())


def test_shapes_need_no_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    pretrained_models._weights.cache_clear()
    found = shapes(f"{BASE}-pretrained", (3, 16, 16), 5)
    assert found["classifier.weight"] == ((5, 1024), "float32")
    assert set(shapes(f"{BASE}-frozen", (3, 16, 16), 5)) == {"classifier.weight", "classifier.bias"}
    with pytest.raises(ModelError, match="DEFAULT") as told:
        build(f"{BASE}-pretrained", (3, 16, 16), 5, seed=0)
    assert len(str(told.value).splitlines()) == 1


def test_invalid_weights_file_raises(weights):
    weights[0].write_bytes(b"not weights")
    with pytest.raises(ModelError):
        build(f"{BASE}-pretrained", (3, 16, 16), 5, seed=0)


def test_frozen_names():
    assert is_pretrained("resnet18-frozen")
    assert not is_pretrained("resnet18")
    assert not is_pretrained("cnn2-frozen")
    with pytest.raises(SettingsError, match="'cnn2-frozen'"):
        small("felo", models="cnn2-frozen")
    with pytest.raises(ModelError, match=r"1 or 3.*2"):
        build("resnet18-frozen", (2, 16, 16), 5, seed=0)


def test_run_with_a_frozen_network(weights, tmp_path):
    config = small("felo", models=[f"{BASE}-frozen", "mlp"], rounds=2, clients=2, max_samples=120)
    summary = run(config, tmp_path / "run")
    assert np.isfinite(summary["accuracy"]["common"]["private"]["mean"])


# --- timm -------------------------------------------------------------------------------------


def test_network_of_timm_is_built(tmp_path):
    timm = pytest.importorskip("timm")
    model = build("timm:resnet10t", (1, 32, 32), 5, seed=0)
    torch.manual_seed(0)
    x = torch.randn(2, 1, 32, 32)
    own = timm.create_model("resnet10t", num_classes=0, in_chans=1)
    own.load_state_dict(model.extractor.state_dict())
    model.eval(), own.eval()
    assert torch.equal(model.extractor(x), own(x))
    assert model(x).shape == (2, 5)
    again = build("timm:resnet10t", (1, 32, 32), 5, seed=0).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    assert build("timm:vit_tiny_patch16_224", (3, 32, 32), 5, seed=0).feature_dim == 192


def test_timms_names_are_checked():
    pytest.importorskip("timm")
    with pytest.raises(SettingsError, match=r"'resnet18x'"):
        small("felo", models="timm:resnet18x")
    with pytest.raises(ModelError, match=r"\[30\]"):
        build("timm:resnet10t", (30,), 2, seed=0)


def test_missing_timm_raises(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(SettingsError, match=r"'timm'.*pip install"):
        small("felo", models="timm:resnet18")


def test_site_need_not_allow_timms_names():
    sampled = {"method": "felo", "models.pool": "timm:resnet18*2,mlp"}
    assert permitted({"partition-id": 0}, sampled) == sampled


def test_run_without_the_weights_raises_before_training(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    config = small("local", models=["mlp", f"{BASE}-pretrained"])
    with pytest.raises(ModelError, match="weights file"):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
