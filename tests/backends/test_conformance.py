"""Every public name of the engines' own modules is here, with its signature, and stands in docs/backends.md."""

import copy
import importlib
import re
from pathlib import Path

import pytest
from conformance import SEEDS, differences, names, seed, without
from instances import INSTANCES

NAMES = sorted(path.stem for path in SEEDS.glob("*.json"))
DOCS = (Path(__file__).parents[2] / "docs" / "backends.md").read_text(encoding="utf-8")


def checked(name, module=None, listed=None):
    listed = seed(name) if listed is None else listed
    module = importlib.import_module(listed["module"]) if module is None else module
    return differences(listed, module, INSTANCES[name]())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_missing_or_has_another_signature(name):
    assert checked(name) == []


@pytest.mark.parametrize(
    ("name", "path"),
    [(name, ".".join(filter(None, (owner, member))))
     for name in NAMES for owner, members in names(seed(name)).items() for member in sorted(members)
     if member in seed(name)["classes"].get(owner, {}).get("methods", {member: None})],
)  # fmt: skip
def test_each_missing_name_is_found(name, path):
    """A planted omission of each function and method in turn."""
    module = without(importlib.import_module(seed(name)["module"]), path)
    assert any(path in text for text in checked(name, module))


@pytest.mark.parametrize("name", NAMES)
def test_other_signatures_are_found(name):
    """A planted difference in each parameter, default, field and kind that the list holds."""
    listed = seed(name)
    planted = 0
    for parts in listed["classes"].values():
        places = [method["parameters"] for method in parts["methods"].values()] + [parts.get("fields", [])]
        for parameters in places:
            for i, entry in enumerate(parameters):
                changes = [[f"{entry[0]}_", *entry[1:]]]
                if not entry[0].startswith("*"):
                    changes.append([entry[0], "object()"])
                for changed in changes:
                    parameters[i] = changed
                    assert checked(name, listed=listed), changed
                    planted += 1
                parameters[i] = entry
        for method in parts["methods"].values():
            kind = method["kind"]
            method["kind"] = "static" if kind != "static" else "class"
            assert checked(name, listed=listed)
            method["kind"] = kind
        for kind, absent in (("instance_attributes", ["absent"]), ("class_attributes", {"absent": "0"})):
            assert checked(name, listed=copy.deepcopy(listed)) == []
            known = parts.get(kind)
            parts[kind] = absent
            assert checked(name, listed=listed)
            parts[kind] = type(absent)() if known is None else known
    assert planted > 20


def documented(name):
    """Of a seed's section, the names in backquotes in the first column of each class's table."""
    section = re.search(rf"## [^\n]*`jaxpaged\.backends\.{name}`\n(.*?)(?=\n## |\Z)", DOCS, re.DOTALL).group(1)
    found = {}
    for title, table in re.findall(r"### ([^\n]+)\n(.*?)(?=\n### |\Z)", section, re.DOTALL):
        owner = title.strip("`") if title.startswith("`") else ""
        rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
        found[owner] = {entry for row in rows for entry in re.findall(r"`([^`]+)`", row)}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_documentation_lists_each_name(name):
    listed = {owner: members for owner, members in names(seed(name)).items() if members or owner}
    assert documented(name) == listed


def test_backends_need_no_engine():
    for name in NAMES:
        source = Path(importlib.import_module(seed(name)["module"]).__file__).read_text(encoding="utf-8")
        assert not re.search(r"^\s*(import|from) (vllm|aphrodite)", source, re.MULTILINE)
