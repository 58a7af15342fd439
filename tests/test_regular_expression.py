from __future__ import annotations

import random
import re
import time
import warnings

import pytest

from sentinel.regular_expression import RegularExpression

ATOMS = [
    "a", "b", ".", r"\.", r"\w", r"\d", "[ab]", "[^a]", "[]a]", r"[\]b]", "^", "$", r"\b", r"\B", r"\A", r"\Z", "1",
    "(?i:A)", "(?=a)", "(?!b)", "(?<=a)", "(?<!ab)", r"\x61", "{", "}", "(?:)", "(?#c)", "_", "[a-c1]", r"\S",
]  # fmt: skip
REPEATS = ["*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{,2}", "{1,}", "{2}?"]


def expression(rng: random.Random, depth: int) -> str:
    roll = rng.random()
    if depth == 0 or roll < 0.35:
        return rng.choice(ATOMS)
    inner = expression(rng, depth - 1)
    if roll < 0.6:
        return inner + expression(rng, depth - 1)
    if roll < 0.75:
        return f"(?:{inner}|{expression(rng, depth - 1)})"
    if roll < 0.88:
        return f"{rng.choice(['(', '(?=', '(?!'])}{inner})"
    return f"(?:{inner}){rng.choice(REPEATS)}"


@pytest.mark.slow
def test_it_says_what_re_says() -> None:
    rng = random.Random(7)
    num_matches = 0
    for _ in range(3000):
        text = expression(rng, 4)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = re.compile(text)
        except re.error:
            continue
        found = RegularExpression(text)
        for _ in range(12):
            name = "".join(rng.choice("abA1._ \n") for _ in range(rng.randrange(7)))
            assert found.fullmatch(name) == (expected.fullmatch(name) is not None), (text, name)
            num_matches += found.fullmatch(name)
    assert num_matches > 2000


@pytest.mark.parametrize(
    ("text", "takes", "leaves"),
    [
        (r"layers\.[02]\..*", ["layers.0.mlp", "layers.2.a.b"], ["layers.1.mlp", "layers.0"]),
        (r"(?!.*bias).*weight", ["a.weight"], ["bias.weight", "weights"]),
        (r".*(?<!layernorm)\.weight", ["mlp.weight"], ["x.layernorm.weight"]),
        (r"(?i)Encoder\.\d{1,3}", ["encoder.12", "ENCODER.7"], ["encoder.1234"]),
        (r"(?P<what>q|k|v)_proj", ["q_proj"], ["o_proj"]),
        (r"^\w+\.py:\d+$", ["train.py:12"], ["train.py:"]),
        ("é.*", ["éa"], ["ea"]),
    ],
)
def test_what_people_write_means_what_it_meant(text: str, takes: list[str], leaves: list[str]) -> None:
    one = RegularExpression(text)

    assert [name for name in (*takes, *leaves) if one.fullmatch(name)] == takes


@pytest.mark.parametrize(
    "text",
    [
        r"((\w+\.?)+)+!", "(a+)+$", "(a|a)*b", "(a|aa)+c", "([a-z]+)*1", "(.*)*x", "(a?){100}a{100}b", "(?:a*)*b",
        r"(.*?,){11}P", r"(\w*)*(\w*)*(\w*)*!", "(?=(a+)+!).*", "(?<!a)((a*)*)*!",
    ],
)  # fmt: skip
def test_no_expression_takes_long(text: str) -> None:
    one = RegularExpression(text)
    begun = time.process_time()

    for length in range(60, 72):
        one.fullmatch("a" * length + "." + "b" * 60)

    assert time.process_time() - begun < 2.0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[", "not a regular expression"),
        ("(" * 300, "not a regular expression"),
        ("(" * 200 + ")" * 200, "at most 50 groups"),
        (r"(a)\1", "a back reference cannot be matched in bounded time"),
        (r"(?P<x>a)(?P=x)", "a back reference"),
        ("(?>a+)b", "an atomic group"),
        ("a++b", "a possessive repeat"),
        ("(a)?(?(1)b|c)", "a condition"),
        ("(?x) a b", "the flag x"),
        ("a{100000}", "at most 1000 repeats"),
        ("(a{900}){900}", "at most 1000 states"),
        ("((a{40}){40}){40}", "at most 1000 states"),
        ("a" * 600, "at most 512 characters"),
    ],
)
def test_what_cannot_be_matched_in_bounded_time_is_refused(text: str, why: str) -> None:
    begun = time.process_time()

    with pytest.raises(ValueError, match=why):
        RegularExpression(text)

    assert time.process_time() - begun < 1.0
