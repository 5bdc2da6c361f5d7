"""Descriptions of methods and settings, for `fedhet methods`, `fedhet settings`, and the pages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo

from fedhet.kinds import IMAGE, KINDS
from fedhet.methods.registry import Method
from fedhet.settings.defense import ROBUST
from fedhet.settings.schema import allowed_values, as_text, kebab, plain
from fedhet.tasks import LIKELIHOOD, LOSS, TASKS
from fedhet.wire.contract import Contract

SETTING_COLUMNS = ("setting", "default", "allowed values", "description")
FIELD_COLUMNS = ("field", "type", "description")
SUMMED_WITHIN = {"all": "all clients", "architecture": "the clients of each architecture"}
"""Description of the clients whose replies are summed, for each value of `within`."""


def setting_rows(settings: Mapping[str, FieldInfo]) -> list[tuple[str, str, str, str]]:
    """Return the name, default, allowed values and description of each setting."""
    return [
        (name, literal(info.default), allowed_values(info, brief=True), info.description or "")
        for name, info in settings.items()
    ]


def literal(value: object) -> str:
    """Return a setting's value in the notation of a settings file."""
    return json.dumps(plain(value), ensure_ascii=False)


def default_models(method: Method) -> str:
    """Return a sentence with the method's default models for each kind of data."""
    parts = [as_text(method.spec.pool(IMAGE))]
    for kind in KINDS.values():
        if kind is not IMAGE:
            defaults = method.spec.defaults(kind).items()
            changed = [f"{method.table}.{kebab(name)} = {model}" for name, model in defaults]
            pool = as_text(method.spec.pool(kind))
            parts.append(f"for {kind.plural}, {', and '.join([pool, *changed])}")
    return f"Default models: {'; '.join(parts)}."


def privacy(method: Method) -> str:
    """Return a sentence about the method's support for differential privacy."""
    rule = method.spec.privacy
    if rule.unsupported:
        return f"Privacy (`privacy.epsilon`): unsupported, because {rule.unsupported}."
    needs = _requirements(method, rule.needs)
    requirement = f"; requires {needs}, because {rule.reason}" if needs else ""
    return f"Privacy (`privacy.epsilon`): {rule.mechanism}{requirement}."


def _requirements(method: Method, needs: Mapping[str, tuple[Any, ...]]) -> str:
    """Return the required settings of a method as NAME=VALUE, separated by commas."""
    return ", ".join(
        f"{method.table}.{kebab(name)}={' or '.join(str(each).lower() for each in allowed)}"
        for name, allowed in needs.items()
    )


def summation(method: Method) -> str:
    """Return a sentence about the method's support for secure aggregation."""
    return f"Secure aggregation (`privacy.secure-aggregation`): {summed(method)}."


def summed(method: Method) -> str:
    """Return a method's entry in the table about secure aggregation."""
    rule = method.spec.sums
    if rule.unsupported:
        return f"unsupported: {rule.unsupported}"
    lanes = rule.for_run(method.spec.settings())
    sums = [f"{', '.join(lane.fields)} of {SUMMED_WITHIN[lane.within]}" for lane in lanes]
    needs = _requirements(method, rule.needs)
    servers = {lane.server for lane in lanes}
    resists = "any server" if servers == {"malicious"} else "a server that follows the protocol"
    protected = f"; protects a site from {resists}"
    return f"sums of {'; '.join(sums)}" + (f"; requires {needs}" if needs else "") + protected


def tasks(method: Method) -> str:
    """Return a sentence about the tasks that a method supports, and the settings they require."""
    spec = method.spec
    losses = " or ".join(
        dict.fromkeys(loss for t in spec.tasks for loss in spec.losses(TASKS[t]()))
    )
    parts = ["all"]
    if spec.needs_task != LOSS:
        parts = [", ".join(spec.tasks), f"no other task, because {spec.only_tasks}"]
    if spec.needs_task == LIKELIHOOD:
        parts.append(f"data.loss must be {losses}")
    for needs, which in ((spec.with_classes, "with"), (spec.without_classes, "without")):
        if needs:
            parts.append(f"tasks {which} classes require {_requirements(method, needs)}")
    return f"Tasks (`data.task`): {'; '.join(parts)}."


def training(method: Method) -> str:
    """Return a sentence with the training settings of a method, or "" if it has none of its own."""
    spec = method.spec
    parts = {
        "default ": [name for name in spec.training if name not in spec.fixed_training],
        "requires ": [name for name in spec.training if name in spec.fixed_training],
    }
    texts = [
        words + ", ".join(f"training.{kebab(name)}={spec.training[name]}" for name in names)
        for words, names in parts.items()
        if names
    ]
    reason = f", because {spec.why_fixed}" if spec.why_fixed else ""
    return f"Training: {'; '.join(texts)}{reason}." if texts else ""


def defenses(method: Method) -> str:
    """Return a sentence with the robust aggregation rules that a method supports."""
    rules, robustness = ", ".join(method.spec.defenses) or "none", method.spec.robustness
    rules = "all rules" if method.spec.defenses == ROBUST else rules
    note = f"; {robustness}" if robustness and not method.spec.defenses else ""
    return f"Robust aggregation (`defense.average`): {rules}{note}."


def field_rows(contract: Contract) -> list[tuple[str, str, str]]:
    """Return the name, type and description of each field in a message."""
    return [
        (field.name, field.describe(), field.help + ("" if field.required else " (optional)"))
        for field in contract.fields
    ]
