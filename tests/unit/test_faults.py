"""Fault codes, the limit of skipped updates, and the warnings before a collapse."""

import math

import pytest
import torch

from trainer.distributed.ranks import Ranks
from trainer.errors import DivergedError
from trainer.run.faults import CollapseWatch, FaultCounter, describe_fault, fault_code, fault_codes

D, W = 3, 2  # views, ranks
CHECKS = [f"a slice of view {view} cannot be whitened" for view in range(D)]
SOUND = torch.ones(D * 4, dtype=torch.bool)
GRADIENTS = [torch.ones(2, 3), torch.zeros(4)]


def code(
    rank: int = 0, bad_slices: tuple[int, ...] = (), loss: float = 1.0, gradients: list[torch.Tensor] = GRADIENTS
) -> int:
    ok = SOUND.clone()
    ok[list(bad_slices)] = False
    codes = torch.tensor(fault_codes(D, rank, W))
    norms = [g.norm() for g in gradients]
    return int(fault_code(ok.view(D, -1).all(1), torch.tensor(loss), norms, codes))


def test_the_code_without_a_fault_is_0() -> None:
    assert code() == code(1) == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_each_code_describes_its_fault(rank: int) -> None:
    for view in range(D):
        assert (
            describe_fault(code(rank, (4 * view + 3,)), CHECKS, W, 1)
            == f"rank {rank}: a slice of view {view} cannot be whitened"
        )
    for loss in (math.nan, math.inf):
        assert describe_fault(code(rank, loss=loss), CHECKS, W, 1) == f"rank {rank}: the loss is not finite"
    for value in (math.nan, -math.inf):
        broken = [GRADIENTS[0], torch.tensor([0, value])]
        assert (
            describe_fault(code(rank, gradients=broken), CHECKS, W, 1) == "a gradient is not finite, though the loss is"
        )
    for rank_of_group in (0, 1):
        fault = code(rank_of_group, (0,))
        assert describe_fault(fault, CHECKS, W, 2) == "ranks 0 to 1: a slice of view 0 cannot be whitened"


def test_the_largest_code_is_the_first_cause() -> None:
    """The order is the same on a rank and over ranks: slices by rank and view, losses by rank, then gradients."""
    broken = [torch.tensor([math.nan])]
    order = [code(0, (0, 11)), code(0, (5,)), code(0, (11,), loss=math.nan), code(1, (0,), gradients=broken), code(1, (8,)),
             code(0, loss=math.nan, gradients=broken), code(1, loss=math.nan), code(1, gradients=broken)]  # fmt: skip
    assert order == sorted(order, reverse=True)
    assert len(set(order)) == len(order)
    assert min(order) == code(0, gradients=broken) == 1


def test_too_many_consecutive_failures_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    counter = FaultCounter(2, CHECKS, Ranks(0, W), 1)
    for step, fault in enumerate([1, 1, 0, 1, 1]):
        counter.count(step, fault)
    assert [record.getMessage()[-12:] for record in caplog.records] == ["(1 in a row)", "(2 in a row)"] * 2
    message = r"skipped 3 updates in a row .*, the last in step 5: rank 1: a slice of view 2"
    with pytest.raises(DivergedError, match=message) as ended:
        counter.count(5, code(1, (8,)))
    assert ended.value.step == 3, "the first of the skipped updates"
    assert ended.value.reason.startswith("rank 1: a slice of view 2")


def test_an_fp16_overflow_reports_the_halved_loss_scale(caplog: pytest.LogCaptureFixture) -> None:
    counter = FaultCounter(2, CHECKS, Ranks(0, W), 1, scales_loss=True)
    for fault in (1, code(1, (8,))):
        counter.count(0, fault)
    assert ["scale was halved" in record.getMessage() for record in caplog.records] == [True, False]


def test_only_rank_0_logs(caplog: pytest.LogCaptureFixture) -> None:
    FaultCounter(2, CHECKS, Ranks(1, W), 1).count(0, 1)
    assert not caplog.records


HEALTHY = {"effective_rank": 9.0, "rankme": 40.0, "condition": 100.0, "condition_view": 1}


@pytest.mark.parametrize(
    ("name", "values", "first", "words"),
    [
        ("effective_rank", [9.0, 1.7, 1.4, 1.3, 1.3, 1.3], 4, "effective rank 1.30, steps 10 to 40"),
        (
            "effective_rank",
            [1.2, 1.2, 1.2, 1.2, 1.2],
            3,
            "effective rank 1.20, steps 0 to 30",
        ),  # from the first line on
        ("effective_rank", [1.2, 1.2, 1.9, 1.2, math.nan, 1.2, 1.2, 1.2, 1.2], 8, "steps 50 to 80"),
        ("rankme", [30.0, 64.0, 8.1, math.nan, 7.9, 3.0], 4, "fell from 64.0 to 7.9"),
        (
            "condition",
            [100.0, math.nan, 9e6, 2e7, math.inf],
            3,
            "view 1 have lost directions (condition number 2.0e+07)",
        ),
        ("condition", [100.0, math.inf], 1, "condition number inf"),
    ],
)
def test_each_sign_of_a_collapse_is_reported_once(name: str, values: list[float], first: int, words: str) -> None:
    """A line is logged every 10 steps."""
    watch = CollapseWatch()
    found = [watch.warnings(HEALTHY | {"step": 10 * number, name: value}) for number, value in enumerate(values)]
    assert [number for number, warnings in enumerate(found) if warnings] == [first]
    assert words in found[first][0]


def test_embeddings_that_recover_give_no_warning() -> None:
    """MoCo passes through an effective rank of 1.3 in the first steps of the demo, and then learns well."""
    watch = CollapseWatch()
    ranks = [17.0, 8.0, 1.7, 1.3, 1.5, 1.7, 1.7, 2.7]
    found = [
        watch.warnings(HEALTHY | {"step": 10 * number, "effective_rank": rank}) for number, rank in enumerate(ranks)
    ]
    assert found == [[]] * len(ranks)
