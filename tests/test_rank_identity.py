"""Who a rank is: as the environment of schedulers has it, as it travels, and as messages say it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sentinel.collect import environment, own_identity
from sentinel.collect.environment import Environment, parse_labels, read_environment
from sentinel.rank_identity import RankIdentity
from sentinel.report.alert_context import MAX_RANKS, context_of

from .support.anomalies import an_incident


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, {}),
        ({"SLURM_JOB_ID": "8812", "SLURMD_NODENAME": "node17"}, {"job": "8812", "node": "node17"}),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, {"job": "7_2"}),
        ({"TORCHELASTIC_RUN_ID": "gpt-7b"}, {"job": "gpt-7b"}),
        ({"TORCHELASTIC_RUN_ID": "none"}, {}),
        ({"LSB_JOBID": "5"}, {"job": "5"}),
        ({"PBS_JOBID": "12.head"}, {"job": "12.head"}),
        (
            {"POD_NAME": "w-3", "NODE_NAME": "n1", "JOB_COMPLETION_INDEX": "3"},
            {"pod": "w-3", "node": "n1", "job": "index 3"},
        ),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "w-3"}, {"pod": "w-3"}),
        ({"HOSTNAME": "laptop"}, {}),
        ({"SLURM_JOB_ID": "8" * 9999}, {"job": "8" * 256}),
    ],
)
def test_names_that_schedulers_give(env, expected, monkeypatch):
    monkeypatch.setattr(environment.os, "environ", env)

    assert read_environment().identity == expected


@pytest.mark.parametrize(
    ("text", "labels", "said"),
    [
        ("team=nlp, cluster=a", {"team": "nlp", "cluster": "a"}, []),
        ("team=a=b,,", {"team": "a=b"}, []),
        ("team", {}, ["SENTINEL_LABELS: expected NAME=VALUE, got 'team'"]),
        ("1x=2,ok=1", {"ok": "1"}, ["SENTINEL_LABELS: expected a name of at most 63 letters"]),
        ("a=" + "x" * 257, {}, ["SENTINEL_LABELS: a: expected at most 256 characters, got 257"]),
        (",".join(f"l{n}=1" for n in range(17)), {f"l{n}": "1" for n in range(16)}, ["at most 16 labels, l16 is left out"]),
    ],
)
def test_labels_that_cannot_be_are_left_out_and_said(text, labels, said):
    found, problems = parse_labels(text)

    assert found == labels
    assert len(problems) == len(said) and all(one in problem for one, problem in zip(said, problems, strict=True))


@pytest.mark.parametrize(
    ("visible", "index", "uuid", "expected"),
    [
        ("", 3, "1f3a", {"gpu": "3", "gpu_uuid": "GPU-1f3a"}),
        ("4,5", 1, "GPU-1f3a", {"gpu": "5", "gpu_uuid": "GPU-1f3a"}),
        ("GPU-1f3a", 0, "1f3a", {"gpu_uuid": "GPU-1f3a"}),
        ("", 0, "", {"gpu": "0"}),
    ],
)
def test_a_gpu_has_the_number_that_it_has_on_its_host(visible, index, uuid, expected, monkeypatch):
    model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda", index))]))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: SimpleNamespace(uuid=uuid))

    assert own_identity.own_gpu([model], Environment(visible_gpus=visible)) == expected


def test_cuda_is_not_initialised_for_a_name():
    model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda", 0))]))

    assert own_identity.own_gpu([model, torch.nn.Linear(1, 1)], Environment()) == {}
    assert own_identity.own_gpu([torch.nn.Linear(1, 1)], Environment()) == {}
    assert not torch.cuda.is_initialized()


def test_an_identity_is_said_as_far_as_it_is_known():
    full = {"host": "h", "node": "n1", "pod": "w-3", "gpu": "5", "gpu_uuid": "GPU-1f", "job": "8", "label.team": "nlp"}

    assert RankIdentity.reported_by(3, full).in_words == "n1, pod w-3, GPU 5 (GPU-1f)"
    assert RankIdentity.reported_by(3, full).labels == {"team": "nlp"}
    assert RankIdentity.reported_by(0, {"host": "h"}).in_words == "h"
    assert RankIdentity.reported_by(0, {}).in_words == ""


def ranks(number, **fields):
    return {
        n: RankIdentity(rank=n, host=f"h{n}", **{name: value(n) for name, value in fields.items()}) for n in range(number)
    }


def test_a_context_names_the_first_ranks_and_counts_all():
    named = context_of(an_incident(ranks=tuple(range(2, 90))), ranks(128), 7.0)
    unnamed = context_of(an_incident(), ranks(2), 7.0)

    assert [one.rank for one in named.ranks] == [2, 3, 4, 5] and len(named.ranks) == MAX_RANKS and named.num_ranks == 88
    assert [one.rank for one in unnamed.ranks] == [0, 1] and unnamed.num_ranks == 2


def test_job_and_labels_are_said_where_all_ranks_share_them():
    shared = context_of(an_incident(), ranks(3, job=lambda n: "8", labels=lambda n: {"team": "nlp", "host": str(n)}), 0.0)
    mixed = context_of(an_incident(), ranks(3, job=str), 0.0)

    assert (shared.job, shared.labels) == ("8", {"team": "nlp"})
    assert (mixed.job, mixed.labels) == ("", {})
    assert context_of(an_incident(ranks=(9,)), {}, 0.0).ranks == ()


def test_the_machine_that_it_began_on_comes_first():
    found = context_of(
        an_incident(ranks=tuple(range(90)), root_name="blocks.1 (activation) rank 77 micro_step 2"), ranks(90), 0.0
    )
    strange = context_of(an_incident(ranks=(0, 1), root_name="x rank 77"), ranks(90), 0.0)

    assert (found.origin, [one.rank for one in found.ranks]) == (77, [77, 0, 1, 2])
    assert (strange.origin, [one.rank for one in strange.ranks]) == (-1, [0, 1])
    assert context_of(an_incident(ranks=(3,), root_name="b rank 3"), {}, 0.0).origin == -1
    assert context_of(an_incident(ranks=(0, 3), root_name="rank 3"), ranks(4), 0.0).origin == 3
