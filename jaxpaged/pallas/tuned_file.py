"""The file of tiles that were found best, `tuned.json`: how it is read and checked, and how it is written.

It is `{"default": kind, "gpus": {kind: {"num_sms": .., "decode": [rule, ..], "prefill": [rule, ..]}}}`, a rule being
`{"when": {name: [least, most], ..}, "use": {..}}`; or `{"num_sms": .., "like": kind}` for a GPU with another's rules.
"""

import dataclasses
import functools
import importlib.resources
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from jaxpaged.pallas.tuning import DecodeTiles, Gpu, PrefillTiles, Range, Rule, ShapeClass

NAME = "tuned.json"
TILES = {"decode": DecodeTiles, "prefill": PrefillTiles}


@dataclasses.dataclass(frozen=True)
class Table:
    """All GPUs of a file, by kind.

    Attributes:
      default: the kind whose rules those of any other kind are.
      like: the kind whose rules a kind has, unless it has its own.
    """

    default: str
    gpus: Mapping[str, Gpu]
    like: Mapping[str, str]

    def gpu(self, kind: str | None, num_sms: int | None = None) -> Gpu:
        """A GPU, perhaps of no kind in the file; `num_sms` where the device tells."""
        found = self.gpus.get(kind or self.default, self.gpus[self.default])
        return dataclasses.replace(found, kind=kind or self.default, num_sms=num_sms or found.num_sms)


@functools.cache
def packaged() -> Table:
    """The file in this package."""
    return parse(importlib.resources.files(__package__).joinpath(NAME).read_text(encoding="utf-8"), NAME)


def load(path: Path) -> Table:
    return parse(path.read_text(encoding="utf-8"), str(path))


def parse(text: str, name: str = NAME) -> Table:
    """A table from the text of a file.

    Raises:
      ValueError: something is wrong with it; the message says where and what.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}: not JSON: {error}") from error
    _check_keys(data, ("default", "gpus"), name)
    entries = data["gpus"]
    _check_object(entries, f"{name}: gpus")
    for kind, entry in entries.items():
        _check_entry(entry, f"{name}: gpus.{kind}")
    like = {kind: entry["like"] for kind, entry in entries.items() if "like" in entry}
    own = {kind: _rules_of(entry, f"{name}: gpus.{kind}") for kind, entry in entries.items() if kind not in like}
    for where, kind in [("default", data["default"]), *((f"gpus.{k}.like", v) for k, v in like.items())]:
        if not isinstance(kind, str) or kind not in own:
            raise ValueError(f"{name}: {where}: expected a GPU with rules, {' or '.join(own)}, got {kind!r}")
    gpus = {kind: Gpu(kind, entry["num_sms"], **own[like.get(kind, kind)]) for kind, entry in entries.items()}
    return Table(data["default"], gpus, like)


def text_of(table: Table) -> str:
    """A table as the text of a file, a rule to a line."""
    gpus = []
    for kind, gpu in table.gpus.items():
        lines = [f'"num_sms": {gpu.num_sms}']
        if kind in table.like:
            lines.append(f'"like": {json.dumps(table.like[kind])}')
        else:
            lines += [f'"{kernel}": [\n{_lines(getattr(gpu, kernel))}\n      ]' for kernel in TILES]
        gpus.append(f"    {json.dumps(kind)}: {{\n      " + ",\n      ".join(lines) + "\n    }")
    default = json.dumps(table.default)
    return f'{{\n  "default": {default},\n  "gpus": {{\n' + ",\n".join(gpus) + "\n  }\n}\n"


def _lines(rules: Iterable[Rule[Any]]) -> str:
    return ",\n".join(f"        {json.dumps(_as_json(rule))}" for rule in rules)


def _as_json(rule: Rule[Any]) -> dict[str, Any]:
    when = {name: bounds for name, bounds in dataclasses.asdict(rule.when).items() if bounds != (None, None)}
    return {"when": when, "use": dataclasses.asdict(rule.use)}


def _check_entry(entry: Any, where: str) -> None:
    _check_object(entry, where)
    _check_keys(entry, ("num_sms", "like") if "like" in entry else ("num_sms", *TILES), where)
    _integer(entry["num_sms"], f"{where}.num_sms", least=1)


def _rules_of(entry: Any, where: str) -> dict[str, Any]:
    return {kernel: _rules(tiles, entry[kernel], f"{where}.{kernel}") for kernel, tiles in TILES.items()}


def _rules(tiles: type, entries: Any, where: str) -> tuple[Rule[Any], ...]:
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{where}: expected a list of rules, got {entries!r}")
    rules = tuple(_rule(tiles, entry, f"{where}[{i}]") for i, entry in enumerate(entries))
    if rules[-1].when != ShapeClass():
        last, got = f"{where}[{len(rules) - 1}].when", entries[-1]["when"]
        raise ValueError(f"{last}: expected {{}}, since the last rule holds always, got {got}")
    return rules


def _rule(tiles: type, entry: Any, where: str) -> Rule[Any]:
    _check_keys(entry, ("when", "use"), where)
    _check_object(entry["when"], f"{where}.when")
    when = _made(ShapeClass, entry["when"], f"{where}.when")
    _check_keys(entry["use"], [field.name for field in dataclasses.fields(tiles)], f"{where}.use")
    use = _made(tiles, entry["use"], f"{where}.use")
    reason = use.refusal()
    if reason is not None:
        raise ValueError(f"{where}.use.{reason}")
    return Rule(when, use)


def _made(what: type, given: Mapping[str, Any], where: str) -> Any:
    """A dataclass whose attributes are integers, pairs of them and ranges."""
    readers: dict[Any, Callable[[Any, str], Any]] = {int: _integer, tuple[int, int]: _pair, Range: _range}
    types = get_type_hints(what)
    _check_known(given, types, where)
    return what(**{name: readers[types[name]](value, f"{where}.{name}") for name, value in given.items()})


def _integer(value: Any, where: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{where}: expected an integer of {least} or more, got {value!r}")
    return value


def _pair(value: Any, where: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{where}: expected a list of two integers, got {value!r}")
    return _integer(value[0], f"{where}[0]"), _integer(value[1], f"{where}[1]")


def _range(value: Any, where: str) -> Range:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{where}: expected [least, most], each an integer or null, got {value!r}")
    low, high = (None if x is None else _integer(x, f"{where}[{i}]") for i, x in enumerate(value))
    if low is not None and high is not None and low > high:
        raise ValueError(f"{where}: expected [least, most], got {value!r}")
    return low, high


def _check_object(value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, got {value!r}")


def _check_known(value: Any, names: Iterable[str], where: str) -> None:
    for name in value:
        if name not in names:
            raise ValueError(f"{where}.{name}: unknown key, expected one of {', '.join(names)}")


def _check_keys(value: Any, names: Iterable[str], where: str) -> None:
    """ValueError unless `value` is an object with exactly these keys."""
    _check_object(value, where)
    _check_known(value, names, where)
    for name in names:
        if name not in value:
            raise ValueError(f"{where}: expected the key {name}")
