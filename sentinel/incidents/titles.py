"""The titles and roots of incidents in words."""

from __future__ import annotations

import msgspec

from sentinel.anomaly import Anomaly, is_liveness, is_nonfinite
from sentinel.anomaly_words import against_words, value_words, where_words
from sentinel.kinds import Phase
from sentinel.msprobe_tag import module_of
from sentinel.order.origin import Origin, origin
from sentinel.order.phase import phase_of


def origin_words(anomaly: Anomaly, born: Origin | None = None) -> str:
    """`NaN born in blocks.2.mlp.fc1 (forward) on rank 3, micro_step 1, step 41`; a finite one by its title."""
    name = module_of(anomaly.tag_name)
    if name != anomaly.tag_name:
        anomaly = msgspec.structs.replace(anomaly, tag_name=name)
    born = born or origin(anomaly)
    if not is_nonfinite(anomaly):
        return title_words(anomaly, born)
    phase = phase_of(anomaly.kind, anomaly.tag_name)
    if phase in (Phase.WGRAD, Phase.WGRAD_UNREDUCED):
        place = f"in the gradient of {anomaly.tag_name}"
    elif phase is Phase.PARAM:
        place = f"in the weight {anomaly.tag_name}"
    elif phase is Phase.OPTIMIZER:
        place = f"in {anomaly.kind} of {anomaly.tag_name}"
    elif anomaly.kind == "scalar":
        place = f"in {anomaly.tag_name}"
    elif not born.module and born.segment and born.name == born.segment:
        place = f"in segment {born.segment} ({born.phase})"
    else:
        place = f"in {born.name} ({born.phase})"
    return f"{value_words(anomaly)} born {place} {where_words(born.rank, born.micro_step, anomaly.step, born.ranks)}"


def seen_words(title: str, by: str = "") -> str:
    """Return a title of a non-finite incident that was seen at its place, and may have been born at another.

    by: of whose ranks it is the first place; empty: of those that were heard.
    """
    return title.replace(" born in ", f" seen first, {by}, in " if by else " seen in ", 1)


def root_words(root: Anomaly, born: Origin) -> str:
    """`blocks.2.mlp.fc1 (activation) rank 3 micro_step 1`; `rank 3` of what is about the rank itself."""
    if is_liveness(root) and (root.rank is not None or root.ranks):
        ranks = (root.rank,) if root.rank is not None else root.ranks[:8]
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
    words = [born.name, f"({root.kind})"]
    if born.rank is not None:
        words.append("rank " + " or ".join(map(str, born.ranks or (born.rank,))))
    if born.micro_step is not None:
        words.append(f"micro_step {born.micro_step}")
    return " ".join(words)


def title_words(root: Anomaly, born: Origin) -> str:
    """Return the title of the incident that this root opens."""
    if is_liveness(root):
        return root.message or f"{root.rule}: {root.tag_name} {where_words(root.rank, None, root.step)}"
    if is_nonfinite(root):
        return origin_words(root, born)
    if root.statistic == "checksum":
        return f"{root.rule}: {root.message.partition(':')[0]}, step {root.step}"
    what = root.tag_name if root.kind == "scalar" else f"{root.statistic} of {root.tag_name} ({root.kind})"
    figures = against_words(root.value, root.baseline)
    return f"{root.rule}: {what}{figures} {where_words(root.rank, root.micro_step, root.step)}"
