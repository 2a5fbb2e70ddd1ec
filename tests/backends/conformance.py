"""What a backend module lacks of the names in a list like `seeds/sdpa.json`.

Such a list holds what an engine's own module offers: values, functions with their parameters and the text of their
defaults, and classes with their attributes, fields in order, and methods (without `self` or `cls`) by kind.
"""

import dataclasses
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SEEDS = Path(__file__).parent / "seeds"
_KINDS = {staticmethod: "static", classmethod: "class", property: "property"}


def seed(name: str) -> dict[str, Any]:
    return json.loads((SEEDS / f"{name}.json").read_text(encoding="utf-8"))


def names(listed: dict[str, Any]) -> dict[str, set[str]]:
    """All names of a list, by class; those of the module itself under ""."""
    found = {"": {*listed["values"], *listed["functions"]}}
    for name, parts in listed["classes"].items():
        found[name] = {*parts.get("class_attributes", {}), *parts.get("instance_attributes", [])}
        found[name] |= {field[0] for field in parts.get("fields", [])} | set(parts["methods"])
    return found


def differences(listed: dict[str, Any], module: Any, instances: dict[str, Any]) -> list[str]:
    """One sentence for each name that `module` lacks or has with another signature.

    Args:
      instances: an object of each class with instance attributes.
    """
    namespace = vars(module)
    found = []
    for name, text in listed["values"].items():
        if name not in namespace:
            found.append(f"{name}: missing")
        elif text is not None and namespace[name] != _value(text, namespace):
            found.append(f"{name}: expected {text}, got {namespace[name]!r}")
    for name, parameters in listed["functions"].items():
        found += _function(name, parameters, namespace.get(name), namespace, skip=0)
    for name, parts in listed["classes"].items():
        if name not in namespace:
            found.append(f"{name}: missing")
            continue
        found += [f"{name}.{text}" for text in _class(parts, namespace[name], instances.get(name), namespace)]
    return found


def _value(text: str, namespace: dict[str, Any]) -> Any:
    """What a default stands for; something that equals nothing where the module lacks a name that it uses."""
    try:
        return eval(text, dict(namespace))
    except NameError:
        return object()


def _class(parts: dict[str, Any], cls: type, instance: Any, namespace: dict[str, Any]) -> list[str]:
    found = []
    for name, text in parts.get("class_attributes", {}).items():
        if not hasattr(cls, name):
            found.append(f"{name}: missing")
        elif getattr(cls, name) != _value(text, namespace):
            found.append(f"{name}: expected {text}, got {getattr(cls, name)!r}")
    found += [f"{name}: missing" for name in parts.get("instance_attributes", []) if not hasattr(instance, name)]
    if "fields" in parts:
        found += _fields(parts["fields"], cls, namespace)
    for name, method in parts["methods"].items():
        raw = inspect.getattr_static(cls, name, None)
        kind = None if raw is None else _KINDS.get(type(raw), "method")
        if kind != method["kind"]:
            found.append(f"{name}: expected a {method['kind']}, got {kind}")
        elif kind != "property":
            function = raw if kind == "method" else raw.__func__
            found += _function(name, method["parameters"], function, namespace, skip=0 if kind == "static" else 1)
    return found


def _fields(listed: list[list[str]], cls: type, namespace: dict[str, Any]) -> list[str]:
    fields = [f for f in dataclasses.fields(cls) if f.init] if dataclasses.is_dataclass(cls) else []
    if [f.name for f in fields] != [entry[0] for entry in listed]:
        return [f"fields: expected {[entry[0] for entry in listed]}, got {[f.name for f in fields]}"]
    found = []
    for (name, *default), field in zip(listed, fields, strict=True):
        expected = _value(default[0], namespace) if default else dataclasses.MISSING
        if field.default != expected:
            found.append(f"{name}: expected default {expected!r}, got {field.default!r}")
    return found


def _function(name: str, listed: list[list[str]], function: Any, namespace: dict[str, Any], skip: int) -> list[str]:
    if function is None:
        return [f"{name}: missing"]
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    ours = [stars.get(p.kind, "") + p.name for p in parameters]
    if ours != [entry[0] for entry in listed]:
        return [f"{name}: expected parameters {[entry[0] for entry in listed]}, got {ours}"]
    found = []
    for (parameter, *default), ours_too in zip(listed, parameters, strict=True):
        expected = _value(default[0], namespace) if default else inspect.Parameter.empty
        if ours_too.default != expected:
            found.append(f"{name}: expected {parameter}={expected!r}, got {ours_too.default!r}")
    return found


def without(module: Any, path: str) -> Any:
    """A copy of `module` that lacks one name, of its own or of one of its classes ("Class.name")."""
    owner, _, name = path.rpartition(".")
    members = dict(vars(module))
    if not owner:
        del members[name]
    else:
        cls = members[owner]
        copy = type(
            cls.__name__, cls.__bases__, {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
        )
        delattr(copy, name)
        members[owner] = copy
    return SimpleNamespace(**members)
