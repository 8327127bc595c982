"""Division of a run's time among its causes."""

import math
from typing import Any

import numpy as np
import pytest

from trainer.data.stage_times import StageTimes, Waits, split_waits
from trainer.run.shares import RankPace, describe_loss, measure_shares

USUAL = RankPace(views_per_step=100, steps=10, seconds=20, alone=1.0, alone_forward=0.3, forward=3.0)


def shares(*ranks: RankPace, longest_delays: float = 0.0) -> dict[str, Any]:
    found = measure_shares(np.array(ranks), longest_delays)
    lost = [value for name, value in found.items() if name.startswith("lost_") and not math.isnan(value)]
    assert found["compute_share"] + sum(lost) == pytest.approx(1)
    assert min(lost) >= 0
    return found


def test_a_rank_alone_divides_its_time_among_its_waits_and_the_rest() -> None:
    """Of 20 seconds, 10 steps alone take 10."""
    rank = USUAL._replace(reader=1, checker=2, decoder=0.5, views=1.5, checkpoint=0.4, host=0.6)
    found = shares(rank)
    assert found["compute_views_per_s"] == 100
    assert found["compute_share"] == 0.5
    causes = ("reader", "checker", "decoder", "views", "checkpoint", "host", "beside")
    assert [found[f"lost_{cause}"] for cause in causes] == [0.05, 0.1, 0.025, 0.075, 0.02, 0.03, 0.2]
    assert math.isnan(found["slowest_rank"])
    assert math.isnan(found["lost_slowest"])


def test_steps_that_were_slow_when_measured_alone_hide_no_measured_wait() -> None:
    found = shares(USUAL._replace(alone=3.0, reader=4.0))
    assert found["lost_reader"] == 0.2
    assert found["compute_share"] == 0.8
    assert found["lost_beside"] == 0


def test_a_rank_that_is_slow_from_the_start_is_named() -> None:
    """All ranks then took 1 s alone, because they waited for rank 2, whose forward takes twice as long as the others'."""
    slow = USUAL._replace(seconds=10, alone_forward=0.6, forward=6.0)
    usual = USUAL._replace(seconds=10)
    found = shares(usual, usual, slow, usual)
    assert found["slowest_rank"] == 2
    assert found["compute_views_per_s"] == 4 * 100 / 0.5
    assert (found["compute_share"], found["lost_slowest"]) == (0.5, 0.5)
    assert describe_loss(found) == " (slowest rank 2 50%)"


def test_a_rank_that_becomes_slow_later_is_named() -> None:
    found = shares(USUAL, USUAL._replace(forward=9.0))
    assert found["slowest_rank"] == 1
    assert (found["compute_share"], found["lost_slowest"], found["lost_beside"]) == (0.5, 0.5, 0)


def test_the_stages_of_the_slowest_rank_count() -> None:
    found = shares(USUAL._replace(views=1.0), USUAL._replace(reader=8.0), longest_delays=8.0)
    assert (found["slowest_rank"], found["lost_reader"], found["lost_views"]) == (1, 0.4, 0)


def test_ranks_that_are_late_in_turn_delay_all_steps() -> None:
    """Each of 4 ranks waits 2 s for its readers, in different steps, so that every rank loses 8 s."""
    late = USUAL._replace(reader=2.0)
    assert shares(late, late, late, late, longest_delays=8.0)["lost_reader"] == 0.4


def test_a_forward_that_waits_for_other_ranks_names_none() -> None:
    unknown = USUAL._replace(alone_forward=math.nan, forward=math.nan)
    found = shares(unknown, unknown)
    assert (found["lost_slowest"], found["lost_beside"]) == (0, 0.5)


def test_nothing_is_known_before_the_step_alone_is_measured() -> None:
    for ranks in ([RankPace()], [USUAL, RankPace()]):
        assert all(math.isnan(value) for value in measure_shares(np.array(ranks), 0.0).values())


def test_the_log_line_names_a_loss_only_if_it_is_large() -> None:
    assert describe_loss(shares(USUAL._replace(seconds=10.15, host=0.15))) == ""
    assert describe_loss(shares(USUAL._replace(seconds=10.5, host=0.5))) == " (host 5%)"
    on_gpu = shares(USUAL._replace(decoder=math.nan, views=9.0))
    assert math.isnan(on_gpu["lost_decoder"])
    assert describe_loss({**on_gpu, "lost_decoder": None}) == " (decoder and views 45%)"
    assert describe_loss({}) == ""  # an older program's line


def test_waits_for_inputs_are_divided_as_the_time_of_the_threads() -> None:
    """The preparing thread waited 3 s for the readers and then computed for 1 s; the readers read a third of their time."""
    spent = {"read": 2.0, "check": 4.0, "decode": 0.0, "images": 3.0, "arrays": 1.0}
    waits = split_waits(8.0, 10.0, spent, decodes_in_readers=False, decode_share=0.3)
    assert waits == pytest.approx(Waits(reader=2.0, checker=6.0, decoder=3.0, views=7.0))
    decoding = {**spent, "check": 1.0, "decode": 3.0}
    waits = split_waits(8.0, 10.0, decoding, decodes_in_readers=True, decode_share=math.nan)
    assert waits == pytest.approx(Waits(reader=2.0, checker=3.0, decoder=3.0, views=10.0))
    waits = split_waits(8.0, 10.0, spent, decodes_in_readers=False, decode_share=math.nan)
    assert math.isnan(waits.decoder)
    assert waits.views == 10.0


def test_stages_count_since_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("trainer.data.stage_times.time.perf_counter", lambda: now)
    stages = StageTimes()
    for expected in (2.0, 3.0):
        with stages.spend("read"):
            now += expected
        spent = stages.take()
        assert (spent["read"], spent["check"]) == (expected, 0)
