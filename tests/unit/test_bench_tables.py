# ruff: noqa: E402 (the scripts import each other by their folder, which must be known first)
"""Tables of the documents, and the scaling model against values by hand."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as for a script there

import performance_table
import scaling_model
from scaling_model import Inputs, predict
from tables import write_tables

FIGURE = {"median": 2.0, "quartile_1": 1.0, "quartile_3": 3.0}


def test_a_table_goes_to_its_place_and_nowhere_else(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text(
        "before\n<!-- table one -->\nold\n<!-- /table -->\nbetween\n<!-- table two -->\n<!-- /table -->\nafter\n"
    )
    write_tables(document, {"one": ["| a\\1 |"], "two": ["| b |"]})
    assert document.read_text() == (
        "before\n<!-- table one -->\n| a\\1 |\n<!-- /table -->\nbetween\n<!-- table two -->\n| b |\n<!-- /table -->\nafter\n"
    )
    text = document.read_text()
    with pytest.raises(SystemExit, match="needs one <!-- table three -->"):
        write_tables(document, {"one": ["new"], "three": ["new"]})
    assert document.read_text() == text


def test_tables_of_results(tmp_path: Path) -> None:
    head = {"device": "a machine", "cores": 2, "torch_threads": 1, "versions": {"torch": "2"}, "commit": "abc",
            "config": "c.yaml", "overrides": ["--seed", "1"]}  # fmt: skip
    host = {"data_wait": 5.0, "forward": 4.5, "rest": 0.5}
    percent = {"data_wait": 50.0, "forward": 45.0, "rest": 5.0}
    end2end = {"views_per_s_spread": FIGURE, "compute": {"views_per_s_spread": FIGURE}, "share_of_compute": 0.5,
               "step": {"host_ms": host, "percent": percent, "loop_overhead_percent": 5.0}, **head}  # fmt: skip
    points = [{"ranks": 1, "figure": FIGURE}, {"ranks": 2, "not_run": "one GPU"}]
    growth = {"lines": [{"line": "ranks", "title": "ranks", "unit": "ms", "points": points}], **head}
    (tmp_path / "end2end_cpu_2cores.json").write_text(json.dumps(end2end))
    (tmp_path / "growth_cpu_2cores.json").write_text(json.dumps(growth))
    tables = performance_table.make_tables(tmp_path)
    assert list(tables) == ["end2end", "growth"]
    assert "| forward | 4.5 ms, 45.00 % |" in tables["end2end"]
    assert "| views/s | 2.00 (1.00 to 3.00) |" in tables["end2end"]
    assert tables["end2end"][-1].startswith("`c.yaml --seed 1`; a machine, 2 cores")
    assert tables["growth"][2:4] == ["| ranks | 1 | 2 (1 to 3) ms |", "| ranks | 2 | not run: one GPU |"]


def test_the_results_in_the_project_have_tables() -> None:
    for name, lines in performance_table.make_tables(BENCHMARKS / "results").items():
        assert len(lines) > 3, name


def inputs(**changed: float) -> Inputs:
    """Round numbers: 1 view a ms, no fixed cost, 100 MB of gradients in one bucket of 10 MB and the rest; 100 GB/s."""
    values: dict[str, Any] = {
        "views_per_s": 1000.0, "fixed_ms": 0.0, "backward_share": 0.5, "parameters": 25e6, "last_bucket_mb": 10.0,
        "node_gb_per_s": 100.0, "network_gb_per_s": 10.0, "node_latency_us": 10.0, "network_latency_us": 5.0,
        "batch_norm_layers": 50.0, "batch_norm_channels": 12_500.0, "operators": 0.0, "overhead_percent": 0.0,
        "spread_percent": 0.0, "activation_gb": 50.0, "view_mb": 40.0, "view_mb_with_budget": 20.0, "budget_percent": 0.0,
    }  # fmt: skip
    return Inputs(**values | changed)


def test_one_gpu_only_computes() -> None:
    p = predict(inputs(), 1)
    assert (p.step, p.views_per_s) == (pytest.approx(16384), pytest.approx(1000))
    assert scaling_model.efficiency(inputs(), p) == pytest.approx(1)
    assert p.hours == pytest.approx(100 * 312 * 16.384 / 3600)


def test_eight_gpus_of_one_node() -> None:
    """2,048 views a GPU; all but the last bucket hides under backward."""
    p = predict(inputs(), 8)
    assert p.compute == pytest.approx(2048)
    assert p.all_reduce == pytest.approx(2 * 7 / 8 * 10e6 / 100e9 * 1e3 + 0.010)
    numbers = 2 * 250
    layer = 2 * 7 / 8 * (8 + 4) * numbers / 100e9 * 1e3 + 2 * 0.01
    assert p.batch_norm == pytest.approx(50 * layer)
    assert p.gather == 0
    assert p.step == pytest.approx(p.compute + p.all_reduce + p.batch_norm)


def test_what_does_not_fit_takes_the_budget_then_parts() -> None:
    """2,048 views of 40 MB are 82 GB, of 20 MB 41. Parts are equal, so 16,384 views, 655 GB, take 16 and not 14."""
    base = inputs(budget_percent=10.0)
    assert [predict(base, ranks).compute for ranks in (1, 8, 16)] == pytest.approx([16384, 2048 * 1.1, 1024])
    assert [scaling_model.parts(base, ranks) for ranks in (1, 8, 16)] == [16, 1, 1]
    small = inputs(activation_gb=40.0)
    assert [scaling_model.parts(small, ranks) for ranks in (8, 16)] == [4, 1]
    assert predict(small, 8).batch_norm == pytest.approx(4 * predict(base, 8).batch_norm)


def test_a_shared_communicator_hides_nothing() -> None:
    ring = 2 * 15 / 16 / 10e9 * 1e3
    own, shared = (predict(inputs(shared_communicator=s), 16) for s in (0.0, 1.0))
    assert own.all_reduce == pytest.approx(ring * 10e6 + 0.015)
    assert shared.all_reduce == pytest.approx(ring * 100e6 + 2 * 0.015)
    assert shared.step - own.step == pytest.approx(ring * 90e6 + 0.015)


def test_sixty_four_gpus_of_eight_nodes() -> None:
    """256 views a GPU; groups of four whiten together, inside a node; a collective takes 10 us and 3 doublings of 5."""
    p = predict(inputs(), 64)
    assert p.compute == pytest.approx(256)
    assert p.all_reduce == pytest.approx(2 * 63 / 64 * 10e6 / 10e9 * 1e3 + 0.025)
    assert p.gather == pytest.approx(3 * 64 * 4 * 128 * 4 / 100e9 * 1e3 + 0.010)
    slow = predict(inputs(network_gb_per_s=1.0), 64)
    whole = 2 * 63 / 64 / 1e9 * 1e3
    assert slow.all_reduce == pytest.approx(whole * 90e6 + 0.025 - 128 + whole * 10e6 + 0.025)


def test_the_host_and_the_slowest_rank() -> None:
    busy = predict(inputs(operators=600, launch_us=1000.0), 256)
    assert busy.compute == pytest.approx(600)  # launching takes longer than 64 views do
    late = predict(inputs(overhead_percent=2.0, spread_percent=1.0), 64)
    expected = (2 + math.sqrt(2 * math.log(64))) / 100 * (late.compute + late.batch_norm)
    assert late.slowest == pytest.approx(expected)


def test_measured_inputs_replace_published_ones() -> None:
    compute = {"device": "GPU X", "commit": "abc", "views_per_s_a_rank": 5000.0, "parameters": 7,
               "step_ms": {"median": 100.0, "quartile_1": 99.0, "quartile_3": 101.7}}  # fmt: skip
    end2end = {"device": "GPU X", "commit": "abc", "step": {"loop_overhead_percent": 1.5}}
    found, sources = scaling_model.read_inputs(compute, end2end, {"node_gb_per_s": 350.0})
    assert (found.views_per_s, found.parameters, found.overhead_percent, found.node_gb_per_s) == (5000, 7, 1.5, 350)
    assert found.spread_percent == pytest.approx(2.0)
    assert sources["views_per_s"] == "measured: GPU X, commit abc"
    assert sources["node_gb_per_s"] == "given on the command line"
    assert set(sources) == set(vars(Inputs()))
