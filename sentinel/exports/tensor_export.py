"""The dumped shards of all ranks joined to whole tensors, one file a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sentinel.aggregate import matches, nearest_names
from sentinel.dump import DumpHead, Piece
from sentinel.errors import ConfigError
from sentinel.exports.request import ExportRequest, ExportSetting, Written
from sentinel.exports.whole_tensors import find_dumps, join, read_heads
from sentinel.ingest.naming import CanonicalNames, make_names
from sentinel.messages import Descriptor, TensorInfo


def export_tensors(request: ExportRequest, output: Path, setting: ExportSetting) -> Written:
    """Write `step<N>.safetensors` into `output` for each dumped step, and return what each of them contains.

    The result is not clean when there is no dump, a shard is missing, or copies differ.
    """
    run_dir, names, kinds, steps, attempt = request.run_dir, request.names, request.kinds, request.steps, request.attempt
    to_stderr = setting.to_stderr
    dumps = {step: tries for step, tries in find_dumps(run_dir).items() if steps[0] <= step <= steps[1]}
    if attempt is not None:
        dumps = {step: {attempt: tries[attempt]} for step, tries in dumps.items() if attempt in tries}
    if not dumps:
        to_stderr(
            f"{run_dir}: no dumped tensors of these steps; `sentinel dump RUN`, or `dump` in the trainer's config, make some"
        )
        return Written(is_clean=False)
    reported: list[dict[str, Any]] = []
    is_clean = True
    met: set[str] = set()
    for step, tries in dumps.items():
        files, problems = read_heads(tries[max(tries)])
        path = output / f"step{step}.safetensors"
        if path.exists():
            raise ConfigError(f"{path}: is there already; give another directory with -o DIR")
        naming = _Naming([head for _, head in files])

        def takes(kind: str, name: str) -> bool:
            met.add(name)
            return (kinds is None or kind in kinds) and (not names or any(matches(glob, name) for glob in names))

        result = join(files, naming.name_of, path, takes=takes)
        problems += result.problems
        for problem in problems:
            to_stderr(f"step {step}: {problem}")
        if result.missing_ranks:
            to_stderr(f"step {step}: nothing of ranks {', '.join(map(str, result.missing_ranks[:16]))}")
        is_clean &= not problems and bool(result.num_tensors or result.apart)
        reported.append({
            "step": step, "file": str(path), "num_tensors": result.num_tensors, "num_bytes": result.num_bytes,
            "apart": result.apart, "problems": problems, "missing_ranks": result.missing_ranks,
        })  # fmt: skip
    for glob in names:
        if not any(matches(glob, name) for name in met):
            near = ", ".join(nearest_names([glob], met)) or "none"
            raise ConfigError(f'--name "{glob}": no dumped tensor is called so; nearest: {near}')
    return Written(num_steps=len(reported), num_files=len(reported), files=reported, is_clean=is_clean)


class _Naming:
    """Canonical names, formed from the chunks in the heads of the dumps, as the daemon does."""

    def __init__(self, heads: list[DumpHead]) -> None:
        self._names: CanonicalNames = make_names({head.rank: _descriptor(head) for head in heads})

    def name_of(self, head: DumpHead, piece: Piece) -> str:
        """Return the name that a piece has on every layout."""
        chunk = next((one for one in head.chunks if one.vpp_stage == piece.chunk), None)
        if chunk is None:
            return piece.name
        kind = piece.kind if not piece.name or piece.name.startswith(":") else ""
        return self._names.of_model(chunk.model).of(piece.name, chunk.depth, head.name_map, chunk.offsets, kind)


def _descriptor(head: DumpHead) -> Descriptor:
    tensors = [
        TensorInfo(id=at, name=piece.name, kind="param", chunk=piece.chunk)
        for at, piece in enumerate(head.pieces.values())
        if piece.kind in ("param", "wgrad")
    ]
    return Descriptor(
        version="", place=head.place, chunks=head.chunks, tensors=tuple(tensors), row_fields=(), row_bytes=0,
        layer_offset=head.layer_offset, name_map=head.name_map,
    )  # fmt: skip
