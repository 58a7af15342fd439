"""`program`: a function outside its domain where a value was born, or an update that makes finite weights non-finite.

A logarithm of a negative number, a division by zero, a softmax of nothing but -inf gives the same on every machine. So where
the module at the origin computes such a function, of numbers that were finite, it is suspected before any machine. What is
asked of the evidence: all that went in and was measured is finite; the function's result is of the kind that was found; its
argument lies outside the domain where it was measured itself; and it is not guarded (the graph is read by
`collect/hooks/partial_functions.py`). Functions that nearly every model has (a division, a masked softmax, an exponential)
need the module itself to be the origin, not just the block around it.
"""

from __future__ import annotations

from sentinel.incidents.diagnosis.claim import Diagnosis, is_narrow, listed, plural
from sentinel.incidents.diagnosis.evidence import Evidence, NonFiniteOrigin
from sentinel.incidents.diagnosis.step_facts import Maker, TensorReading
from sentinel.kinds import Phase

COMMON = frozenset({"div", "softmax", "mean", "std", "var", "exp", "exp2", "expm1", "sinh", "cosh"})
"""Functions that good models are full of."""
_OVERFLOWING = frozenset({"exp", "exp2", "expm1", "sinh", "cosh"})
_ONLY_NAN = frozenset({"sqrt", "acos", "asin", "acosh", "softmax", "mean", "std", "var"})
_LARGEST_EXPONENT = {"float16": 11.0, "bfloat16": 88.7, "float32": 88.7, "float64": 709.7}
_WHY = {
    "log": "is NaN below zero and -inf at zero", "log2": "is NaN below zero and -inf at zero",
    "log10": "is NaN below zero and -inf at zero", "log1p": "is NaN below -1 and -inf at -1",
    "sqrt": "is NaN below zero", "rsqrt": "is NaN below zero and inf at zero",
    "div": "is inf or NaN where the divisor is zero", "acosh": "is NaN below 1",
    "pow": "is NaN for a fraction of what is negative, inf for a negative power of zero",
    "acos": "is NaN beyond 1 and -1", "asin": "is NaN beyond 1 and -1", "atanh": "is NaN beyond 1 and -1, inf at them",
    "erfinv": "is NaN beyond 1 and -1, inf at them", "softmax": "is NaN where all of a row is -inf",
    "mean": "is NaN of an empty selection", "std": "is NaN of fewer than two elements",
    "var": "is NaN of fewer than two elements",
}  # fmt: skip
_GUARD = {
    "softmax": "leave one key of each row unmasked, or put zeros where all are masked",
    "mean": "divide by max(count, 1)", "std": "ask for two elements or more", "var": "ask for two elements or more",
    "div": "add a small number to the divisor", "acos": "clamp its argument", "asin": "clamp its argument",
    "atanh": "clamp its argument", "erfinv": "clamp its argument", "acosh": "clamp its argument",
}  # fmt: skip


def by_function(evidence: Evidence) -> Diagnosis | None:
    """Return the diagnosis of the functions that made a non-finite value of finite ones; None: there are none."""
    # What was seen from inside a module says more than its block's border did.
    for one in sorted(evidence.origins, key=lambda origin: bool(origin.border)):
        function, argument = _suspected(one)
        if function is None:
            continue
        name, _, of = function.partition(":")
        plain = name.rstrip("'")
        steps = sorted({origin.step for origin in evidence.origins if origin.name == one.name})
        again = f", and again at steps {listed(steps[1:])} with other data" if len(steps) > 1 else ""
        whose = "" if one.rank is None else f" on rank {one.rank}"
        if one.phase is Phase.FORWARD:
            what = f"{_module(one)} computes {plain}, which {_WHY.get(plain, 'overflows for large arguments')}"
        else:
            what = f"{_module(one)} computes {plain}, whose derivative is no number at the edge of its domain"
        if argument is not None:
            what += f"; its argument, {of or argument.name}, lay between {argument.smallest:.4g} and {argument.largest:.4g}"
        elif of:
            what += f", of {of}"
        return Diagnosis(
            suspected="program",
            reasons=(
                f"{what}{whose}, at step {one.step}{again}",
                f"{_went_in(one.maker)}: the same code gives the same on every machine",
            ),
            next_step=(
                f"in {_module(one)}, {guard_words(plain)}; to see what went in when it comes again: sentinel dump --kinds "
                f"activation_in,activation --targets '{_module(one)}' --for-steps 50"
            ),
        )
    return None


def functions_words(one: NonFiniteOrigin) -> str:
    """Return the functions of an origin that are not suspected enough to be accused, in words; empty: there are none."""
    names = [name.partition(":")[0].rstrip("'") for name in (one.maker.functions or () if one.maker is not None else ())]
    if not names:
        return ""
    return f"{_module(one)} computes {listed(dict.fromkeys(names), 4)}, not defined everywhere: look there too"


def _module(one: NonFiniteOrigin) -> str:
    """Return the module that is meant: the birthplace, or the one before it whose minus infinities made it."""
    is_other = one.maker is not None and one.phase is Phase.FORWARD and not one.border and one.maker.name != one.name
    return one.maker.name if is_other and one.maker is not None and one.kind == "activation" else one.name


def by_update(one: NonFiniteOrigin) -> Diagnosis | None:
    """Return the diagnosis of weights that are not finite after a step of finite gradients; None: there are none."""
    before = one.num_gradients
    if one.phase is not Phase.PARAM or not before or one.num_bad == 1:
        return None
    return Diagnosis(
        suspected="program",
        reasons=(
            f"the weights of {one.name} were no numbers as step {one.step} began, and all "
            f"{plural(before, 'weight gradient')} measured at step {one.step - 1} were finite: the update made them so",
            "a division by a second moment of zero, a rate or a clip factor that is no number, or a write into the weights",
        ),
    )  # fmt: skip


def guard_words(function: str) -> str:
    """Return what keeps a function inside its domain, as an advice."""
    return _GUARD.get(function, "clamp its argument, or add a small number to it")


def _suspected(one: NonFiniteOrigin) -> tuple[str | None, TensorReading | None]:
    """Return the function that most likely made a value, and its argument where that was measured; None: no function."""
    maker = one.maker
    if maker is None or not maker.functions or any(reading.is_bad for reading in maker.inputs):
        return None, None
    is_module = not one.border
    likely: list[tuple[int, str, TensorReading | None]] = []
    for function in maker.functions:
        name, _, of = function.partition(":")
        if one.phase is Phase.FORWARD and (name.endswith("'") or not _is_of_kind(name, one)):
            continue
        argument = maker.arguments.get(of)
        plain = name.rstrip("'")
        is_outside = _is_outside(plain, argument, maker.dtype) if argument is not None else None
        if is_outside is False and one.phase is Phase.FORWARD:
            continue
        if is_outside:
            likely.append((0, function, argument))
        elif plain not in COMMON:
            likely.append((1, function, argument))
        elif is_module and (plain not in _OVERFLOWING or maker.is_inf) and (plain != "softmax" or one.num_bad != 1):
            likely.append((2, function, argument))
    if not likely or is_narrow(maker.dtype):
        return None, None
    _, function, argument = min(likely, key=lambda each: each[0])
    return function, argument


def _is_of_kind(name: str, one: NonFiniteOrigin) -> bool:
    """Tell whether a function's result is of the kind that was found: infinities alone, or NaN too."""
    is_inf = one.maker.is_inf if one.maker is not None else one.is_inf
    return not (is_inf and name in _ONLY_NAN)


def _is_outside(function: str, argument: TensorReading, dtype: str) -> bool | None:
    """Tell whether some of an argument lies outside a function's domain; None: its range does not tell."""
    low, high, zeros = argument.smallest, argument.largest, argument.num_zero
    if function in ("log", "log2", "log10", "rsqrt"):
        return low <= 0.0
    if function == "sqrt":
        return low < 0.0
    if function == "log1p":
        return low <= -1.0
    if function in ("acos", "asin", "atanh", "erfinv"):
        return low < -1.0 or high > 1.0
    if function == "acosh":
        return low < 1.0
    if function == "div":
        return zeros > 0
    if function in _OVERFLOWING:
        return max(high, -low) > _LARGEST_EXPONENT.get(dtype, 88.7)
    return None


def _went_in(maker: Maker | None) -> str:
    inputs = maker.inputs if maker is not None else ()
    if not inputs:
        return "nothing before it was non-finite"
    one = inputs[0]
    return f"what went in was finite ({one.name} between {one.smallest:.4g} and {one.largest:.4g})"
