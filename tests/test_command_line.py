"""A command line is written down as it was typed, but for what looks like a secret."""

from __future__ import annotations

import pytest

from sentinel.command_line import MAX_CHARS, command_words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["python", "train.py", "--api-key", "s3cr3t"], "python train.py --api-key ***"),
        (["python", "train.py", "--hf_token=s3cr3t", "--lr", "1"], "python train.py '--hf_token=***' --lr 1"),
        (["env", "WANDB_API_KEY=s3cr3t", "python"], "env 'WANDB_API_KEY=***' python"),
        (["train", "--data", "s3://user:s3cr3t@host/x"], "train --data 's3://user:***@host/x'"),
        (["train", "--password", "--verbose"], "train --password --verbose"),
    ],
)
def test_secrets_are_left_out(arguments: list[str], words: str) -> None:
    assert command_words(arguments) == words
    assert "s3cr3t" not in words


@pytest.mark.parametrize(
    "arguments",
    [
        ["python", "train.py", "--max-tokens", "5", "--tokenizer=llama", "--num_tokens", "7", "--author", "ana"],
        ["torchrun", "--nproc-per-node", "8", "train.py", "--autocast", "bf16", "--seed", "7", "--pad-token-id", "0"],
    ],
)
def test_what_is_no_secret_is_as_it_was_typed(arguments: list[str]) -> None:
    assert command_words(arguments) == " ".join(arguments)


def test_it_is_one_visible_line_of_bounded_length() -> None:
    words = command_words(["python", "-c", "a\nb\x1b[2J\udcff" * 5000])

    assert words.isprintable() and len(words) <= MAX_CHARS
    assert words.encode().startswith(b"python -c")
