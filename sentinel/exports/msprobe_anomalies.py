"""Anomalies as msProbe's `anomaly.json`: its keys, its fields, one object a rank."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from sentinel.anomaly import Anomaly
from sentinel.exports.msprobe_csv import has_place
from sentinel.exports.msprobe_format import TENSOR_FILES, file_of_kind, tag_named, tag_of

ANOMALY_FILE = "anomaly_detected/rank{rank}/anomaly.json"
NO_CALL = -1
"""msProbe's call_id of a tensor of which it saw no call."""
_WHOLE = re.compile(r"^(?:model|stage\d+)(?=$|:)")
"""Names of a whole chunk, which msProbe has no name for."""

_SEEN_AS = {"nans": "nan", "infs": "inf"}


class MsprobeAnomalies:
    """Writes the files a record at a time; memory holds only the keys of the records."""

    def __init__(self, directory: Path, names: Mapping[tuple[int, str, str], str] | None = None) -> None:
        """names: (rank, kind, canonical name) -> the name in its CSV files, of every tensor that stands in them.

        None: the ranks' own names are not in the spool any more; canonical ones are written.
        """
        self._directory = directory
        self._names = names
        self._files: dict[int, IO[str]] = {}
        self._num_of_key: dict[str, int] = {}
        self._tags: set[str] = set()
        self.files: set[str] = set()
        self.num_records = 0

    @property
    def num_tags(self) -> int:
        """Number of different tensors among the records."""
        return len(self._tags)

    def add(self, anomaly: Anomaly) -> bool:
        """Write one record into the file of its rank; of a merged tensor: of the lowest rank that holds it.

        Return False, and write nothing, where msProbe has no such tensor: health, logged values, groups, and kinds that it
        does not measure.
        """
        rank = anomaly.rank if anomaly.rank is not None else min(anomaly.ranks, default=0)
        kind = anomaly.kind
        if not has_place(kind):
            return False
        if self._names is None:
            tag = tag_of(anomaly.vpp_stage, _WHOLE.sub("", anomaly.tag_name), kind, rank, anomaly.micro_step)
        else:
            name = self._names.get((rank, kind, anomaly.tag_name))
            if name is None:
                return False
            tag = tag_named(anomaly.vpp_stage, name, kind, rank, anomaly.micro_step)
        call_id = NO_CALL if anomaly.call_id is None else anomaly.call_id
        # As in its CSV files: it reads the optimizer's state before the update.
        file = file_of_kind(kind)
        step = anomaly.step - (TENSOR_FILES[file][1] if file is not None else 0)
        record = {
            "rank": rank,
            "step": step,
            "micro_step": anomaly.micro_step or 0,
            "pp_stage": anomaly.pp_stage,
            "vpp_stage": anomaly.vpp_stage,
            "call_id": call_id,
            "tag_name": tag,
            "message": _message(anomaly, tag, step),
            "group_mates": list(anomaly.group_mates or anomaly.ranks or (rank,)),
        }
        key = f"{tag}_step_{step}_call_{call_id}"
        num_before = self._num_of_key[key] = self._num_of_key.get(key, 0) + 1
        # Three rules that fire on one tensor are three records: a key that is there already gets a number behind it.
        key += f"_{num_before}" if num_before > 1 else ""
        self._file(rank).write(f" {json.dumps(key)}: {json.dumps(record, indent=1, allow_nan=False)}".replace("\n", "\n "))
        self._tags.add(tag)
        self.num_records += 1
        return True

    def _file(self, rank: int) -> IO[str]:
        file = self._files.get(rank)
        if file is None:
            name = ANOMALY_FILE.format(rank=rank)
            path = self._directory / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = self._files[rank] = path.open("x", encoding="utf-8")
            self.files.add(name)
            file.write("{\n")
        else:
            file.write(",\n")
        return file

    def close(self) -> None:
        """Write the ends of the JSON objects, and close the files."""
        for file in self._files.values():
            if not file.closed:
                file.write("\n}")
                file.close()


def _message(anomaly: Anomaly, tag: str, step: int) -> str:
    """Return the message in msProbe's words: its readers take rule, statistic, value and mean out of it."""
    statistic, value = anomaly.statistic, anomaly.value_text or ("nan" if anomaly.value is None else repr(anomaly.value))
    if statistic in _SEEN_AS:
        # It does not judge counts of NaN and infinities: it sees them in the norm.
        statistic, value = "norm", _SEEN_AS[statistic]
    mean = "nan" if anomaly.baseline is None else repr(anomaly.baseline)
    return (
        f"Rule {anomaly.detector} reports anomaly signal in ('{tag}', '{statistic}') at step {step}, "
        f"current value {value}, history mean {mean}."
    )
