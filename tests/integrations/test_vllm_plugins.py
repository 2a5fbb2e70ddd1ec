"""How vLLM finds the backend: the entry points, and what they leave alone, with stand-ins for vLLM's modules."""

import importlib
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from jaxpaged_vllm import plugins

ROOT = Path(__file__).parents[2]
OTHERS = "another.package.Backend"


class Custom:
    """A member of vLLM's enum of backends, and where its classes are registered."""

    def __init__(self, path=None, name="CUSTOM"):
        self.path, self.name = path, name

    def is_overridden(self):
        return self.path is not None

    def get_path(self):
        return self.path


def install(monkeypatch, **modules):
    """Modules of vLLM's, by the end of their name; all others are missing."""
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_NoVllm(), *sys.meta_path])
    for name, contents in {"vllm": {}, **modules}.items():
        path = name.replace("__", ".")
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            module = ".".join(parts[:i])
            if module not in sys.modules:
                monkeypatch.setitem(sys.modules, module, ModuleType(module))
                if i > 1:
                    setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], sys.modules[module])
        vars(sys.modules[path]).update(contents)


class _NoVllm:
    """A finder that finds none of vLLM's modules, be it installed or not."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vllm":
            raise ModuleNotFoundError(f"No module named {name!r}")


def registry(monkeypatch, custom):
    def register_backend(member, path):
        member.path = path

    enum = SimpleNamespace(CUSTOM=custom)
    contents = {"AttentionBackendEnum": enum, "register_backend": register_backend}
    install(monkeypatch, vllm__v1__attention__backends__registry=contents)


def platforms(monkeypatch, *, allowed=None, others=(), **detected):
    """vLLM with platforms that were found or not, and other packages' plugins."""
    builtin = {name: lambda path=path: path for name, path in {"cuda": None, "cpu": None, **detected}.items()}
    install(
        monkeypatch, vllm__platforms={"builtin_platform_plugins": builtin}, vllm__envs={"VLLM_PLUGINS": allowed}
    )  # fmt: skip
    own = EntryPoint("jaxpaged", "jaxpaged_vllm.plugins:platform", plugins.PLATFORM_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [own, *others])


def test_the_entry_points_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    points = project["project"]["entry-points"]
    found = {group: EntryPoint("jaxpaged", points[group]["jaxpaged"], group).load() for group in points}
    assert found == {"vllm.general_plugins": plugins.register, "vllm.platform_plugins": plugins.platform}
    assert EntryPoint("", points[plugins.PLATFORM_GROUP]["jaxpaged"], "").value == plugins._THIS
    assert "jaxpaged_vllm" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def test_the_paths_are_those_of_the_classes():
    for path, ends in ((plugins.BACKEND, "class JaxpagedBackend("), (plugins.PLATFORM, "class JaxpagedCpuPlatform(")):
        module, _ = path.rsplit(".", 1)
        assert ends in (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


def test_who_does_not_ask_for_the_backend_loads_none_of_it():
    code = "import sys, jaxpaged_vllm.plugins; print([m for m in ('jax', 'jaxpaged', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_custom_is_registered_where_it_is_free(monkeypatch, caplog):
    registry(monkeypatch, custom := Custom())
    plugins.register()
    assert custom.path == plugins.BACKEND
    plugins.register()  # vLLM may load plugins more than once
    assert not caplog.records


def test_custom_of_somebody_else_is_left_alone(monkeypatch, caplog):
    registry(monkeypatch, custom := Custom(OTHERS))
    plugins.register()
    assert custom.path == OTHERS
    assert f"{OTHERS} is registered as that" in caplog.text


def test_a_vllm_of_another_kind_is_left_alone(monkeypatch):
    install(monkeypatch)
    plugins.register()
    assert plugins.platform() is None
    registry(monkeypatch, SimpleNamespace(name="CUSTOM"))
    plugins.register()  # without `is_overridden`


def test_the_platform_is_ours_where_vllm_would_choose_the_cpu_alone(monkeypatch):
    platforms(monkeypatch, cpu="vllm.platforms.cpu.CpuPlatform")
    assert plugins.platform() == plugins.PLATFORM
    platforms(monkeypatch)
    assert plugins.platform() is None
    platforms(monkeypatch, cuda="vllm.platforms.cuda.CudaPlatform")
    assert plugins.platform() is None
    platforms(monkeypatch, cpu="vllm.platforms.cpu.CpuPlatform", xpu="vllm.platforms.xpu.XPUPlatform")
    assert plugins.platform() is None


@pytest.mark.parametrize(
    ("detects", "allowed", "ours"),
    [
        (lambda: "another.Platform", None, False),
        (lambda: "another.Platform", ["other", "jaxpaged"], False),
        (lambda: "another.Platform", ["jaxpaged"], True),
        (lambda: None, None, True),
        (lambda: 1 / 0, None, True),
    ],
)
def test_another_packages_platform_comes_first(monkeypatch, detects, allowed, ours):
    other = SimpleNamespace(name="other", value="another:platform", load=lambda: detects)
    platforms(monkeypatch, cpu="vllm.platforms.cpu.CpuPlatform", others=[other], allowed=allowed)
    assert plugins.platform() == (plugins.PLATFORM if ours else None)


def test_another_version_is_told_apart_before_anything_of_it_is_used(monkeypatch):
    install(monkeypatch, vllm={"__version__": "0.33.1"})
    monkeypatch.delitem(sys.modules, "jaxpaged.integrations.vllm.backend", raising=False)
    with pytest.raises(ImportError, match=r"written for vLLM 0.32, got vLLM 0.33.1"):
        importlib.import_module("jaxpaged.integrations.vllm.backend")


class CpuPlatform:
    """vLLM's."""

    device_name = "cpu"

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        return "vllm.CPU_ATTN", selected_backend, num_heads


@pytest.fixture
def platform_class(monkeypatch):
    """The platform's class on top of a stand-in of vLLM's; `reasons` is what the backend can't do."""
    reasons = []
    backend = SimpleNamespace(validate_configuration=lambda device_capability, **config: list(reasons))
    paths = {"vllm.platforms.cpu.CpuPlatform": CpuPlatform, plugins.BACKEND: backend}
    install(
        monkeypatch,
        vllm__logger={"init_logger": lambda name: SimpleNamespace(info_once=lambda text: None)},
        vllm__platforms={"builtin_platform_plugins": {"cpu": lambda: "vllm.platforms.cpu.CpuPlatform"}},
        vllm__utils__import_utils={"resolve_obj_by_qualname": paths.__getitem__},
    )
    monkeypatch.delitem(sys.modules, "jaxpaged_vllm.platform", raising=False)
    found = importlib.import_module("jaxpaged_vllm.platform").JaxpagedCpuPlatform
    yield found, reasons
    del sys.modules["jaxpaged_vllm.platform"]


CONFIG = SimpleNamespace(_asdict=lambda: {"head_size": 64})


@pytest.mark.parametrize("selected", [None, Custom("vllm.CPU_ATTN", "CPU_ATTN"), Custom(), Custom(OTHERS)])
def test_who_asks_for_something_else_gets_vllms_answer(platform_class, selected):
    ours, reasons = platform_class
    reasons.append("never looked at")
    assert ours.get_attn_backend_cls(selected, CONFIG, num_heads=3) == ("vllm.CPU_ATTN", selected, 3)
    assert issubclass(ours, CpuPlatform)
    assert {name for name in vars(ours) if not name.startswith("__")} == {"get_attn_backend_cls"}


def test_who_asks_for_ours_gets_it_or_the_reasons_why_not(platform_class):
    ours, reasons = platform_class
    assert ours.get_attn_backend_cls(Custom(plugins.BACKEND), CONFIG) == plugins.BACKEND
    reasons += ["MLA not supported", "sparse not supported"]
    with pytest.raises(ValueError, match="jaxpaged can't run a layer of this model: MLA not supported, sparse not"):
        ours.get_attn_backend_cls(Custom(plugins.BACKEND), CONFIG)
