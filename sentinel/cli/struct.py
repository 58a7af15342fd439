"""`sentinel struct`: the structure of a model as its ranks see it, recorded while the training goes on."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from sentinel.cli.control import commands_of, parse_step, show, warn_if_unresponsive
from sentinel.cli.main import CLEAN, FOUND, to_stderr
from sentinel.cli.places import find_run
from sentinel.cli.progress import progress_of
from sentinel.structure_file import STRUCTURE, ModuleShown, Shown, StructureFile, read_structure

_FILE = re.compile(r"rank(\d+)\.json")
_LOOK_S = 0.1


@click.command()
@click.argument("run", required=False)
@click.option("--rank", type=click.IntRange(0), metavar="R", help="Only this rank. Default: the lowest; --json: all.")
@click.option("--ask", is_flag=True, help="Have the ranks that train look at their next forward now, and wait for it.")
@click.option("--wait-s", type=click.FloatRange(0), default=60.0, show_default=True, metavar="S",
              help="--ask: most seconds to wait; 0: do not.")  # fmt: skip
@click.option("--name", "names", multiple=True, metavar="NAME", help="Only this module and those inside it. Several add up.")
@click.option("--stack", "with_stack", is_flag=True, help="Say for each module which lines of code call it.")
@click.option("--format", "form", type=click.Choice(["tree", "msprobe"]), default="tree", show_default=True,
              help="msprobe: one rank as its module_struct.json.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object a rank and line, with everything that is known.")
def struct(
    run: str | None,
    rank: int | None,
    ask: bool,
    wait_s: float,
    names: tuple[str, ...],
    with_stack: bool,
    form: str,
    as_json: bool,
) -> int:
    """Show the modules of RUN's model, with shape and dtype of all they take and give, and who calls them.

    The ranks write it down when asked (--ask), or at the first step where the trainer's config says `struct: true`: hooks
    on every module for one step, none before and after. The training is not stopped. Exit 1 when there is nothing.
    """
    run_dir = find_run(run)
    if ask:
        code = _ask(run_dir, rank, wait_s)
        if code != CLEAN:
            return code
    found = _files(run_dir, rank)
    if not found:
        whose = "" if rank is None else f" of rank {rank}"
        to_stderr(
            f"{run_dir}: no structure{whose} there; `sentinel struct RUN --ask` asks a run that trains, `struct: true` in "
            "the trainer's config writes it at the first step"
        )
        return FOUND
    if as_json and form == "tree":
        for file in found:
            click.echo(msgspec.json.encode(_only(file, names)).decode())
        return CLEAN
    file = _only(found[0], names)
    if not any(chunk.modules for chunk in file.chunks):
        to_stderr(f"no module is called {' or '.join(names)}; `sentinel struct RUN` names all")
        return FOUND
    if form == "msprobe":
        click.echo(msgspec.json.format(msgspec.json.encode(_as_msprobe(file)), indent=2).decode())
        return CLEAN
    click.echo(f"run {file.run}, attempt {file.attempt}, rank {file.rank}, step {file.step}")
    for chunk in file.chunks:
        if len(file.chunks) > 1 or chunk.depth:
            click.echo(f"chunk {chunk.vpp_stage}, depth {chunk.depth}")
        for module in chunk.modules:
            for line in _lines(module, with_stack):
                click.echo(line)
    if len(found) > 1:
        to_stderr(f"ranks {', '.join(str(one.rank) for one in found[1:17])} wrote theirs too: --rank R")
    return CLEAN


def _ask(run_dir: Path, rank: int | None, wait_s: float) -> int:
    """Order it, and wait until every rank that was meant has answered."""
    now = time.time()
    progress = progress_of(run_dir, now)
    before = {path: path.stat().st_mtime_ns for path in _paths(run_dir)}
    command = commands_of(run_dir, progress).describe(
        at_step=parse_step(run_dir, "auto", progress), ranks=() if rank is None else (rank,),
        reason="asked for at the command line", now=now,
    )  # fmt: skip
    if warn_if_unresponsive(run_dir, progress) != CLEAN:
        return FOUND
    if not wait_s:
        show(run_dir, command, False)
        return CLEAN
    wanted, fresh = 1, []
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        fresh = [path for path in _paths(run_dir) if before.get(path) != path.stat().st_mtime_ns]
        if fresh and rank is None:
            wanted = read_structure(fresh[0]).place.world_size  # The first that answers says how many there are.
        if len(fresh) >= wanted:
            return CLEAN
        time.sleep(_LOOK_S)
    to_stderr(f"{len(fresh)} of {wanted} ranks answered within {wait_s:g} s; allow_commands must name DescribeStructure")
    return CLEAN if fresh else FOUND


def _paths(run_dir: Path) -> list[Path]:
    found = [(int(match[1]), path) for path in (run_dir / STRUCTURE).glob("*.json") if (match := _FILE.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _files(run_dir: Path, rank: int | None) -> list[StructureFile]:
    files = []
    for path in _paths(run_dir):
        try:
            file = read_structure(path)
        except (OSError, msgspec.DecodeError) as error:
            to_stderr(f"{path}: {error}")
            continue
        if rank is None or file.rank == rank:
            files.append(file)
    return files


def _only(file: StructureFile, names: tuple[str, ...]) -> StructureFile:
    if not names:
        return file
    chunks = tuple(
        msgspec.structs.replace(
            chunk,
            modules=tuple(
                one for one in chunk.modules if any(one.name == name or one.name.startswith(f"{name}.") for name in names)
            ),
        )
        for chunk in file.chunks
    )
    return msgspec.structs.replace(file, chunks=chunks)


def _lines(module: ModuleShown, with_stack: bool) -> list[str]:
    depth = module.name.count(".") + 1 if module.name else 0
    pad = "  " * depth
    kind = module.kind.rpartition(".")[2]
    times = "" if module.num_calls == 1 else f" x{module.num_calls}" if module.num_calls else ": not seen in this forward"
    lines = [f"{pad}{module.name or '(model)'} {kind}{times}"]
    own = ", ".join(f"{name} {_words(one)}" for name, one in module.parameters.items())
    taken = [_words(one) for one in module.inputs] + [f"{key}={_words(one)}" for key, one in module.keywords.items()]
    lines += [f"{pad}  holds {own}"] if own else []
    if module.output is not None:
        lines.append(f"{pad}  ({', '.join(taken)}) -> {_words(module.output)}")
    lines += [f"{pad}  at {frame}" for frame in module.called_from] if with_stack else []
    return lines


def _words(shown: Shown) -> str:
    """Return a value in one line: `bfloat16[8, 64]`, `(float32[3], None)`, `{logits: float32[8, 10]}`."""
    if shown.shape is not None:
        local = f" local {list(shown.local_shape)} {' '.join(shown.placements)}" if shown.local_shape is not None else ""
        return f"{shown.dtype}{list(shown.shape)}{local}"
    if shown.num_items is None:
        return shown.value or shown.kind
    items = [_words(one) if name.isdigit() else f"{name}: {_words(one)}" for name, one in shown.items.items()]
    if len(items) < shown.num_items:
        items.append(f"... {shown.num_items} in all")
    return f"({', '.join(items)})" if shown.kind in ("tuple", "list") else f"{shown.kind}{{{', '.join(items)}}}"


def _as_msprobe(file: StructureFile) -> dict[str, Any]:
    """Return what msProbe's module_struct.json holds: `vpp_stage:name`, input and output, each with its gradient."""
    found: dict[str, Any] = {}
    for chunk in file.chunks:
        for module in chunk.modules:
            if module.output is None or not module.name:
                continue
            taken = {str(at): one for at, one in enumerate(module.inputs)}
            given = module.output.items if module.output.shape is None else {"0": module.output}
            found[f"{chunk.vpp_stage}:{module.name}"] = {
                "input": {"config": f"list[{len(taken)}]", **_sizes(taken)},
                "output": {"config": "tensor", "tensor": _size(module.output)}
                if module.output.shape is not None
                else {"config": f"{module.output.kind}[{len(given)}]", **_sizes(given)},
                "input_grad": {"config": f"tuple[{len(taken)}]", **_sizes(taken, is_grad=True)},
                "output_grad": {"config": f"tuple[{len(given)}]", **_sizes(given, is_grad=True)},
            }
    return found


def _sizes(values: Mapping[str, Shown], *, is_grad: bool = False) -> dict[str, str]:
    return {name: _size(one) if not is_grad or one.requires_grad else "<class 'NoneType'>" for name, one in values.items()}


def _size(shown: Shown) -> str:
    if shown.shape is None:
        return f"<class '{shown.kind}'>"
    size = ", ".join(map(str, shown.shape)) + ("," if len(shown.shape) == 1 else "")
    return f"size=({size}), dtype=torch.{shown.dtype}"
