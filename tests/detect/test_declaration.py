"""What detectors declare: each of ours keeps what it declares, and nonsense is refused where it is written."""

import pytest

from sentinel.detect import DETECTORS, Declaration, declared
from sentinel.detect.declaration import CONTRACTS
from sentinel.detect.dotted import shortcoming
from sentinel.errors import ConfigError
from sentinel.rules.watches.binding import WATCHES_OVER


@pytest.mark.parametrize("name", DETECTORS)
def test_a_detector_of_ours_has_the_methods_that_it_declares(name):
    declares = DETECTORS[name].declares

    assert all(callable(getattr(DETECTORS[name], method)) for method in declares.methods)
    assert declares.over in WATCHES_OVER
    if declares.over in CONTRACTS:
        assert shortcoming(DETECTORS[name]) is None
    else:
        assert "only detectors of Sentinel" in shortcoming(DETECTORS[name])


@pytest.mark.parametrize("optional", [("vectorised", "is_vectorised"), ("for_statistic", "is_fitted"), ("rearm", "rearms")])
def test_a_method_that_is_there_is_declared(optional):
    method, field = optional

    assert [name for name, cls in DETECTORS.items() if hasattr(cls, method) != getattr(cls.declares, field)] == []


def test_arguments_may_change_what_is_declared():
    nan, turbulence = DETECTORS["AnomalyNan"], DETECTORS["AnomalyTurbulence"]
    made = [nan(), nan(threshold=3.0), nan(compat="msprobe"), turbulence(), turbulence(compat="msprobe")]

    assert [declared(one).judges for one in made] == ["counts", "own_rows", "own_rows", "tensors", "own_rows"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"over": "weeks"}, "declares.over must be among series, copies"),
        ({"statistics": "norm"}, "declares.statistics must be a tuple of names"),
        ({"summary": 3}, "declares.summary must be a sentence"),
    ],
)
def test_nonsense_is_refused_where_it_is_declared(given, says):
    with pytest.raises(ConfigError, match=says):
        Declaration(**{"summary": "any", **given})


def test_what_an_anomaly_means_may_depend_on_its_direction():
    one = Declaration(summary="any", phrase="moved", phrase_up="rose")

    assert [one.meaning(direction) for direction in (1, 0, -1)] == ["rose", "moved", "moved"]
