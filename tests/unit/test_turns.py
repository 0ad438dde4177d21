"""How a refused transaction is halved, and how the owner comes back to full size without spinning."""

import pytest

from pipeline.service.owner.turns import Turns

pytestmark = pytest.mark.unit


def test_all_is_taken_at_once_while_all_is_well() -> None:
    """One transaction for both kinds is the fast way."""
    turns = Turns(100, 50)

    turn = turns.next()

    assert (turn.inputs_max, turn.timers_max, turn.partial) == (100, 50, False)
    assert not turns.idle(turn)


def test_kinds_take_turns_once_something_was_refused() -> None:
    """Apart, success with the ones does not widen the others, and the one at fault can stand alone."""
    turns = Turns(100, 50)
    turns.narrow(turns.next(), 40)

    timers, inputs = turns.next(), turns.next()

    assert (timers.inputs_max, timers.timers_max) == (0, 20)
    assert (inputs.inputs_max, inputs.timers_max) == (20, 0)
    turns.narrow(timers, 20)
    turns.widen(inputs)
    assert (turns.next().timers_max, turns.next().inputs_max) == (10, 40)


def test_halving_ends_at_one() -> None:
    """Zero would take nothing for ever."""
    turns = Turns(100, 50)
    for _ in range(20):
        turns.narrow(turns.next(), 1)

    assert {turns.next().inputs_max, turns.next().inputs_max} == {0, 1}
    assert {turns.next().timers_max, turns.next().timers_max} == {0, 1}


def test_success_widens_until_both_kinds_go_together_again() -> None:
    """After the poison is gone the owner is as fast as before."""
    turns = Turns(100, 50)
    turns.narrow(turns.next(), 2)
    count = 0
    while (turn := turns.next()).partial:
        turns.widen(turn)
        count += 1
        assert count < 30

    assert (turn.inputs_max, turn.timers_max) == (100, 50)


def test_idle_turns_look_at_the_other_kind_once() -> None:
    """Each kind is looked at before anybody sleeps, and then somebody does sleep."""
    turns = Turns(100, 50)
    turns.narrow(turns.next(), 4)

    assert turns.idle(turns.next())
    assert not turns.idle(turns.next())
    assert turns.idle(turns.next())
    turns.widen(turns.next())
    assert turns.idle(turns.next())


def test_an_input_and_a_timer_refused_together_come_apart_where_nothing_can_be_halved() -> None:
    """With a bound of one of each, the same pair would be tried and refused for ever."""
    turns = Turns(1, 1)
    turns.narrow(turns.next(), 2)

    first, second = turns.next(), turns.next()

    assert {(first.inputs_max, first.timers_max), (second.inputs_max, second.timers_max)} == {(1, 0), (0, 1)}
