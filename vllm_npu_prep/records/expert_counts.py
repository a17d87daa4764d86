"""The file beside a record that says how many tokens each expert got in the step."""

import json
from pathlib import Path

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.files import write_whole

SUFFIX = ".experts.json"
"""The suffix of the file, in place of the record's."""

ExpertTokens = dict[str, list[int]]
"""By layer, the tokens of each expert; experts are numbered over all ranks."""


def write_expert_counts(record: Path, counts: ExpertTokens) -> None:
    write_whole(record.with_suffix(SUFFIX), json.dumps(counts).encode())


def read_expert_counts(record: Path) -> ExpertTokens:
    """Return the counts of a record; none if there is no such file.

    Raises
    ------
    PrepError
        If the file has anything else.
    """
    path = record.with_suffix(SUFFIX)
    if not path.exists():
        return {}
    try:
        counts = json.loads(path.read_text())
        if not isinstance(counts, dict):
            raise ValueError("no object")
        return {str(layer): [int(n) for n in tokens] for layer, tokens in counts.items()}
    except (OSError, ValueError, TypeError) as error:
        raise PrepError(
            f"{path}: not tokens of experts by layer ({error}); remove the file to see the step "
            "without them"
        ) from None
