"""Imports between packages go one way, and light commands load no heavy packages."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def loaded_by(module: str) -> set[str]:
    """Return the modules of this project that importing `module` loads in a new process."""
    ours = "[m for m in sys.modules if m.partition('.')[0] in ('trainer', 'kernels')]"
    program = f"import {module}, os, sys; print(*{ours}, flush=True); os._exit(0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def written_imports(file: Path) -> set[str]:
    """Return every module that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide from a text search"
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.slow
def test_evaluation_needs_neither_loop_nor_step_nor_loss():
    loaded = loaded_by("trainer.evaluate.run")
    assert "trainer.models.networks" in loaded
    assert not {m for m in loaded if m.startswith(("trainer.loop", "trainer.step", "trainer.losses", "kernels"))}
    for file in (ROOT / "trainer" / "evaluate").glob("*.py"):
        assert not written_imports(file) & {"trainer.loop", "trainer.step", "trainer.losses"}, file


@pytest.mark.slow
def test_kernels_import_nothing_of_the_trainer():
    for file in (ROOT / "kernels").rglob("*.py"):
        assert not [name for name in written_imports(file) if name.partition(".")[0] == "trainer"], file
    assert not [m for m in loaded_by("kernels.whitening") if m.partition(".")[0] == "trainer"]


@pytest.mark.slow
def test_benchmarks_of_the_loss_need_only_torch_and_rich():
    loaded = loaded_by("trainer.bench.loss, trainer.bench.whitening")
    assert "trainer.bench.shapes" in loaded
    assert not loaded & {"trainer.setup", "trainer.models.networks", "trainer.data.loader", "trainer.config.loading"}


WITHOUT_EXTRAS = """
import importlib, sys
import timm  # before the packages below are refused, because timm may import some of them

REFUSED = ("nvidia.dali", "jsonargparse", "yaml", "rich", "tensorboard", "submitit")
for name in [name for name in sys.modules if name.partition(".")[0] in REFUSED]:
    del sys.modules[name]


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in REFUSED:
            raise ModuleNotFoundError(f"{name} is not needed for this")


sys.meta_path.insert(0, Refuse())
for name in ("check_kernels", "time_whitening", "check_step"):
    importlib.import_module(f"tests.gpu.{name}")
import trainer.bench.compute, trainer.setup, trainer.step
import torch
from tests.gpu.check_step import TINY, Variant, build_step, draw_pixels

cpu = torch.device("cpu")
step = build_step(TINY, Variant("fp32"), cpu)
result = step(draw_pixels(0, TINY.views.size, cpu), 0, 0.1)
print(int(result.skipped), result.loss.item() > 0)
"""


@pytest.mark.slow
def test_a_step_needs_only_torch_and_timm():
    """A machine with a GPU may lack DALI and the packages of the command line."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["0", "True"], done.stderr[-2000:]


def test_only_the_command_line_imports_the_commands():
    commands = {
        "trainer.loop",
        "trainer.tools.preview",
        "trainer.evaluate.run",
        "trainer.evaluate.follow",
        "trainer.cluster.launch",
        "trainer.cluster.status",
        "trainer.cluster.stop",
        "trainer.bench.checkpoint",
        "trainer.bench.end2end",
        "trainer.bench.all",
        "trainer.bench.loss",
    }
    allowed = {"cli.py", "__main__.py", "task.py"}  # SLURM starts task.py
    for file in (ROOT / "trainer").rglob("*.py"):
        if file.name not in allowed:
            assert not written_imports(file) & {*commands, "trainer.cli"}, file


@pytest.mark.parametrize("module", ["trainer.cli", "trainer.export.cli"])
def test_the_command_line_starts_without_torch_or_dali(module: str):
    program = f"import {module}, sys; print({{'torch', 'nvidia.dali'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"


def test_runs_are_launched_and_stopped_without_loading_torch():
    assert "trainer.tools.run_plan" in loaded_by("trainer.cluster.launch, trainer.cluster.stop")
    program = (
        "import trainer.cluster.launch, trainer.cluster.stop, sys; print({'torch', 'nvidia.dali'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"


def test_pyproject_lists_every_package_the_recipes_and_the_demo() -> None:
    """A folder that pyproject.toml does not list works in a checkout, but is missing after an installation."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = set(
        re.findall(r'"([\w.]+)"', text[text.index("packages = [") : text.index("[tool.setuptools.package-dir]")])
    )
    found = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for package in ("trainer", "kernels")
        for file in (ROOT / package).rglob("__init__.py")
    }
    moved = dict(re.findall(r'^"(trainer\.\w+)" = "(\w+)"$', text, re.MULTILINE))
    assert listed == found | set(moved)
    assert {ROOT / folder for folder in moved.values()} == {ROOT / "configs", ROOT / "demo_data"}


@pytest.mark.parametrize("recipe", ["Dockerfile", "apptainer.def"])
def test_an_image_holds_every_folder_of_the_package(recipe: str) -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    moved = setuptools["package-dir"]
    folders = {moved.get(package, package).partition(".")[0] for package in setuptools["packages"]}
    copied = re.findall(r"^(?:COPY| +)\s*(\w+) \S+$", (ROOT / "slurm" / recipe).read_text(), re.MULTILINE)
    assert folders == {"trainer", "kernels", "configs", "demo_data"}
    assert folders <= set(copied)
