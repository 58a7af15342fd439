"""The defects of the reference systems, each seen by running them, and the test of ours that would fail there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DEFECTS: dict[int, tuple[str, str, str]] = {
    1: ("three alarms of a tensor leave one", "explain/test_topk.py", "test_several_rules_on_one_tensor_are_all_kept"),
    2: ("a first rule hides a second", "rules/test_engine.py", "test_several_rules_all_kept"),
    3: ("one NaN blinds a baseline", "detect/test_battery.py", "test_nan_never_enters_a_baseline"),
    4: ("inf unseen without a threshold", "rules/test_engine.py", "test_infinities_fire_without_a_threshold"),
    5: (
        "false records on a healthy run", "end_to_end/test_runs.py",
        "test_nobody_is_paged_in_many_healthy_steps_and_a_fault_after_them_is_found",
    ),
    6: ("None outputs recorded as NaN", "collect/test_hooks.py", "test_nested_outputs_and_none"),
    7: ("the planted origin at place 436", "order/test_causal.py", "test_first_cause_under_global_clipping"),
    8: ("skipped steps invisible", "collect/test_steps.py", "test_grad_scaler_step_that_overflowed_is_a_skipped_step"),
    9: (
        "a parameter without gradients written with old values", "collect/test_hooks.py",
        "test_parameter_that_stopped_receiving_gradients_is_not_written_again",
    ),
    10: ("a restart deletes the anomaly file", "daemon/test_served_liveness.py", "test_kill_9_tells_nothing_twice"),
    11: ("steps not due still pay", "collect/test_due.py", "test_defect_11_steps_not_due_do_not_pay"),
    12: ("unlisted ranks compute", "collect/test_due.py", "test_defect_12_ranks_that_are_not_listed_measure_nothing"),
    13: (
        "layers.1 takes layers.10", "collect/schedule/test_plan.py",
        "test_targets_are_names_globs_and_regular_expressions",
    ),
    14: (
        "a crash without torch.distributed", "collect/probes/test_comm.py", "test_without_torch_distributed_nothing_happens",
    ),
    15: (
        "micro-batch gradients that are running sums", "collect/probes/test_wgrad_unreduced.py",
        "test_defect_15_micro_batch_gradients_are_no_running_sums",
    ),
    16: (
        "a spectral norm that draws from the training's generator", "collect/probes/test_weight_spectrum.py",
        "test_defects_16_and_18_neither_training_nor_its_generator_notices",
    ),
    17: (
        "query and key lengths that differ kill training", "collect/probes/test_attention.py",
        "test_attention_monitor_survives_lengths_that_differ_and_tensors_it_cannot_read",
    ),
    18: ("hooks that change the loss", "end_to_end/test_bit_identical.py", "test_bit_identical_training"),
    19: ("a second attach counts twice", "collect/test_hooks.py", "test_attach_twice_counts_once"),
    20: ("means written as 0", "exports/test_formats.py", "test_defect_20_a_small_mean_is_not_written_as_zero"),
    21: ("bare NaN in JSON", "exports/test_formats.py", "test_defect_21_json_is_strict"),
    22: (
        "the wgrad record of the step that overflowed thrown away", "collect/probes/test_wgrad_unreduced.py",
        "test_defect_22_the_record_of_the_step_that_overflowed_is_kept",
    ),
    23: ("variance merged with the wrong sign", "test_moments.py", "test_shards_merge_to_the_whole"),
    24: ("moments multiplied by world size", "ingest/test_merge.py", "test_replicas_are_not_summed"),
    25: ("counts wrong above 2**24", "native/test_measure.py", "test_counts_exact_above_2_24"),
    26: ("alarm at step 1 of every pipeline run", "collect/parallel/test_pipelining.py", "test_shape_inference_not_counted"),
    27: ("double counts under checkpointing", "collect/test_hooks.py", "test_recompute_counted_once"),
    28: ("training blocked by who listens", "collect/writing/test_handover.py", "test_a_stalled_disk_stalls_nobody_else"),
    30: ("an alert sent twice after kill -9", "daemon/test_served_liveness.py", "test_kill_9_tells_nothing_twice"),
    31: (
        "the anomaly file rewritten each step", "report/test_files.py",
        "test_what_is_on_disk_is_never_written_again",
    ),
}  # fmt: skip
"""Number, as the list of defects has it; what went wrong; file and test. 29, expressions from the network, is below."""


@pytest.mark.parametrize("number", DEFECTS)
def test_each_defect_has_a_test(number: int) -> None:
    _, file, name = DEFECTS[number]
    tree = ast.parse((TESTS / file).read_text())

    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.slow
def test_nothing_that_comes_from_outside_is_evaluated() -> None:
    """Defect 29: no file of the package calls eval or exec, or loads a pickle but from the pipe of a process of its own."""
    calls = set()
    for path in (TESTS.parent / "sentinel").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
                if name in ("eval", "exec", "pickle.load", "pickle.loads", "torch.load", "yaml.load"):
                    calls.add(f"{path.name}:{node.lineno}: {ast.unparse(node)[:80]}")
    from_own_process = "encoding_processes.py"
    assert all(from_own_process in call or "SafeLoader" in call for call in calls), calls
