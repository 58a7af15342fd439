import pytest

from sentinel.report.series_room import MOST_OF_FAMILY, SeriesRoom, allotted


def test_the_dearest_come_first_and_those_that_came_stay():
    room = SeriesRoom()

    room.fit({("rule", "b"): 3, ("scalar", "z"): 1}, 4)
    room.fit({("rule", "a"): 3, ("rule", "b"): 3, ("scalar", "z"): 1}, 4)

    assert ("rule", "b") in room and ("scalar", "z") in room and ("rule", "a") not in room
    assert room.num_dropped == 3


def test_room_of_what_is_no_longer_there_is_free_again():
    room = SeriesRoom()

    room.fit({("rule", "gone"): 3}, 3)
    room.fit({("rule", "new"): 3}, 3)

    assert ("rule", "new") in room and ("rule", "gone") not in room
    assert room.num_dropped == 0


def test_no_family_takes_the_room_of_all_others():
    room = SeriesRoom()
    wanted = {("scalar", str(number)): 1 for number in range(1000)}

    room.fit({**wanted, ("score", "0"): 1}, 500)

    assert sum(key in room for key in wanted) == MOST_OF_FAMILY["scalar"]
    assert ("score", "0") in room


@pytest.mark.parametrize(
    ("wanted", "is_live", "room", "expected"),
    [
        ([], [], 100, []),
        ([10], [True], 100, [10]),
        ([200], [True], 100, [100]),
        ([200, 200, 200], [True] * 3, 100, [25, 25, 25]),
        ([10, 200, 200], [True, False, False], 100, [10, 90, 0]),
        ([50, 50], [False, False], 60, [50, 10]),
    ],
)
def test_live_runs_share_alike_and_the_others_take_what_is_left(wanted, is_live, room, expected):
    assert allotted(wanted, is_live, room) == expected
