"""The value of ``NPU_PREP_WATCH``: what is recorded, and what is checked."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_npu_prep.config import RecordConfig
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.validation import reason_of


class WatchConfig(BaseModel):
    """What to do with each step; the keys are those of this plugin's own runners."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    record: RecordConfig | None = None
    check: Literal["off", "cheap", "full"] = "full"


def parse_watch(text: str) -> WatchConfig:
    """Parse the variable.

    Raises
    ------
    PrepError
        If it is not a JSON object, or has an unknown key or a wrong value.
    """
    try:
        return WatchConfig.model_validate_json(text)
    except ValidationError as error:
        detail = error.errors()[0]
        where = "".join(f"{part}: " for part in detail["loc"])
        raise PrepError(
            f"NPU_PREP_WATCH: {where}{reason_of(detail)}; write for example "
            '\'{"record": {"dir": "steps"}, "check": "full"}\''
        ) from None
