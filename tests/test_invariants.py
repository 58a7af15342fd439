"""Every invariant is a test by its name."""

from __future__ import annotations

import re
from pathlib import Path

NAMES = """
no_sync_no_collective bit_identical_training hooks_never_raise_into_autograd detach_restores_everything
wgrad_is_before_clipping skipped_step_is_a_step two_optimizers_one_step log_after_step_belongs_to_it
step_number_is_the_trainers micro_step_survives_reverse_backward shape_inference_not_counted recompute_counted_once
leaf_hooks_do_not_pile_up shards_merge_to_the_whole replicas_are_not_summed tied_tensors_counted_once
new_life_is_not_a_duplicate repeated_steps_after_resume counts_exact_above_2_24 nan_never_enters_a_baseline
level_shift_fires_once several_rules_all_kept strict_json_always order_is_a_partial_order first_cause_under_tensor_parallel
first_cause_under_global_clipping topk_independent_of_file_order late_rows_never_reopen_a_step replay_is_identical
kill_9_loses_nothing torn_tail_is_cut full_disk_is_said command_obeyed_at_one_step late_command_is_withdrawn
foreign_control_file_refused daemon_needs_no_torch import_arrows metrics_within_budget rows_judged_equals_rows_expected
"""


def test_each_invariant_has_a_test_by_its_name() -> None:
    found: set[str] = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        found.update(re.findall(r"^ *(?:async )?def test_(\w+)", path.read_text(), re.MULTILINE))

    missing = [name for name in NAMES.split() if not any(one == name or one.startswith(f"{name}_") for one in found)]

    assert len(NAMES.split()) == 39
    assert missing == []
