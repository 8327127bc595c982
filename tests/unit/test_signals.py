"""Signals set a flag for as long as a run is under way."""

import os
import signal

import pytest

from trainer.signals import stop_on_signals

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda s: s.name)
def test_each_asks_to_stop_and_the_old_handler_comes_back(number: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in SIGNALS]
    with stop_on_signals() as stop:
        assert not stop.asked
        os.kill(os.getpid(), number)
        assert stop.asked
    assert [signal.getsignal(n) for n in SIGNALS] == before


def test_only_a_second_interrupt_stops_at_once() -> None:
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_each_block_starts_without_a_wish() -> None:
    with stop_on_signals():
        os.kill(os.getpid(), signal.SIGUSR1)
    with stop_on_signals() as stop:
        assert not stop.asked
