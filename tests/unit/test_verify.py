"""`wmse verify`: groups that are cheap to check, exit codes, and the certificate that runs and evaluations attach."""

import json
import logging
from pathlib import Path

import pytest
import torch

from tests.planted_bugs import BUGS, ROOT, failed_checks
from trainer.cli import main
from trainer.run import certificate
from trainer.run.certificate import attach_certificate, find_certificate, identity, summary
from trainer.verify import optimizer, session
from trainer.verify.check import Measured, SkipCheck, relative_error, run_items
from trainer.verify.cli import GROUPS, _groups

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep certificates in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("WMSE_COMMIT", "0123456789ab")
    return tmp_path / "cache" / "wmse" / "certificates"


# --- checks ---


def test_a_check_passes_up_to_its_bound_and_names_what_ended_it() -> None:
    def skip() -> Measured:
        raise SkipCheck("no GPU")

    def crash() -> Measured:
        raise ValueError("two lines\nof text")

    items = [
        ("at the bound", lambda: Measured(0.5, 0.5)),
        ("above", lambda: Measured(0.6, 0.5)),
        ("not a number", lambda: Measured(float("nan"), 0.5)),
        ("skips", skip),
        ("crashes", crash),
    ]
    checks = run_items("group", items)
    assert [check.result for check in checks] == ["passed", "failed", "failed", "skipped", "failed"]
    assert [check.reason for check in checks[3:]] == ["no GPU", "ValueError: two lines"]
    assert json.loads(json.dumps([check.plain() for check in checks]))[2]["error"] == "nan"


def test_errors_are_relative_to_the_largest_value_and_shapes_must_fit() -> None:
    assert relative_error(torch.tensor([4.0, 1.0]), torch.tensor([4.0, 2.0])) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="expected"):
        relative_error(torch.zeros(2), torch.zeros(2, 1))


def test_every_group_has_checks() -> None:
    assert tuple(_groups()) == GROUPS
    assert all(alone or together for alone, together in _groups().values())


# --- the command ---


def test_a_cheap_group_passes_and_the_certificate_lists_it(
    tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "certificate.json"
    assert main(["verify", "--only", "optimizer", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(out.read_text())
    count = len(found["checks"])
    assert lines[-1] == f"{count} of {count} checks passed, 0 skipped"
    assert count > 15
    assert (found["passed"], found["failed"], found["skipped"]) == (count, 0, 0)
    assert {check["group"] for check in found["checks"]} == {"optimizer"}
    assert all(check["error"] <= check["bound"] for check in found["checks"])
    assert {"date", "commit", "code", "device", "versions", "precision", "ranks"} <= found.keys()
    assert {"python", "torch", "torchvision", "timm"} <= found["versions"].keys()
    # Other checks may fail, so this one does not count for runs.
    assert not own_cache.exists()


def test_a_failed_check_makes_the_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(optimizer, "_rules", lambda: Measured(1.0, 0.5))
    assert main(["verify", "--only", "optimizer"]) == 1
    output = capsys.readouterr().out
    assert "failed   optimizer  rules that scale the learning rate: error 1.0e+00, bound 5.0e-01" in output
    assert "no certificate is written" in output


def test_an_unknown_group_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--only", "losses"]) == 2
    assert "no group 'losses': choose from loss, ranks" in capsys.readouterr().err


def test_ranks_that_end_without_results_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks = session.LocalRanks(["losses"], tmp_path).finish()
    assert [(check.group, check.result) for check in checks] == [("losses", "failed")]
    assert "the ranks ended with the exit codes [2, 2]: error: there is no group 'losses'" in checks[0].reason


@pytest.mark.slow
def test_all_checks_pass_and_leave_nothing_but_the_certificate(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert main(["verify"]) == 0
    (path,) = own_cache.iterdir()
    assert find_certificate(CPU if not torch.cuda.is_available() else torch.device("cuda", 0)) == path
    assert {check["group"] for check in json.loads(path.read_text())["checks"]} == set(GROUPS)
    # DALI removes its own files when the process ends.
    assert list(temporary.glob("wmse_verify_*")) == []


# --- planted bugs ---


def test_every_planted_bug_still_has_its_place() -> None:
    """tests/planted_bugs.py takes minutes, so here only the texts are looked up that it replaces."""
    lost = [name for name, bug in BUGS.items() if (ROOT / bug.file).read_text().count(bug.before) != 1]
    assert lost == []
    assert {bug.group for bug in BUGS.values()} == set(GROUPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whiten both views jointly", "gather without gradient"])
def test_a_planted_bug_is_found(name: str) -> None:
    assert {check["group"] for check in failed_checks(BUGS[name], [BUGS[name].group])} == {BUGS[name].group}


# --- the certificate of a run ---


def write(of: dict, **changes: object) -> Path:
    """Write a certificate for an identity, and return its path."""
    content = {**of, "date": "2026-01-01T00:00:00+0000", "passed": 3, "failed": 1, "skipped": 2, **changes}
    path = certificate.certificate_path(of)
    certificate.write_certificate(content, path)
    return path


def test_a_current_certificate_is_attached(tmp_path: Path) -> None:
    path = write(identity(CPU))
    attach_certificate(tmp_path, CPU)
    assert (tmp_path / "certificate.json").read_text() == path.read_text()
    found = summary(find_certificate(CPU))
    assert found is not None
    assert (found["passed"], found["failed"], found["skipped"]) == (3, 1, 2)
    assert len(found["sha256"]) == 64


@pytest.mark.slow
def test_training_evaluation_and_report_show_the_certificate(
    tiny_set: Path, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(identity(CPU))
    run_dir = tmp_path / "run"
    words = ["--config", str(tiny_config), "--data.root", str(tiny_set), "--run_dir", str(run_dir), "--max_steps", "1"]
    assert main(["pretrain", *words]) == 0
    assert (run_dir / "certificate.json").read_text() == path.read_text()
    assert main(["knn", "--run_dir", str(run_dir)]) == 0
    assert json.loads(capsys.readouterr().out)["knn"]["certificate"] == summary(path)
    assert main(["report", str(run_dir), "--no_images"]) == 0
    page = (run_dir / "report.html").read_text()
    assert "3 checks passed, 1 failed, 2 skipped, on 2026-01-01" in page
    # Without a certificate there is neither a value nor a row.
    path.unlink()
    (run_dir / "certificate.json").unlink()
    assert main(["knn", "--run_dir", str(run_dir)]) == 0
    capsys.readouterr()
    assert json.loads((run_dir / "eval" / "knn_1.json").read_text())["certificate"] is None
    assert main(["report", str(run_dir), "--no_images"]) == 0
    assert "no certificate" not in (run_dir / "report.html").read_text()


@pytest.mark.parametrize("changed", ["commit", "code", "device", "versions"])
def test_a_certificate_of_something_else_is_not_attached(
    changed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The certificate of an earlier start is removed, because the run continues with another program."""
    write({**identity(CPU), changed: "other"})
    (tmp_path / "certificate.json").write_text("{}")
    with caplog.at_level(logging.INFO):
        attach_certificate(tmp_path, CPU)
    assert not (tmp_path / "certificate.json").exists()
    assert f"not attached, because it is of other {changed}; run `wmse verify` again" in caplog.text


def test_without_a_certificate_nothing_is_read_or_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(certificate, "identity")
    with caplog.at_level(logging.INFO):
        attach_certificate(tmp_path, CPU)
    assert caplog.text == ""
    assert summary(None) is None


def test_a_damaged_certificate_gives_no_summary(own_cache: Path) -> None:
    path = write(identity(CPU))
    path.write_text("{")
    assert summary(path) is None


def test_a_change_of_the_code_changes_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("kernels", "trainer"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    monkeypatch.setattr(certificate.trainer, "__file__", str(tmp_path / "trainer" / "__init__.py"))
    before = certificate._code_digest()
    (tmp_path / "kernels" / "__init__.py").write_text("1")
    assert certificate._code_digest() != before


@pytest.mark.parametrize("content", [b"\xff\xfe damaged", b"[" * 100_000, b"null"])
def test_a_damaged_certificate_costs_only_the_certificate(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = tmp_path / "kept.json"
    damaged.write_bytes(content)
    monkeypatch.setattr(certificate, "find_certificate", lambda _: damaged)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    certificate.attach_certificate(run_dir, torch.device("cpu"))
    assert not (run_dir / certificate.NAME).exists()
