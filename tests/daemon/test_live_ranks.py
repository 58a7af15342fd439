from sentinel.daemon.live_ranks import StepStart


def test_a_step_began_when_the_one_before_it_was_seen_to_end():
    start = StepStart()
    start.take(4, 10.0)
    assert start.begun_s(5, 10.5) is None  # It may have ended long before it was looked at.

    start.take(5, 11.0)
    start.take(5, 11.2)

    assert start.begun_s(6, 11.5) == 0.5
    assert start.begun_s(7, 11.5) is None  # A rank says that it is further on than any end that was seen.


def test_a_run_that_goes_back_begins_anew():
    start = StepStart()
    for step, mono in ((40, 1.0), (41, 2.0), (7, 3.0)):
        start.take(step, mono)

    assert start.begun_s(8, 3.25) == 0.25
