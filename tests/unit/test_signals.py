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


def test_only_a_second_interrupt_is_left_to_the_system() -> None:
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) is not signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert stop.asked


def test_each_block_starts_without_a_wish() -> None:
    with stop_on_signals():
        os.kill(os.getpid(), signal.SIGUSR1)
    with stop_on_signals() as stop:
        assert not stop.asked
