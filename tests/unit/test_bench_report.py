"""Tables of results, on the terminal and in documents."""

import json
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from trainer.bench.report import RESULTS, markdown, print_report, write_tables

FIGURE = {"median": 2.0, "quartile_1": 1.0, "quartile_3": 3.0}
HEAD = {"device": "a machine", "cores": 2, "torch_threads": 1, "versions": {"torch": "2"}, "commit": "abc"}
LOADER = {"bench": "loader", "figures": {"cold": FIGURE}, "config": "c.yaml", "overrides": ["--seed", "1"], **HEAD}
PEERS = {"bench": "peers", "loss": {"unit": "us", "figures": {"loop": FIGURE}, "times": {"loop": 3.0}}, **HEAD}


def test_a_document_gets_the_tables_of_the_results_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "loader.json").write_text(json.dumps(LOADER))
    (tmp_path / "peers.json").write_text(json.dumps(PEERS))
    document = tmp_path / "document.md"
    document.write_text(
        "before\n<!-- table loader.json -->\nold\n<!-- /table -->\n<!-- table peers.json loss -->\n<!-- /table -->\nafter\n"
    )
    write_tables(document, tmp_path)
    lines = document.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "old" not in lines
    assert "| cold | 2 (1 to 3) |" in lines
    assert "| loop | 2 (1 to 3) | 3.00 |" in lines
    assert "`c.yaml --seed 1`; a machine, 2 cores, 1 threads, torch 2, commit abc" in lines
    (tmp_path / "loader.json").unlink()
    with pytest.raises(OSError, match="loader"):
        write_tables(document, tmp_path)
    assert document.read_text().splitlines() == lines


def test_the_terminal_shows_the_figures_and_the_parts_that_were_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    print_report({**LOADER, "not_run": {"triton": "no GPU"}})
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "2 (1 to 3)" in printed.err
    assert "not run: triton: no GPU" in printed.err


def test_the_tables_in_the_docs_are_current() -> None:
    text = (ROOT / "benchmarks" / "results" / "README.md").read_text()
    places = re.findall(r"<!-- table (\S+)(?: (\S+))? -->\n(.*?)<!-- /table -->", text, re.DOTALL)
    assert len(places) > 8
    for file, part, table in places:
        assert table == "\n".join(markdown(json.loads((RESULTS / file).read_text()), part or None)) + "\n", file
