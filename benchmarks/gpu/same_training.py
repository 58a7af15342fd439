"""Losses of twenty steps and the weights after them are the same bits with everything measured as with nothing, eager.

The bare training runs twice first: only where that gives the same bits can the comparison say anything. Deterministic
algorithms are asked for, not just warned of: with a warning alone the backward of attention adds in no fixed order. Where
they are not enough, or an operation has none, all runs are repeated with attention made of matrix products.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import tempfile
from typing import Any

import results
import torch
import torch.nn.attention
from dense import EVERYTHING, Training


def bits_of(options: argparse.Namespace, settings: dict[str, Any] | None, run: str) -> tuple[list[str], str]:
    """Return each step's loss and a digest of all weights at the end."""
    training = Training(options, "small", 8)
    monitor = training.attach(settings, run)
    losses = [training.step(monitor) for _ in range(4 if options.tiny else 20)]
    if monitor is not None:
        monitor.detach()
    digest = hashlib.sha256()
    for parameter in training.model.parameters():
        digest.update(parameter.detach().cpu().view(torch.int16).numpy().tobytes())
    return [float(loss).hex() for loss in losses], digest.hexdigest()


def main() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = results.options_of(parser)
    result = results.Result("same-training", options)
    torch.use_deterministic_algorithms(True)
    with tempfile.TemporaryDirectory(prefix="sentinel-gpu-same-") as folder, contextlib.ExitStack() as stack:
        os.environ["SENTINEL_DIR"] = folder
        try:
            bare, again = (bits_of(options, None, "") for _ in range(2))
            why = "" if bare == again else "other bits when it runs again"
        except RuntimeError as error:
            why = str(error)[:200]
        result.note("attention_as_chosen", why or "the same bits twice")
        if why:
            print(f"the bare training as it is: {why}; attention as matrix products from now on")
            stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
            bare, again = (bits_of(options, None, "") for _ in range(2))
        result.note("bare_twice_is_equal", bare == again)
        watched = bits_of(options, EVERYTHING, "everything")
        by_default = bits_of(options, {}, "default")
    result.note("losses", {"bare": bare[0], "everything": watched[0], "default": by_default[0]})
    result.note("everything_is_equal", watched == bare)
    result.note("default_is_equal", by_default == bare)
    if bare != again:
        raise SystemExit("the bare training gives other bits when it runs again: nothing can be said of a measured one")
    if not watched == by_default == bare:
        raise SystemExit(
            f"other bits than bare; the same with everything: {watched == bare}, by default: {by_default == bare}"
        )
    result.complete(f"{len(bare[0])} losses and all weights bit-identical: bare, default, everything")


if __name__ == "__main__":
    main()
