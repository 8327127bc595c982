"""Scale of an fp16 loss: an overflow halves it, and a number of steps without one doubles it."""

import torch

from trainer.grad_scaler import FIRST_SCALE, SMALLEST_SCALE, STEPS_TO_GROW, GradScaler

YES, NO = torch.tensor(True), torch.tensor(False)


def test_the_scale_halves_and_grows() -> None:
    scale = GradScaler(torch.device("cpu"))
    scale.update(YES)
    assert scale.scale == FIRST_SCALE / 2
    for _ in range(STEPS_TO_GROW - 1):
        scale.update(NO)
    assert scale.scale == FIRST_SCALE / 2
    scale.update(NO)
    assert scale.scale == FIRST_SCALE
    scale.update(NO)
    assert (scale.scale, scale.good_steps) == (FIRST_SCALE, 1)  # the count starts again
    scale.update(YES)
    assert (scale.scale, scale.good_steps) == (FIRST_SCALE / 2, 0)


def test_the_inverse_of_the_scale_stays_finite() -> None:
    scale = GradScaler(torch.device("cpu"))
    for _ in range(200):
        scale.update(YES)
    assert scale.scale == SMALLEST_SCALE
    assert (1 / scale.scale).isfinite()


def test_a_loaded_scaler_continues_from_the_state() -> None:
    one, other = (GradScaler(torch.device("cpu")) for _ in range(2))
    one.update(YES)
    one.update(NO)
    other.load(one.state())
    assert (other.scale, other.good_steps) == (FIRST_SCALE / 2, 1)
    other.update(YES)
    assert one.scale == FIRST_SCALE / 2  # the two share no tensor
