"""The table of an engine's calls: what ``verify-device`` found of each, and what an engine reads.

A table is a file of JSON lines. The first has the device, the versions, and the settings and model
of the engine whose calls were tried. Each other line is a call with what was found; it is written
as soon as it is there, so a run that is killed loses nothing that it found. Nothing here needs
torch.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.verify.outcome import Result, RunResults, Verdict

FORMAT = "vllm_npu_prep table 1"
"""What the first line of a table names itself."""

NOT_COMPARED = (
    *("num_hidden_layers", "max_window_layers", "first_k_dense_replace"),
    *("num_nextn_predict_layers", "max_position_embeddings"),
)
"""Numbers of a model's configuration that no call depends on: lists are made of a few layers."""

COMPARED = ("plugin", "device", "driver", "CANN", "torch", "torch_npu")
"""Versions that have to be those of a former run, which another one goes on with."""

ADVICE = (
    "verify again with a shorter --max-model-len or fewer --max-num-seqs, if this engine can do "
    'without the call, or with another CANN; to take the risk, leave "verified" out'
)


@dataclass(frozen=True)
class Table:
    """A table that was read.

    Attributes
    ----------
    path
        Where it is, for messages.
    of
        What it holds for: chip, CANN and torch_npu.
    versions
        Everything that a result depends on, by name.
    engine
        Settings of the engine, with ``config``, the model's configuration.
    results
        What was found, by `Call.key`.
    """

    path: Path
    of: Mapping[str, str]
    versions: Mapping[str, str]
    engine: Mapping[str, Any]
    results: Mapping[str, Result]

    def refuse_other_software(self, here: Mapping[str, str]) -> None:
        """Refuse an engine on another chip, or with another CANN or torch_npu.

        Raises
        ------
        PrepError
            It names the first that differs.
        """
        for name, found in here.items():
            if self.of.get(name) != found:
                raise PrepError(
                    f'"npu_prep.verified" = "{self.path}": it was made with {name} '
                    f"{self.of.get(name) or 'unknown'}, and this engine has {found or 'none'}; "
                    "vllm-npu-prep verify-device --calls LIST --table FILE makes one here"
                )

    def refuse_other_model(self, config: Mapping[str, Any]) -> None:
        """Refuse an engine of a model of another architecture or other sizes.

        Raises
        ------
        PrepError
            It names some of the keys that differ.
        """
        one, another = sizes_of(self.engine.get("config") or {}), sizes_of(config)
        other = [name for name in sorted(one.keys() & another.keys()) if one[name] != another[name]]
        if other:
            raise PrepError(
                f'"npu_prep.verified" = "{self.path}": it was made for the model '
                f"{self.engine.get('model')}, whose config.json differs from this engine's in "
                f"{', '.join(other[:4])}; vllm-npu-prep verify-device --model FOLDER --table FILE "
                "makes one for this model"
            )

    def refuse_what_cannot_be_replaced(self) -> None:
        """Refuse to start if a call is wrong and torch can't make it in another way.

        Raises
        ------
        PrepError
            It names the call, what was expected and what the device gave.
        """
        for result in self.results.values():
            if result.verdict.is_bad and result.torch_got != "":
                other = f"torch's own form gave {result.torch_got}"
                if result.torch_got is None:
                    other = "torch has no form of its own"
                raise PrepError(
                    f'"npu_prep.verified" = "{self.path}": {result.what} ({result.name}: '
                    f"{result.given or 'no answer'}): expected {result.expected}, got "
                    f"{result.got}; {other}; {ADVICE}"
                )


def read_table(path: Path) -> Table:
    """Read a table; the last line of a run that was killed may be incomplete, and is left out.

    Raises
    ------
    PrepError
        If the file can't be read or is no table.
    """
    try:
        first, *lines = path.read_text().split("\n")
        head = json.loads(first)
        if head.get("format") != FORMAT:
            raise ValueError(f"its first line names no {FORMAT!r}")
        known = {field.name for field in fields(Result)}
        results = {}
        for line in lines[:-1]:  # the rest after the last line's end
            row = json.loads(line)
            given = {name: value for name, value in row.items() if name in known}
            results[row["key"]] = Result(**given)
        return Table(path, head["of"], head["versions"], head["engine"], results)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PrepError(
            f"{path} is no table of verified calls ({error}); vllm-npu-prep verify-device "
            "--calls LIST --table FILE writes one"
        ) from error


class TableWriter:
    """Writes a table row by row."""

    def __init__(
        self, path: Path, found: RunResults, versions: Mapping[str, str], former: Table | None
    ) -> None:
        """Begin a table, or go on with the one of a former run.

        Raises
        ------
        PrepError
            If the file can't be written, or the former run was another engine's, or with other
            versions.
        """
        self._path, self._keys = path, found.keys
        of = {
            "chip": found.device,
            "CANN": found.versions.get("CANN", ""),
            "torch_npu": versions.get("torch_npu", ""),
        }
        head = {"format": FORMAT, "of": of, "versions": versions, "engine": found.engine}
        lines: list[Mapping[str, Any]] = [head]
        if former is not None:
            same = [former.versions.get(name) == versions.get(name) for name in COMPARED]
            if former.engine != found.engine or not all(same):
                raise PrepError(
                    f"--resume: {path} is of another engine, or was made with other versions; "
                    "leave --resume out to begin again"
                )
            lines += [{"key": key, **asdict(row)} for key, row in former.results.items()]
        self._write("w", lines)

    def add(self, result: Result) -> None:
        """Write what was found of a call.

        Rows without a key are of no call. What was left out stays unverified; rows that took no
        time were not begun, since the device was lost before.
        """
        key = self._keys.get(result.name)
        if key and result.seconds and result.verdict is not Verdict.LEFT_OUT:
            self._write("a", [{"key": key, **asdict(result)}])

    def _write(self, mode: str, lines: Iterable[Mapping[str, Any]]) -> None:
        try:
            with self._path.open(mode) as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
        except OSError as error:
            raise PrepError(f"--table {self._path}: {error.strerror}") from error


def sizes_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the calls of a model depend on: its architecture, and numbers of its parts."""
    parts = [part for part in config.values() if isinstance(part, Mapping)]
    found = {name: value for part in parts for name, value in sizes_of(part).items()}
    for name, value in config.items():
        is_size = type(value) is int and name not in NOT_COMPARED and not name.endswith("token_id")
        if is_size or name == "architectures":
            found[name] = value
    return found


def is_trusted(result: Result) -> bool:
    return result.verdict in (Verdict.SAME, Verdict.RAN)
