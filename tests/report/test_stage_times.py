import pytest

from sentinel.report.stage_times import STAGES, StageTimes


def test_every_stage_is_there_from_the_start():
    assert StageTimes().read() == dict.fromkeys(STAGES, (0.0, 0))


def test_items_of_a_generator_are_counted_as_they_are_made():
    times = StageTimes()

    assert list(times.each("assemble", iter([1, 2, 3]))) == [1, 2, 3]

    seconds, num_items = times.read()["assemble"]
    assert num_items == 3 and seconds > 0


def test_time_is_counted_where_the_stage_fails():
    times = StageTimes()

    with pytest.raises(ValueError), times.measure("judge", 2):
        raise ValueError

    seconds, num_items = times.read()["judge"]
    assert num_items == 2 and seconds > 0


def test_only_the_seconds_of_its_own_clock_count():
    now = [100.0]
    times = StageTimes(lambda: now[0])

    with times.measure("judge"):
        now[0] += 2.0
    for one in times.each("assemble", iter([1, 2])):
        now[0] += one

    assert (times.read()["judge"], times.read()["assemble"]) == ((2.0, 0), (0.0, 2))
