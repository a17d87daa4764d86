"""Writes sampled tokens into the token table, for all requests at once."""

from vllm_npu_prep.prep.compiled import compiled


@compiled
def append_sampled_tokens(
    sampled_token_ids,  # [num_reqs] int64
    discard_request_mask,  # [num_reqs] bool
    num_tokens,  # [max_num_reqs] int32, updated
    token_ids,  # [max_num_reqs, max_model_len] int32, updated
    is_token_ids,  # [max_num_reqs, max_model_len] bool, updated
):
    """Write one sampled token for each request that is not discarded into the token table.

    Returns
    -------
    int
        The first row that has no room for its token, -1 if all have. Rows before it are written.
    """
    for req in range(sampled_token_ids.shape[0]):
        if discard_request_mask[req]:
            continue
        end = num_tokens[req]
        if end >= token_ids.shape[1]:
            return req
        token_ids[req, end] = sampled_token_ids[req]
        is_token_ids[req, end] = True
        num_tokens[req] = end + 1
    return -1
