"""The checks for a GPU machine: a quick part runs on a CPU, and wrong results are detected.

`python -m tests.gpu OUT --tiny` runs all parts on a CPU.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.whitening import whiten
from tests.conftest import ROOT
from tests.gpu import __main__ as program
from tests.gpu import check_kernels, check_step, check_views, part
from tests.gpu.part import Line, Task

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def run_program(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_a_quick_part_runs_and_writes_its_results(tmp_path: Path) -> None:
    done = run_program(str(tmp_path), "--tiny", "--only", "environment")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "table.txt").read_text() == done.stdout
    (found,) = json.loads((tmp_path / "results.json").read_text()).values()
    assert found["state"] == "ok"
    assert found["lines"][0]["packages"]["torch"]


def test_a_part_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = run_program(str(tmp_path), "--tiny", "--only", "goood")
    assert done.returncode == 2
    assert "no part goood" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("check", [check_kernels.check_kernels, check_step.check_all, check_views.check_views])
def test_the_checks_pass_on_a_gpu(check: Callable[[Task], Iterator[Line]]) -> None:
    assert not [line for line in check(Task([], torch.device("cuda"), tiny=False)) if line.get("problem")]


def python(name: str, code: str, seconds: int = 9, needs: str = "json") -> program.Part:
    """Return a part that runs Python code. needs: packages that it imports."""
    return program.Part(name, seconds, needs, ["-c", code])


def test_a_part_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    chosen = [
        python("bad", "print('why'); raise SystemExit(3)"),
        python("slow", "print('so far', flush=True); import time; time.sleep(60)", 5),
        python("absent", "", needs="torch,no_such_module,no.such.part"),
        python("elsewhere", "print('needs a GPU'); raise SystemExit(77)"),
        python("good", f"import json; print(*json.load(open({str(tmp_path / 'results.json')!r})))"),
    ]
    assert program.run_all(chosen, tmp_path, 99) == 1
    results = json.loads((tmp_path / "results.json").read_text())
    assert {name: (result["state"], result["said"]) for name, result in results.items()} == {
        "bad": ("FAILED (3)", "why"),
        "slow": ("OVER TIME", "stopped after 5 s; so far"),
        "absent": ("skipped", "missing: no_such_module, no.such.part"),
        "elsewhere": ("skipped", "needs a GPU"),
        "good": ("ok", "bad slow absent elsewhere"),  # the parts in results.json when this part started
    }
    assert program.run_all(chosen[3:], tmp_path, 99) == 0
    assert program.run_all(chosen[4:], tmp_path, 4) == 1, "no time is left"


def test_each_line_is_written_before_the_next_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"

    def lines() -> Iterator[Line]:
        yield {"name": "one", "said": "1 ms", "ms": 1}
        assert json.loads(out.read_text())["lines"] == [{"name": "one", "said": "1 ms", "ms": 1}]
        raise RuntimeError("a broken GPU\nand more")

    assert part.record(lines(), out, CPU) == 1
    assert json.loads(out.read_text())["lines"][-1] == {"name": "what follows", "problem": "RuntimeError: a broken GPU"}
    assert part.record(iter([{"name": "one"}]), out, CPU) == 0


def slightly_wrong(x: Tensor, **keywords: Any) -> Tensor:
    return whiten(x, **keywords) * (1 + 1e-5)


def refuses(x: Tensor, **keywords: Any) -> Tensor:
    raise RuntimeError("cannot\nat all")


@pytest.mark.parametrize(("function", "problem"), [(whiten, ""), (slightly_wrong, "above"), (refuses, "cannot")])
def test_a_wrong_result_of_a_backend_is_detected(
    function: Callable[..., Tensor], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_kernels, "VARIANTS", {"torch": {"backend": "torch"}})
    monkeypatch.setattr(check_kernels, "whiten", function)
    (line,) = check_kernels.accuracy(CPU, ((2, 33, 16), 1e2, 0.05))
    assert ("problem" in line) == bool(problem)
    assert problem in line.get("problem", "")


def test_a_step_with_another_loss_is_detected() -> None:
    variant = check_step.Variant("fp32", micro_batches=2)
    expected = check_step.float32_loss(check_step.TINY, 2, "wmse", CPU)
    assert "problem" not in check_step.check(check_step.TINY, variant, CPU, expected)
    wrong = check_step.check(check_step.TINY, variant, CPU, expected + 0.2)
    assert wrong["problem"] == "the loss differs too much from that in float32"
