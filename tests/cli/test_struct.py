import json

import msgspec
import pytest

from sentinel.cli.main import BAD_USAGE, CLEAN, FOUND, run_cli
from sentinel.place import Place
from sentinel.structure_file import ChunkShown, ModuleShown, Shown, StructureFile, structure_path, write_structure


def tensor(*shape, dtype="float32", requires_grad=True):
    return Shown(kind="Tensor", shape=shape, dtype=dtype, device="cpu", requires_grad=requires_grad)


def modules(rank):
    mask = Shown(kind="NoneType", value="None")
    return (
        ModuleShown(
            name="layers.1", kind="pkg.models.Block", num_calls=2, place_in_forward=1, inputs=(tensor(2, 4), mask),
            keywords={"mask": tensor(4, dtype="bool", requires_grad=False)},
            output=Shown(kind="tuple", num_items=2, items={"0": tensor(2, 4), "1": mask}),
            called_from=("models/net.py:12 Net.forward", "job/train.py:80 main"),
        ),
        ModuleShown(
            name="layers.1.fc", kind="torch.nn.Linear", num_calls=1, place_in_forward=0, inputs=(tensor(2, 4),),
            output=tensor(2, 8 + rank), parameters={"weight": tensor(8, 4)},
        ),
        ModuleShown(name="layers.10", kind="pkg.models.Block"),
    )  # fmt: skip


@pytest.fixture
def run_dir(tmp_path):
    """A run of which ranks 0 and 1 have written down their model."""
    for rank in (1, 0):
        file = StructureFile(
            run="run", attempt=0, rank=rank, step=7, place=Place(rank=rank, world_size=2, dp_rank=rank, dp_size=2),
            chunks=(ChunkShown(vpp_stage=0, depth=0, modules=modules(rank)),),
        )  # fmt: skip
        (tmp_path / "run").mkdir(exist_ok=True)
        write_structure(structure_path(tmp_path / "run", rank), file)
    return tmp_path / "run"


def test_the_tree_says_shapes_dtypes_and_who_calls(run_dir, capsys):
    assert run_cli(["struct", str(run_dir), "--stack"]) == CLEAN

    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "run run, attempt 0, rank 0, step 7",
        "    layers.1 Block x2",
        "      (float32[2, 4], None, mask=bool[4]) -> (float32[2, 4], None)",
        "      at models/net.py:12 Net.forward",
        "      at job/train.py:80 main",
        "      layers.1.fc Linear",
        "        holds weight float32[8, 4]",
        "        (float32[2, 4]) -> float32[2, 8]",
        "    layers.10 Block: not seen in this forward",
    ]
    assert "ranks 1 wrote theirs too" in said.err


def test_a_rank_and_a_module_are_picked(run_dir, capsys):
    """Defect 13: layers.1 is not layers.10."""
    assert run_cli(["struct", str(run_dir), "--rank", "1", "--name", "layers.1", "--json"]) == CLEAN

    (line,) = capsys.readouterr().out.splitlines()
    file = msgspec.json.decode(line, type=StructureFile)
    assert file.rank == 1
    assert [one.name for one in file.chunks[0].modules] == ["layers.1", "layers.1.fc"]
    assert file.chunks[0].modules[1].output.shape == (2, 9)


def test_json_has_every_rank(run_dir, capsys):
    assert run_cli(["struct", str(run_dir), "--json"]) == CLEAN

    assert [json.loads(line)["rank"] for line in capsys.readouterr().out.splitlines()] == [0, 1]


def test_msprobe_reads_it(run_dir, capsys):
    """As /module_struct.json of msProbe: `vpp_stage:name`, sizes as torch says them."""
    assert run_cli(["struct", str(run_dir), "--format", "msprobe"]) == CLEAN

    found = json.loads(capsys.readouterr().out)
    assert found["0:layers.1.fc"] == {
        "input": {"config": "list[1]", "0": "size=(2, 4), dtype=torch.float32"},
        "output": {"config": "tensor", "tensor": "size=(2, 8), dtype=torch.float32"},
        "input_grad": {"config": "tuple[1]", "0": "size=(2, 4), dtype=torch.float32"},
        "output_grad": {"config": "tuple[1]", "0": "size=(2, 8), dtype=torch.float32"},
    }
    assert found["0:layers.1"]["output"]["1"] == "<class 'NoneType'>"
    assert "0:layers.10" not in found


def test_nothing_there_says_how(run_dir, tmp_path, capsys):
    (tmp_path / "other").mkdir()

    assert run_cli(["struct", str(tmp_path / "other")]) == FOUND
    assert "--ask" in capsys.readouterr().err
    assert run_cli(["struct", str(run_dir), "--rank", "5"]) == FOUND
    assert run_cli(["struct", str(run_dir), "--name", "heads"]) == FOUND
    assert run_cli(["struct", str(tmp_path / "none")]) == BAD_USAGE


def test_a_broken_file_is_said_and_the_others_are_read(run_dir, capsys):
    structure_path(run_dir, 0).write_text("{")

    assert run_cli(["struct", str(run_dir)]) == CLEAN

    said = capsys.readouterr()
    assert "rank 1, step 7" in said.out
    assert "rank0.json" in said.err


def test_asking_where_nobody_trains_says_so(tmp_path, capsys):
    (tmp_path / "run").mkdir()

    assert run_cli(["struct", str(tmp_path / "run"), "--ask"]) == BAD_USAGE
    assert "found no step in any spool" in capsys.readouterr().err
