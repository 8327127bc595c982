"""Steps that a restart makes again."""

from typing import Any

import pytest

from trainer.run.repeated import RepeatedSteps


def line(step: int, loss: float | None = 1.0, speed: float = 5.0) -> dict[str, Any]:
    return {"step": step, "loss": loss, "rows_digest": f"{step:016x}", "images_per_s": speed, "loss_digest": "x"}


@pytest.fixture(autouse=True)
def level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


def test_identical_steps_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    steps = RepeatedSteps([line(140), line(160)], 120, 120, "")
    for step in (140, 160, 180):
        steps.compare(line(step, speed=9.0))
    steps.close()
    assert caplog.messages == [
        "steps 121 to 160 are made again",
        "steps 121 to 160 were made again after the restart and are identical to the first time",
    ]


def test_the_first_difference_is_named_with_both_values(caplog: pytest.LogCaptureFixture) -> None:
    steps = RepeatedSteps([line(140), line(160), line(180)], 120, 120, "the number of ranks changed from 1 to 2")
    for step, loss in ((140, 1.0), (160, 1.5), (180, 1.0)):
        steps.compare(line(step, loss))
    steps.close()
    (message,) = caplog.messages[1:]
    assert (
        "identical up to step 140, and different from the first time from step 160 on: loss 1.5 instead of 1.0"
        in message
    )
    assert "(the number of ranks changed from 1 to 2, so rounding differs)" in message


def test_rows_come_before_the_loss_that_follows_from_them(caplog: pytest.LogCaptureFixture) -> None:
    steps = RepeatedSteps([line(2)], 1, 1, "")
    steps.compare(line(2, 3.0) | {"rows_digest": "y"})
    assert "rows_digest y instead of" in caplog.messages[-1]


def test_a_mean_over_other_steps_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    steps = RepeatedSteps([line(130), line(140)], 120, 120, "")
    steps.compare(line(140, 9.0))
    steps.close()
    assert len(caplog.messages) == 1


def test_lines_of_an_older_program_have_no_digest(caplog: pytest.LogCaptureFixture) -> None:
    steps = RepeatedSteps([{"step": 2, "loss": 1.0}], 1, 1, "")
    steps.compare(line(2))
    assert caplog.messages[-1] == "step 2 was made again after the restart and is identical to the first time"
