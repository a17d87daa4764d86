"""The file beside a record: what its step sampled, from which tokens or from which trace."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, TypeAdapter

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.records.settings import Count, Strict
from vllm_npu_prep.wording import counted

SUFFIX = ".samples.json"
"""The suffix of the file, in place of the record's."""

Runs = list[tuple[Count, Count]]
"""Numbers as runs, ``[first, count]``."""


class RequestSamples(Strict):
    """What a step sampled for a request; without tokens if its prompt has not ended."""

    token_ids: list[Count] = Field(max_length=1 << 10)  # accepted drafts are among them
    from_trace: bool = False  # whether the tokens are those of a trace (--enable-trace-replay)
    # For each of `token_ids`, the tokens from which it was drawn; None without
    # --return-sampling-mask
    kept: list[Runs] | None = None


StepSamples = list[RequestSamples]  # one for each request, in the order of the batch
_FILE = TypeAdapter(StepSamples)


def to_bytes(samples: Sequence[RequestSamples]) -> bytes:
    return _FILE.dump_json([*samples], exclude_none=True)


def read_samples(record: Path, num_reqs: int) -> StepSamples:
    """Return what a record's step sampled; nothing if there is no such file.

    Raises
    ------
    PrepError
        If the file has anything else than samples of `num_reqs` requests.
    """
    path = record.with_suffix(SUFFIX)
    if not path.exists():
        return []
    try:
        samples = _FILE.validate_json(path.read_bytes())
        if len(samples) != num_reqs:
            raise ValueError(f"{counted(len(samples), 'list')} for {counted(num_reqs, 'request')}")
        return samples
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise PrepError(
            f"{path}: not samples of requests ({why}); remove the file to see the step without them"
        ) from None
