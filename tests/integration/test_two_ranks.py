"""Two ranks over gloo equal one process on the joined batch: gradients, statistics, images and losses."""

import json
from pathlib import Path

import pytest
import torch

from tests.faults import start
from tests.integration import two_ranks_worker
from tests.integration.two_ranks_worker import CASES
from tests.processes import start_ranks
from trainer.cli import main
from trainer.run.faults import describe_fault

WMSE_CHECKS = [f"a slice of view {view} cannot be whitened" for view in range(2)]
Results = dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Results]:
    """Return the results of one process and of two ranks."""
    folder = tmp_path_factory.mktemp("two_ranks")
    found = []
    for ranks in (1, 2):
        for process in start_ranks(two_ranks_worker.main, [str(folder / f"{ranks}.pt")], folder, ranks):
            assert process.wait() == 0, process.output()[-3000:]
        found.append(torch.load(folder / f"{ranks}.pt", weights_only=True))
    return found[0], found[1]


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_one_process(case: str, results: tuple[Results, Results]) -> None:
    one, two = (r[case] for r in results)
    takes_all = case.split()[0].removesuffix(",") in ("simclr", "align_uniform", "swav", "barlow_twins", "vicreg")
    assert two["group_size"] == (2 if takes_all or "slice group" in case else 1)
    if "compiled" in case:
        assert one["graphs"] == 1
        # the compiler splits where DDP sends gradients, so that sending overlaps with backward
        assert two["graphs"] > 1
    for name in one.keys() - {"group_size", "graphs", "agreed", *(("loss",) if "fails" in case else ())}:
        rtol, atol = (0, 1e-2) if "fp16" in case else (1e-8, 1e-10)
        torch.testing.assert_close(two[name], one[name], rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
    largest = max(one[name].abs().max() for name in one if name.endswith("conv1.weight"))
    if "fp16" in case:  # the rounding of the gradients shows that they were sent as fp16
        assert (two["projector.last.weight"] - one["projector.last.weight"]).abs().max() > 1e-7 * largest
    if "fails" in case:  # all ranks skip the update if a slice of one rank fails
        assert largest == 0
        assert two["encoder.bn1.running_mean"].abs().max() == 0
    else:
        assert largest > 1e-4
    fault, *requests = two["agreed"].tolist()
    assert requests == [True, False]  # stop, which the last rank asked for; save
    assert (fault > 0) == ("fails" in case)
    if fault:
        assert describe_fault(fault, WMSE_CHECKS, 2, 1) == "rank 1: a slice of view 0 cannot be whitened"


@pytest.mark.slow
def test_pairs_of_ranks_share_batch_norm_statistics(tmp_path: Path) -> None:
    """Four ranks in pairs equal two ranks that each hold the images of a pair."""
    for ranks in (2, 4):
        path = tmp_path / str(ranks)
        for process in start_ranks(two_ranks_worker.main_of_pairs, [str(path)], tmp_path, ranks):
            assert process.wait() == 0, process.output()[-3000:]
    for rank in range(4):
        pair = torch.load(tmp_path / f"2.{rank // 2}", weights_only=True)
        found = torch.load(tmp_path / f"4.{rank}", weights_only=True)
        for name in pair.keys() - {"group_size", "graphs", "agreed"}:
            torch.testing.assert_close(found[name], pair[name], rtol=1e-8, atol=1e-10)
        assert any("running_mean" in name for name in pair)


def test_a_line_of_metrics_summarizes_all_ranks(results: tuple[Results, Results]) -> None:
    """It has the mean loss, each skipped update once, the smallest pivot, all energy, and the health of all embeddings.

    A checkpoint holds a rank's share of the sums."""
    one, two = (r["sums"] for r in results)
    assert one["line"].tolist() == pytest.approx([1.0, 1.0, 1 / 2, 10, 0])
    assert two["line"].tolist() == pytest.approx([1.5, 1.0, 1 / 3, 30, 1])
    assert {"rankme", "lidar", "condition", "largest_share"} <= one.keys() == two.keys()
    for name in one.keys() - {"line", "share"}:
        assert two[name].item() == pytest.approx(one[name].item(), rel=1e-5), name
    assert two["share"].tolist() == [1.5, 1.0, 1.0]  # loss, applied updates, skipped updates


def test_runs_on_one_and_two_ranks_have_the_same_images_and_losses(
    tiny_set: Path, tiny_config: Path, tmp_path: Path
) -> None:
    """This uses the command, with BatchNorm over all ranks.

    The run on two ranks stops between two lines of metrics, and one rank continues it.
    """
    lines = []
    for ranks, steps in ((1, 4), (2, 3)):
        run_dir = tmp_path / f"run{ranks}"
        arguments = ["pretrain", "--config", tiny_config, "--data.root", tiny_set, "--run_dir", run_dir,
                     "--log.every_steps", "2", "--log.tensorboard", "true", "--model.batch_norm_ranks", "all",
                     "--optimizer.name", "lars", "--wmse.iterations", "2", "--wmse.permutation_block", "16"]  # fmt: skip
        for process in start([*arguments, "--max_steps", str(steps)], tmp_path, ranks=ranks):
            assert process.wait() == 0, process.output()
            assert "Warning" not in process.output()  # DDP warns if a gradient is not channels_last
        assert main([*map(str, arguments), "--max_steps", "4"]) == 0
        lines.append([json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()])
    log = (tmp_path / "run2" / "log.txt").read_text()
    assert "groups of 2 neighbouring ranks compute the loss together" in log
    assert "2 rank(s) saved the checkpoint, the run continues with 1" in log
    assert len(list((tmp_path / "run2" / "tensorboard").iterdir())) == 2  # one writer per start and not per rank
    for one, two in zip(*lines, strict=True):
        assert (two["step"], two["lr"]) == (one["step"], one["lr"])
        for key in ("loss", "min_pivot", "effective_rank", "rankme", "lidar", "largest_share"):
            assert two[key] == pytest.approx(one[key], rel=2e-4)


def test_a_batch_that_cannot_be_divided_among_the_ranks_is_refused(
    tiny_set: Path, tiny_config: Path, tmp_path: Path
) -> None:
    arguments = ["pretrain", "--config", tiny_config, "--data.root", tiny_set, "--run_dir", tmp_path / "run",
                 "--data.images_per_step", "17", "--wmse.slice_size", "17"]  # fmt: skip
    for process in start(arguments, tmp_path, ranks=2):
        assert process.wait() == 2
        assert "data.images_per_step is 17, which cannot be divided evenly among 2 ranks: use 34" in process.output()
