"""Use of the measured table by backend "auto", and the tables in the repository."""

import json

import pytest

from kernels import backends
from kernels.backends import BACKENDS, fastest_backend
from tests.conftest import ROOT


def cell(slices: int, rows: int, size: int, **microseconds: float) -> dict[str, object]:
    return {"slices": slices, "rows": rows, "size": size, "microseconds": microseconds}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a table of three measured sizes for CUDA."""
    cells = [
        cell(4, 128, 64, reference=1, torch=20, triton=30),
        cell(64, 128, 64, reference=900, torch=200, triton=100),
        cell(4, 512, 256, reference=9, torch=50, triton=40),
    ]
    monkeypatch.setattr(backends, "_measured", lambda device_type: cells if device_type == "cuda" else [])
    monkeypatch.setattr(backends, "_has_triton", lambda: True)


@pytest.mark.parametrize(
    ("batch", "num_rows", "size", "expected"),
    [
        (4, 128, 64, "torch"),
        (15, 128, 64, "torch"),
        (17, 128, 64, "triton"),
        (4, 300, 200, "triton"),
        (1, 9, 4, "torch"),
    ],
)
def test_the_nearest_measured_size_decides_and_the_reference_is_never_chosen(table, batch, num_rows, size, expected):
    assert fastest_backend("cuda", batch, num_rows, size, in_float64=False) == expected


def test_a_backend_that_cannot_run_is_not_chosen(table, monkeypatch):
    assert fastest_backend("cuda", 64, 128, 64, in_float64=True) == "torch"
    assert fastest_backend("cuda", 4, 1026, 513, in_float64=False) == "torch"
    monkeypatch.setattr(backends, "_has_triton", lambda: False)
    assert fastest_backend("cuda", 64, 128, 64, in_float64=False) == "torch"


def test_a_device_without_a_table_uses_torch(table):
    assert fastest_backend("xpu", 64, 128, 64, in_float64=False) == "torch"


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").glob("backends_*.json")), ids=lambda path: path.name)
def test_the_tables_in_the_repository_are_complete(path):
    table = json.loads(path.read_text())
    assert path.name == f"backends_{table['device_type']}.json"
    assert table["versions"]["torch"]
    assert len(table["cells"]) >= 20
    for entry in table["cells"]:
        assert {"reference", "torch"} <= set(entry["microseconds"]) <= set(BACKENDS)
        assert entry["rows"] > entry["size"]
