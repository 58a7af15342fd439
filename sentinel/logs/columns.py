"""What the columns of plain logs are called: loss, grad_norm, lr and step under the spellings of the field."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

_WORDS = re.compile(r"[^a-z0-9]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

LOSS = (
    "loss", "train_loss", "training_loss", "loss_train", "loss_training", "lm_loss", "train_lm_loss", "train_loss_step",
    "train_ce_loss", "train_cross_entropy_loss", "train_cross_entropy", "global_avg_loss", "loss_metrics_global_avg_loss",
    "loss_global_avg_loss", "ce_loss", "cross_entropy_loss", "cross_entropy", "nll_loss", "nll", "trl", "batch_loss",
    "train_batch_loss", "train_total_loss", "total_loss", "loss_total", "loss_step", "train_inner_loss", "mean_loss",
    "train_crossentropyloss", "crossentropyloss", "reduced_train_loss", "loss_train_total", "train_mean_loss", "avg_loss",
    "train_avg_loss", "average_loss", "avr_loss", "running_loss", "mse", "value",
)  # fmt: skip
"""Normalised, the likeliest first: of several the first is `loss`, the others keep their own names."""
GRAD_NORM = (
    "grad_norm", "gradient_norm", "train_grad_norm", "total_grad_norm", "train_total_grad_norm", "optim_total_grad_norm",
    "optimizer_total_grad_norm", "global_grad_norm", "train_global_grad_norm", "grad_norm_total", "global_gradient_norm",
    "grad_global_norm", "grad_2_0_norm_total", "grad_2_norm_total", "grad_norm_global", "gradnorm", "gnorm", "train_gnorm",
    "grads_norm", "gradients_norm", "grad_norm_before_clip", "grad_norm_l2", "l2_norm_grad_global", "total_norm", "norm",
    "grad",
)  # fmt: skip
LR = (
    "lr", "learning_rate", "train_lr", "train_learning_rate", "learningrate", "lr_0", "train_lr_0", "optim_lr", "lr_group_0",
    "optim_learning_rate", "optim_lr_group_0", "base_lr", "lr_rate",
)  # fmt: skip
STEP = (
    "train_global_step", "global_step", "trainer_global_step", "step", "steps", "train_step", "global_steps",
    "optimizer_step", "opt_step", "training_step", "iteration", "iterations", "iter", "iters", "train_iter",
    "train_iteration", "it", "num_updates", "update", "updates", "train_num_updates", "current_steps", "current_step",
    "n_iter", "global_step_max_steps", "num_steps", "step_num", "wandb_step", "s", "batch", "batch_idx", "batches", "i",
    "idx", "index",
)  # fmt: skip
EPOCH = ("epoch", "epochs", "train_epoch", "trainer_epoch", "current_epoch", "ep")

NOT_MEASURED = frozenset(
    (*STEP, *EPOCH, "", "timestamp", "time", "wall_time", "walltime", "runtime", "relative_time", "elapsed", "elapsed_time",
     "datetime", "date", "unnamed_0", "total_steps", "max_steps", "percentage", "remaining_time", "relative_time_process",
     "total_epochs", "num_epochs", "rank", "global_rank", "process_index")
)  # fmt: skip
"""Counters and clocks: no value of theirs says anything of the training."""

_ASIDE = frozenset({"val", "valid", "validation", "eval", "evaluation", "test", "dev", "tel", "holdout", "heldout"})
_NO_LOSS = _ASIDE | {
    "aux", "auxiliary", "balance", "balancing", "router", "z", "scale", "scaler", "epoch", "best", "min", "max", "l1", "l2",
    "reg", "regularization", "mtp", "std", "delta", "ema", "smooth", "smoothed", "kl", "weight", "rate", "count", "mask",
}  # fmt: skip
_NO_NORM = _ASIDE | {
    "layer", "layers", "param", "parameter", "weight", "bias", "max", "min", "std", "ratio", "clipped", "clip",
}  # fmt: skip


def normalised(name: str) -> str:
    """Return a name in lower case, its words joined by `_`: `Train/Grad-Norm` is `train_grad_norm`."""
    return _WORDS.sub("_", name.strip().lower()).strip("_")


def is_aside(name: str) -> bool:
    """Whether a name is of an evaluation, so that it measures another thing than the training does."""
    return bool(_ASIDE.intersection(normalised(name).split("_")))


def named_role(name: str) -> tuple[str, int] | None:
    """Return (`loss`, `grad_norm`, `lr`, `step` or `epoch`; how far down its list the spelling is); None for any other."""
    # W&B counts its own calls; what the trainer counts goes before.
    plain = "wandb_step" if name.strip() == "_step" else normalised(name)
    for spelling in (plain, normalised(_CAMEL.sub("_", name))):
        for role, spellings in (("step", STEP), ("loss", LOSS), ("grad_norm", GRAD_NORM), ("lr", LR), ("epoch", EPOCH)):
            if spelling in spellings:
                return role, spellings.index(spelling)
    return ("lr", len(LR)) if plain.startswith("lr_") and "scale" not in plain else None


def channels(names: Sequence[str]) -> dict[str, str]:
    """Return measured column -> the name it is judged by: `loss`, `grad_norm`, `lr` for one each, its own for the others.

    Exports of several runs in one table (`RUN - train/loss`, as W&B writes them) become `loss`, or `RUN/loss` each.
    """
    split = {name: _split_run(name) for name in names}
    runs = dict.fromkeys(run for run, _ in split.values() if run)
    found: dict[str, str] = {}
    for run in runs or ("",):
        own = {name: column for name, (of, column) in split.items() if of == run}
        prefix = f"{run}/" if len(runs) > 1 else ""
        found |= {name: f"{prefix}{channel}" for name, channel in _channels_of(own).items()}
    if runs:
        found |= {name: name for name, (run, _) in split.items() if not run and is_measured(name)}
    return found


def is_measured(name: str) -> bool:
    """Whether a column says something of the training: no counter, no clock, no bound of an average."""
    known = named_role(name)
    is_counter = known is not None and known[0] in ("step", "epoch")
    return not is_counter and normalised(name) not in NOT_MEASURED and not name.endswith(("__MIN", "__MAX"))


def best_columns(names: Iterable[str], role: str) -> list[str]:
    """Return the columns that may be of a role, the likeliest first."""
    ranked: list[tuple[int, int, str]] = []
    for name in names:
        known = named_role(_split_run(name)[1])
        if known is not None and known[0] == role and not name.endswith(("__MIN", "__MAX")):
            ranked.append((known[1], len(ranked), name))
    return [name for _, _, name in sorted(ranked)]


def _channels_of(columns: Mapping[str, str]) -> dict[str, str]:
    """columns: as the file has them -> without the run before them."""
    measured = {name: plain for name, plain in columns.items() if is_measured(plain)}
    found = dict(measured)
    for role, guess in (("loss", _like_loss), ("grad_norm", _like_norm), ("lr", _like_rate)):
        ranked = [(known[1], name) for name, plain in measured.items() if (known := named_role(plain)) and known[0] == role]
        if not ranked:
            ranked = [(len(normalised(plain)), name) for name, plain in measured.items() if guess(normalised(plain))]
        if ranked:
            found[min(ranked)[1]] = role
    taken: set[str] = set()
    for name, channel in found.items():
        # A second column of the same words (`loss` beside `Loss`) is distinguished by its own name.
        if channel in taken:
            found[name] = name if name not in taken else f"{name} ({len(taken)})"
        taken.add(found[name])
    return found


def _like_loss(plain: str) -> bool:
    words = plain.split("_")
    return ("loss" in words or "losses" in words) and not _NO_LOSS.intersection(words)


def _like_norm(plain: str) -> bool:
    words = set(plain.split("_"))
    is_norm = bool(words & {"norm", "gnorm", "gradnorm"}) and bool(words & {"grad", "gradient", "grads", "gradients"})
    return (is_norm or bool(words & {"gnorm", "gradnorm"})) and not _NO_NORM & words


def _like_rate(plain: str) -> bool:
    words = plain.split("_")
    return "lr" in words or ("learning" in words and "rate" in words)


def _split_run(name: str) -> tuple[str, str]:
    """Return (run, column) of `RUN - column`; the run is empty where there is none."""
    run, dash, column = name.rpartition(" - ")
    return (run.strip(), column.strip()) if dash else ("", name)
