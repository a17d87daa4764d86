"""Prepares recorded steps again, and shows the first difference: ``vllm-npu-prep replay``.

The pure core and the scalar oracle each prepare the step again.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.wording import counted

if TYPE_CHECKING:
    from vllm_npu_prep.records.comparison import Difference


def replay(
    path: Path,  # see `record_files`
    step: int | None = None,  # number of the only step to look at
) -> Iterator[tuple[Path, "list[Difference]"]]:
    """Prepare recorded steps again.

    Yields
    ------
    path, differences
        Of each record: the core's first difference, the oracle's, and those of its samples and
        choices (`sample_difference`, `choice_difference`), as far as there are any.

    Raises
    ------
    PrepError
        For a file that is not a record, or if there is no such step.
    """
    from vllm_npu_prep.records.comparison import (
        choice_difference,
        core_difference,
        oracle_difference,
        sample_difference,
    )
    from vllm_npu_prep.records.record_file import read_record, record_files
    from vllm_npu_prep.records.step_choices import read_choices
    from vllm_npu_prep.records.step_samples import read_samples

    files = record_files(path, step)
    for file in files:
        record = read_record(file)
        samples = read_samples(file, record.settings.num_reqs)
        try:
            found = [core_difference(record), oracle_difference(record)]
            found.append(sample_difference(record, samples))
            positions = record.step().positions
            choices = read_choices(file, len(positions), record.settings.index_topk)
            found.append(choice_difference(record, choices, positions))
        except PrepError as error:
            raise PrepError(f"{file}: {error}") from None
        yield file, [each for each in found if each is not None]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="prepare recorded steps again and show the first difference",
        description="Prepare recorded steps again, by the code that prepares steps (core) and in "
        "plain loops (oracle), and show the first difference of each. The exit code is 0 if all "
        "agree, 1 if something differs, 2 if a file is not a record.",
    )
    parser.add_argument(
        "path",
        type=Path,
        metavar="DIR",
        help='a record, the folder of a run, or the folder that the option "record" named',
    )
    parser.add_argument("--step", type=int, metavar="N", help="this step only")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay, and print the result; return 0 if all agree, 1 if not."""
    count, differing, first = 0, 0, None
    for file, differences in replay(args.path, args.step):
        count += 1
        differing += bool(differences)
        if first is None and differences:
            first = file, differences
    if args.json:
        found = [] if first is None else [asdict(each) for each in first[1]]
        where = None if first is None else str(first[0])
        print(json.dumps({"steps": count, "differing": differing, "file": where, "first": found}))
    elif first is None:
        print(f"{counted(count, 'step')}: core and oracle prepare what was recorded")
    else:
        verb = "differs" if differing == 1 else "differ"
        print(f"{differing} of {counted(count, 'step')} {verb}, first in {first[0]}")
        for each in first[1]:
            print(each)
    return int(first is not None)
