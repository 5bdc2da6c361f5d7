"""Custom models, named by an import path "package.module:function".

The function is called with (shape, classes). It returns a HetModel, or two modules: an extractor
[N, *shape] -> [N, D] and a classifier [N, D] -> [N, C]. For methods that support any model, the
function may also return an object with `fit` and `predict`.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from fedhet.algorithms import MlpWidth
from fedhet.base.errors import ModelError, import_hint, nearest
from fedhet.data.texts import is_encoder
from fedhet.kinds import IMAGE, Kind, Shape
from fedhet.models.base import HetModel, join, output_shape
from fedhet.models.classical import Classifier
from fedhet.models.libraries import is_timm
from fedhet.wire.contract import MAX_MAGNITUDE
from fedhet.wire.knowledge import DTYPES, MAX_RANK


def is_user_model(name: str) -> bool:
    """Return whether `name` is an import path."""
    return ":" in name and not is_encoder(name) and not is_timm(name)


def import_user_model(name: str) -> Callable[..., Any]:
    """Import the function `name`. Raises ModelError if that fails."""
    path, _, attribute = name.partition(":")
    if not path or not attribute or path.startswith("."):
        raise ModelError(f"model '{name}' must have the form 'package.module:function'")
    try:
        module = importlib.import_module(path)
    except (Exception, SystemExit) as error:
        reason = _reason(error) + import_hint(error, path)
        if path.endswith(".py"):
            place = path.removesuffix(".py").replace("/", ".")
            reason = f"expected a module, got a file. Use {place}:{attribute}"
        raise ModelError(f"model '{name}': cannot import '{path}': {reason}") from error
    function = getattr(module, attribute, None)
    if function is None:
        hint = nearest(attribute, vars(module))
        raise ModelError(f"model '{name}': '{attribute}' not found in module '{path}'{hint}")
    if not callable(function):
        raise ModelError(
            f"model '{name}': '{attribute}' must be a function, got {type(function).__name__}"
        )
    return function  # type: ignore[no-any-return]


def assemble_user_model(
    name: str, shape: Shape, classes: int, feature_dim: int | None, kind: Kind | None
) -> HetModel:
    """Build a custom model, check it, and adapt its feature width.

    Raises ModelError if the model cannot be built or is unsuitable.
    """
    result = call_user_model(name, shape, classes)
    if is_classifier(result):
        raise ModelError(no_gradients(name))
    match result:
        case HetModel():
            extractor, classifier = result.extractor, result.classifier
        case [nn.Module() as extractor, nn.Module() as classifier]:
            pass
        case _:
            raise ModelError(
                f"model '{name}': the function must return a HetModel or two modules (extractor, "
                f"classifier), got {type(result).__name__}"
            )
    modules = nn.ModuleDict({"extractor": extractor, "classifier": classifier})
    # Check types first, because a model with wrong types does not run.
    check_tensors(name, modules, is_built=False)
    try:
        features = output_shape(extractor, shape, kind)
        logits = output_shape(classifier, features[1:])
    except Exception as error:
        raise ModelError(
            f"model '{name}' failed for samples of shape {shape}: {_reason(error)}"
        ) from error
    if len(features) != 2 or features[0] != 2:
        raise ModelError(
            f"model '{name}': for a batch of 2, expected features of shape (2, D), got {features}"
        )
    if logits != (2, classes):
        raise ModelError(
            f"model '{name}': for a batch of 2, expected logits of shape (2, {classes}), got "
            f"{logits}"
        )
    width = features[1]
    check_tensors(name, modules)
    if feature_dim not in (None, width) or isinstance(feature_dim, MlpWidth):
        if not isinstance(classifier, nn.Linear):
            raise ModelError(
                f"model '{name}': the classifier must be an nn.Linear to adapt {width} features to "
                f"{feature_dim}, got {type(classifier).__name__}"
            )
        return join(extractor, width, classes, feature_dim)
    if not isinstance(result, HetModel):
        return HetModel(extractor, classifier, width)
    if result.feature_dim != width:
        raise ModelError(
            f"model '{name}': feature_dim must be the feature width {width}, got "
            f"{result.feature_dim}"
        )
    return result


def call_user_model(name: str, shape: Shape, classes: int) -> Any:
    """Import and call the function `name`. Raises ModelError if that fails."""
    function = import_user_model(name)
    try:
        return function(shape, classes)
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"model '{name}' failed for shape {shape}, classes {classes}: {_reason(error)}"
        ) from error


def is_classifier(result: object) -> bool:
    """Return whether the result of a user's function is a classifier without gradients."""
    return isinstance(result, Classifier) and not isinstance(result, nn.Module)


def no_gradients(name: str) -> str:
    """Return the error message for a model without gradients in a gradient-based method."""
    return f"model '{name}': this method or loss does not support models without gradients"


def check_tensors(name: str, model: nn.Module, *, is_built: bool = True) -> None:
    """Check that a model's state can be sent and saved. Raises ModelError if it cannot.

    Lazy parameters are accepted only if `is_built` is false, i.e. before the first forward pass.
    """
    state = model.state_dict()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for key, value in {**state, **parameters}.items():
        if not key.isprintable():
            raise ModelError(f"model '{name}': {key!r}: unsupported name, expected printable text")
        # Some methods train the classifier on the server's class means, which are float32.
        types = ("float32",) if key.startswith("classifier.") else ("float32", "float64")
        fault = _fault_of(value, types if key in parameters else (), is_built=is_built)
        if fault:
            raise ModelError(f"model '{name}': {key}: {fault}")
    if not any(each.requires_grad for each in parameters.values()):
        raise ModelError(
            f"model '{name}': expected a parameter with requires_grad=True, got only "
            f"{len(parameters)} with requires_grad=False"
        )


def _fault_of(value: object, trained_types: Sequence[str], *, is_built: bool) -> str:
    """Return the reason why a state-dict entry cannot be sent or saved, or "" if it can.

    `trained_types` contains the supported types of a trained parameter; it is () for a buffer.
    """
    if not isinstance(value, Tensor):
        return (
            f"unsupported entry of the state dict, expected a tensor, got a {type(value).__name__}"
        )
    dtype = str(value.dtype).removeprefix("torch.")
    if is_lazy(value):
        fault = "never initialized, expected the forward pass to use it, got a lazy parameter"
        return fault if is_built else ""
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        kind = "a quantized" if value.is_quantized else f"a {value.layout}".replace("torch.", "")
        return f"unsupported layout, expected a dense tensor, got {kind} tensor of {dtype}"
    if value.device.type != "cpu":
        return f"unsupported device, expected cpu, got {value.device}. fedhet moves models itself."
    if trained_types and value.requires_grad and dtype not in trained_types:
        remedy = "Keep parameters in float32. For half precision, set 'engine.precision'."
        return f"unsupported type of a trained parameter, expected float32, got {dtype}. {remedy}"
    if dtype not in DTYPES:
        return f"unsupported type, expected a NumPy type such as float32, got {dtype}"
    if value.ndim > MAX_RANK:
        return f"unsupported shape, expected at most {MAX_RANK} dimensions, got {value.ndim}"
    odd = value.detach()[~(value.detach().double().abs() <= MAX_MAGNITUDE)].view(-1)
    if len(odd):
        remedy = "" if trained_types else ". Store a constant in a buffer with persistent=False."
        return (
            f"must be finite and at most {MAX_MAGNITUDE:g} in magnitude, got {odd[0].item()}"
            f"{remedy}"
        )
    return ""


def check_use(
    name: str, model: nn.Module, another: nn.Module, shape: Shape, kind: Kind | None
) -> None:
    """Check that a custom model can be copied, restored, trained for one step, and evaluated.

    The model must not change its input, and must predict a single sample. `another` is the result
    of a second call to the user's function, which must return a new model with the same layout.
    Neither model can be used afterwards. Raises ModelError if the check fails.
    """
    for key, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ModelError(
                f"model '{name}': {key}: batch norm without running statistics, so predictions "
                "depend on the other samples in a batch, expected track_running_stats=True"
            )
    before = {key: value.clone() for key, value in model.state_dict().items()}
    samples = (kind or IMAGE).blank(2, tuple(shape))
    samples = torch.randn_like(samples) if samples.is_floating_point() else samples
    given = samples.clone()
    steps: dict[str, Callable[[], object]] = {
        "copy.deepcopy": lambda: copy.deepcopy(model),
        "load_state_dict(state_dict())": lambda: model.load_state_dict(before),
        "register_forward_hook": lambda: [
            part.register_forward_hook(lambda *_: None) for part in model.modules()
        ],
        "a training step": lambda: model.train()(samples).sum().backward(),
        "the prediction of a single sample": lambda: model.eval()(samples[:1]),
    }
    for step, carry_out in steps.items():
        try:
            carry_out()
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ModelError(f"model '{name}': {step} failed: {reason}") from error
        if not torch.equal(samples, given):
            raise ModelError(
                f"model '{name}': {step} changes the input, expected no operation in place on it, "
                "such as x.sub_() or a first layer with inplace=True, because models share batches"
            )

    def layout(state: Mapping[str, Tensor]) -> dict[str, str]:
        dtype_of = {key: str(value.dtype).removeprefix("torch.") for key, value in state.items()}
        return {key: f"{dtype_of[key]} {list(value.shape)}" for key, value in state.items()}

    expected = layout(before)
    for changed, by in ((model, "a training step"), (another, "a second call of the function")):
        actual = layout(changed.state_dict())
        for key in [*expected, *(actual.keys() - expected.keys())]:
            if (was := expected.get(key, "none")) != (now := actual.get(key, "none")):
                raise ModelError(
                    f"model '{name}': {key}: changed by {by}, expected the same type and shape, "
                    f"got {now} after {was}"
                )
    first = {value.data_ptr() for value in model.parameters() if value.numel()}
    for key, value in another.named_parameters():
        if value.numel() and value.data_ptr() in first:
            raise ModelError(
                f"model '{name}': {key}: shared by two models, expected new modules in each call "
                "of the function, got the same modules. Create the modules inside the function."
            )
    check_outputs(name, model, another, samples)


@torch.no_grad()
def check_outputs(name: str, model: nn.Module, another: nn.Module, samples: Tensor) -> None:
    """Check that a custom model returns logits, which depend only on its state dict and samples.

    `another` is the result of a second call to the user's function with the same seeds. It gets the
    state of `model`. Raises ModelError if the check fails.
    """
    another.load_state_dict(model.state_dict())
    outputs, again, others = (each.eval()(samples) for each in (model, model, another))
    one = torch.ones(len(samples))
    if outputs.shape[1] > 1 and (outputs >= 0).all() and torch.allclose(outputs.sum(1), one):
        raise ModelError(
            f"model '{name}': expected logits, got probabilities. Remove the softmax from the "
            "model, because the loss applies it."
        )
    if torch.equal(outputs, again) and not torch.allclose(outputs, others, rtol=1e-3, atol=1e-4):
        raise ModelError(
            f"model '{name}': two results of the function with the same state dict differ. Store "
            "each random constant with register_buffer, or draw it from torch's global generator."
        )


def _reason(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
