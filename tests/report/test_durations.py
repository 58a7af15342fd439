from sentinel.report.durations import DurationCounts


def test_buckets_hold_what_is_up_to_their_bound():
    counts = DurationCounts((0.1, 1.0))

    for seconds in (-5.0, 0.1, 0.5, 1.0, 7.0):
        counts.observe(seconds)

    found = counts.read()
    assert found.bounds == (0.1, 1.0)
    assert found.cumulative == (2, 4, 5)
    assert found.sum_s == 8.6


def test_what_was_read_does_not_change():
    counts = DurationCounts((1.0,))
    before = counts.read()

    counts.observe(0.5)

    assert before.cumulative == (0, 0)
