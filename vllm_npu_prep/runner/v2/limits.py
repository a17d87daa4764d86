"""The lengths of lists that Model Runner V2 accepts in a request's sampling parameters.

Upstream's V2 has a row of fixed length for each list, and its runner raises if a list is longer:
that would end the engine and all its requests. V1 takes lists of any length.
"""

from vllm.exceptions import VLLMValidationError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logit_bias import (
    MAX_NUM_ALLOWED_TOKEN_IDS,
    MAX_NUM_LOGIT_BIAS_TOKENS,
    MAX_NUM_STOP_TOKEN_IDS,
)

END_TOKENS = 8
"""Room for the model's end tokens, which vLLM adds to a request's stop tokens."""


def refuse_long_lists(params: SamplingParams | PoolingParams) -> None:
    """Refuse a request whose lists are longer than the rows of V2.

    Raises
    ------
    VLLMValidationError
        It names the list, its length, the limit and what to do. Servers answer it with status 400.
    """
    if isinstance(params, PoolingParams):
        return
    stop_tokens = set(params.stop_token_ids or ()) if params.min_tokens else ()
    limits = {
        "allowed_token_ids": (params.allowed_token_ids or (), MAX_NUM_ALLOWED_TOKEN_IDS),
        "logit_bias": (params.logit_bias or (), MAX_NUM_LOGIT_BIAS_TOKENS),
        "stop_token_ids": (stop_tokens, MAX_NUM_STOP_TOKEN_IDS - END_TOKENS),
    }
    for name, (given, allowed) in limits.items():
        if len(given) > allowed:
            beside = " beside `min_tokens`" if name == "stop_token_ids" else ""
            raise VLLMValidationError(
                f"`{name}`{beside} may have {allowed} tokens on Model Runner V2, and has "
                f"{len(given)}: shorten it, or start the server with "
                "VLLM_USE_V2_MODEL_RUNNER=0",
                parameter=name,
            )
