"""The planted bugs: one line of the package each, and the tests that ought to notice."""

from dataclasses import dataclass

FUSED = ("tests/npu/on_device/test_fused.py",)
CORE = ("tests/prep", "tests/attention", "tests/ops", "tests/test_explain_command.py")
ENGINE = ("tests/runner", "tests/engine")
BOOKS = ("tests/runner/test_bookkeeping.py",)
UPDATES = ("tests/runner/test_request_updates.py",)
COUNTS = ("tests/npu/on_device/test_counts.py",)
ON_NPU = "tests/npu/on_device/test_tokens.py::test_tokens_are_the_best_by_transformers"
FIA = (f"{ON_NPU}[fia, graphs]",)
ATB = (f"{ON_NPU}[atb]",)
EXPERTS = ("tests/npu/on_device/test_experts.py",)
CALLS = ("tests/verify/test_calls.py",)
MC2 = ("tests/device/test_mc2.py",)
MC2_LAYER = ("tests/npu/on_device/test_mc2.py::test_a_layer_takes_fewer_launches_and_bytes[4]",)
CALLS_ON_NPU = ("tests/npu/on_device/test_call_lists.py",)
DATA_PARALLEL_CALLS = (
    f"{CALLS_ON_NPU[0]}::test_other_models_give_what_their_formulas_say[data-parallel ranks]",
)
LONG_CONTEXTS = (f"{CALLS_ON_NPU[0]}::test_captured_attention_that_loses_keys_is_found",)
CAPTURED_EXPERTS = (f"{CALLS_ON_NPU[0]}::test_captured_experts_that_keep_their_rows_are_found",)
TABLE = ("tests/verify/test_table.py",)
TABLE_ON_NPU = "tests/npu/on_device/test_verified.py"
DRAFTING = ("tests/ops/test_drafting.py",)
STATES = ("tests/prep/test_recurrent_states.py",)
STATES_ON_NPU = (
    "tests/npu/on_device/test_hybrids.py::test_states_follow_requests_into_their_next_block[V1]",
)
STATE_LAYERS = ("tests/attention/test_gated_delta.py",)
MORE_STATES_ON_NPU = (
    "tests/npu/on_device/test_sleep.py::test_new_weights_are_read_in_graphs[states-V1]",
)
STATES_OF_DRAFTS = (f"{ON_NPU}[Qwen3.5, MTP, preempted, V2]",)
MERGED = ("tests/attention/test_context_parallel.py",)
SHARDS = ("tests/prep/test_dcp.py",)
PROMPTS = ("tests/prep/test_pcp.py",)
SHARED_PROMPTS = "tests/engine/test_prompt_parallelism.py::test_tokens_are_those_of_transformers"
PROMPT_TOKENS = (f"{SHARED_PROMPTS}[eager]",)
LATENT = ("tests/attention/test_latent.py", "tests/attention/test_mla.py")
ROWS_ON_NPU = (
    "tests/npu/on_device/test_verify_device.py::test_rows_are_the_same_as_their_formulas",
)
SPARSE_ON_NPU = (f"{ON_NPU}[DeepSeek V3.2, MTP, V2]",)
SPARSE = ("tests/attention/test_sparse.py",)
SPARSE_ENGINE = "tests/engine/test_sparse.py::test_"
SPARSE_TOKENS = (f"{SPARSE_ENGINE}tokens_are_those_of_transformers[GLM-5-V2]",)
CHOICES = (f"{SPARSE_ENGINE}choices_are_those_of_transformers[GLM-5-V2]",)
SPECULATION = ("tests/engine/test_speculation.py",)
MTP = ("tests/engine/test_mtp.py",)
EMBEDS = ("tests/engine/test_prompt_embeds.py",)
POOLING = ("tests/engine/test_pooling.py",)
LORA = ("tests/ops/test_lora.py", "tests/engine/test_lora.py")
EXPERT_ADAPTERS = ("tests/ops/test_expert_adapters.py", "tests/engine/test_expert_adapters.py")
EXPERT_ADAPTERS_ON_NPU = ("tests/npu/on_device/test_expert_adapters.py",)
GRAPHS = ("tests/graph", "tests/engine/test_graphs.py")
TRANSFER = ("tests/engine/test_kv_transfer.py",)
MOONCAKE = (
    "tests/engine/test_mooncake.py::test_prompts_are_decoded_from_what_was_computed_elsewhere",
)
POOL = (
    "tests/engine/test_mooncake_store.py::test_prompts_are_found_that_an_engine_before_computed",
)
REGIONS = ("tests/attention/test_mooncake.py",)
STALLED = tuple(
    f"tests/engine/test_mooncake.py::test_blocks_of_a_stalled_transfer_are_nobody_elses[{case}]"
    for case in ("recompute-to its request", "recompute-to others")
)
OFFLOADING = ("tests/engine/test_offloading.py",)
OFFLOADING_ON_NPU = (
    "tests/npu/on_device/test_offloading.py::test_prompts_that_were_evicted_come_back_from_the_host"
    "[fia]",
)
TRANSFER_ON_NPU = (
    "tests/npu/on_device/test_kv_transfer.py::test_one_engine_computes_prompts_and_another_decodes_them"
    "[latent]",
)
TWO_RANKS = ("tests/engine/test_kv_transfer.py::test_ranks_of_an_int8_model_store_load_and_refuse",)
INT8_RANKS = ("tests/quantization/test_ranks.py",)
DRAFTS_AFTER_SLEEP = "tests/engine/test_sleep.py::test_drafts_are_accepted_as_before_after_sleeps"
WINDOWS = ("tests/engine/test_windows.py",)
WINDOWS_ON_NPU = ("tests/npu/on_device/test_windows.py",)
CHUNKS = ("tests/prep/test_local_attention.py",)
CHUNKS_ENGINE = ("tests/engine/test_local_attention.py",)
VISION = ("tests/engine/test_multimodal.py",)
RECORDS = ("tests/inspect/test_record.py", "tests/inspect/test_recorder.py")
RUN_PAGES = ("tests/inspect/test_run_page.py",)
RUN_KEYS = ("tests/inspect/test_run_keys.py",)
CHECKS = ("tests/inspect/test_cheap_check.py", "tests/engine/test_full_check.py")
MESSAGES = ("tests/inspect/test_cheap_check.py",)
CHECKS_OF_STATES = ("tests/engine/test_full_check_of_states.py",)
SERVERS = ("tests/server/test_record_command.py", "tests/server/test_processes.py")
PAGES = ("tests/test_explain_command.py", "tests/inspect/test_page.py")
SCHEDULING = ("tests/scheduling/test_outputs.py", "tests/scheduling/test_twin.py")
SEED = "tests/scheduling/test_twin.py::test_outputs_and_state_equal_upstream_s_after_every_step"
RARE = "tests/scheduling/test_twin.py::test_rare_cases_agree"
INT8 = ("tests/engine/test_quantization.py", "tests/quantization")
INT8_TOKENS = (
    "tests/engine/test_quantization.py::test_tokens_are_those_of_rounded_weights_and_inputs",
)
INT8_LATENT = (f"{INT8_TOKENS[0]}[latent]",)
W4A8_TOKENS = (f"{INT8_TOKENS[0]}[W4A8, ModelSlim, experts in groups]",)
W4A16_TOKENS = (f"{INT8_TOKENS[0]}[W4A16, experts in groups]",)
INT8_MTP = ("tests/engine/test_quantization.py::test_mtp_layers_draft_for_an_int8_model",)
INT8_ON_NPU = ("tests/npu/on_device/test_quantization.py",)
INT4_ON_NPU = (f"{INT8_ON_NPU[0]}::test_logits_and_launches_of_a_layer[Qwen3, AWQ]",)
PACKED_EXPERTS = (
    f"{INT8_ON_NPU[0]}::test_logits_and_launches_of_a_layer[experts, W4A16, zero points]",
)
W4A8_ON_NPU = (f"{INT8_ON_NPU[0]}::test_logits_and_launches_of_a_layer[experts, W4A8, groups]",)
INT4 = ("tests/quantization/test_four_bits.py",)
INT8_FILES = ("tests/quantization/test_checkpoint.py",)
V2 = ("tests/v2",)
V2_DRAFT_MODEL = (
    "tests/engine/test_speculation.py::test_a_draft_model_drafts_the_same_for_either_runner",
)
RANKS = "tests/engine/test_ranks.py::test_"
V2_ENGINES = (f"{RANKS}engines_that_share_experts_step_together[experts-V2]",)
V2_EPISODES = (
    "tests/differential/test_differential.py::test_every_array_and_greedy_sample_of_v2_is_that_of_v1",
)
V2_ENGINE = ("tests/engine/test_v2.py",)
V2_SEES = ("tests/engine/test_multimodal.py::test_mtp_layers_read_images_on_v2_as_on_v1",)
V2_THINKING = ("tests/engine/test_thinking.py::test_v2_ends_thinking_where_v1_does",)
THINKING = ("tests/ops/test_thinking.py",)
EPLB = ("tests/ops/test_eplb.py",)
MOVING = "tests/engine/test_eplb.py::test_"
MOVED = (f"{MOVING}no_token_is_wrong_before_and_after_exchanges[ranks]",)
V2_LORA = ("tests/engine/test_lora.py",)
V2_GRAPHS = ("tests/engine/test_graphs.py",)
KERNELS = ("tests/ops/test_sampling_v2.py",)
DRAWN_DRAFTS = ("tests/ops/test_rejection_v2.py",)
FAILURES = ("tests/device/test_failures.py",)
FAULTS = ("tests/engine/test_faults.py",)
REAL = "tests/engine/test_real_model.py::test_chats_in_graphs_have_the_tokens_of_transformers"
REAL_TEXT, V2_REAL_TEXT = (f"{REAL}[FULL_DECODE_ONLY]",), (f"{REAL}[FULL_DECODE_ONLY-V2]",)
MASKS = ("tests/attention/test_mask_cache.py",)
COMPILED = ("tests/attention/test_compiled_kernels.py",)
LATENT_COMPILED = ("tests/attention/test_latent.py::test_a_step_equals_the_formula",)
EVERY_STATE = (
    "tests/engine/test_against_transformers.py::test_one_engine_passes_through_every_state"
)


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    Attributes
    ----------
    name
        The bug in a few words.
    path
        File of the package.
    before, after
        The line's part that is replaced; it must occur exactly once.
    tests
        What is run; the first failure ends the run.
    """

    name: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...] = CORE


# A row each: the bug in a few words, what is in the file, what takes its place, the tests that notice.
# fmt: off
PLANTED: dict[str, list[tuple[str, str, str, tuple[str, ...]]]] = {
    "attention/kernels/compiled_loops.py": [
        ("compiled: the next block is the last one again", "block, offset = block + 1, 0", "block, offset = block, 0", COMPILED),
        ("compiled: sums keep the scale of an earlier run of keys", "totals[so_far] * shrunk + total", "totals[so_far] + total", COMPILED),
        ("compiled: windows are one token short", "low = max(low, token + ahead - call.window + 1)", "low = max(low, token + ahead - call.window + 2)", COMPILED),
        ("compiled: a query head reads the next K/V head's values", "scores, 0, call.values, kv_head, slots", "scores, 0, call.values, min(kv_head + 1, call.keys.shape[1] - 1), slots", COMPILED),
        ("compiled: a key past the length is read", "    seq_len = call.seq_lens[request]\n", "    seq_len = call.seq_lens[request] + 1\n", COMPILED),
        ("compiled: what windows have left behind is read", "begin = max(0, first + ahead - call.window + 1)", "begin = 0", COMPILED),
        ("compiled: every request reads the first one's context", "call.kv_starts[request] + begin + j", "begin + j", LATENT_COMPILED),
        ("compiled: rotated keys add nothing to scores", "                    if rope_heads > 0:\n                        add_scores", "                    if False:\n                        add_scores", LATENT_COMPILED),
        ("compiled: rotated keys of prompts add nothing to scores", "                if rope_heads > 0:\n                    turn", "                if False:\n                    turn", LATENT_COMPILED),
        ("compiled: many rows read the columns of an earlier head", "turn(turned, call.keys, kv_head, slots, keys)", "turn(turned, call.keys, max(kv_head - 1, 0), slots, keys)", COMPILED),
        ("compiled: the next run of keys is the same one again", "slots, next_slots, keys = next_slots, slots, next_keys", "keys = next_keys", COMPILED),
    ],
    "attention/kernels/__init__.py": [
        ("compiled: the first request waits for numba", 'if name == "compiled":', "if False:", (EVERY_STATE,)),
    ],
    "attention/kernels/compiled.py": [
        ("compiled: a layer reads the K and V of the step's first one", "        if tensor is not None:\n            addresses[index] = tensor.data_ptr()", "        if tensor is not None and (index not in (2, 4) or addresses[index] == 0):\n            addresses[index] = tensor.data_ptr()", REAL_TEXT),
        ("compiled: a prompt's tokens see those that follow", "ends, shape, output, causal=True)", "ends, shape, output, causal=False)", LATENT_COMPILED),
    ],
    "ops/cpu/linear.py": [
        ("operators that multiply wrong are used", 'return "" if is_near and torch.equal(back, weight) else', 'return "" if True else', ("tests/ops/test_cpu.py",)),
        ("sums in float16 pass the look at torch's operators", "for s in ((9, 1024), (37, 1024), (37,))", "for s in ((9, 7), (37, 7), (37,))", ("tests/ops/test_cpu.py",)),
        ("a tied embedding loses its rows to the head", "is_shared=is_embedding or readers[id(weight)] > 1", "is_shared=is_embedding", ("tests/ops/test_cpu.py",)),
        ("a packed weight is stale after new weights", "        self.packed = self.operators.pack(weight.data)", "        self.__dict__.setdefault('first', self.operators.pack(weight.data)); self.packed = self.first", ("tests/ops/test_cpu.py",)),
    ],
    "ops/cpu/kernels.py": [
        ("a rotary embedding takes cosines of the next position", "itemsize * rotary * places[row]", "itemsize * rotary * min(places[row] + 1, 63)", ("tests/ops/test_cpu.py",)),
        ("a rounded sum is normalised", "norm_row(exact, weights, outs[r], epsilon)", "norm_row(np.array([widen(x) for x in total]), weights, outs[r], epsilon)", ("tests/ops/test_cpu.py",)),
        ("SwiGLU activates the second half", "gate, up, result = xs[r, :size], xs[r, size : 2 * size], outs[r]", "up, gate, result = xs[r, :size], xs[r, size : 2 * size], outs[r]", ("tests/ops/test_cpu.py",)),
        ("an activation is not rounded before it is multiplied", "activated = rounded(silu(widen(gate[i])), result[i])", "activated = silu(widen(gate[i]))", ("tests/ops/test_cpu.py",)),
    ],
    "runner/v2/traces.py": [
        ("V2: a trace stays with its row", "        self._traces.pop(req_idx, None)", "        pass", V2_ENGINE),
        ("V2: a trace is one token ahead", "ends - self._prompt_len[request_rows]", "ends - self._prompt_len[request_rows] + 1", V2_ENGINE),
    ],
    "aclnn.py": [
        ("an operator counts as there although CANN lacks its function", "    return bool(libraries) and not has_it\n", "    return False\n", ("tests/startup/test_device_settings.py",)),
    ],
    "attention/backend.py": [
        ("metadata keeps the mask of another state", "self._plan(step.attn_state, num_input_tokens", "self._plan(type(step.attn_state)(0), num_input_tokens", ENGINE),
        ("npu: slots past the end", "slots = attn_metadata.slot_mapping[:num_tokens]", "slots = attn_metadata.slot_mapping[:num_tokens] + (1 << 20)", FIA),
        ("npu: slots of 64 bits", "slots = attn_metadata.slot_mapping[:num_tokens]", "slots = attn_metadata.slot_mapping[:num_tokens].long()", ATB),
        ("the mask of another group", "mask = masks.get(plan)", "mask = next(iter(masks.values()), None)", WINDOWS),
    ],
    "attention/device_block_tables.py": [
        ("real text: a preempted request comes back to the blocks of its row on the device", "super().add_row(block_ids, row_idx)\n        self.num_synced_blocks[:, row_idx] = 0\n", "super().add_row(block_ids, row_idx)\n        self.num_synced_blocks[:, row_idx] = np.minimum(self.num_device_blocks[:, row_idx], [len(ids) for ids in block_ids])\n", ("tests/attention/test_block_tables.py",)),
        ("async: sampled tokens of other rows", "self.previous_rows[:num_reqs] = self._rows[:num_reqs]", "self.previous_rows[:num_reqs] = 0", ENGINE),
        ("a row that is replaced is not sent again", "super().add_row(block_ids, row_idx)\n        self.num_synced_blocks[:, row_idx] = 0\n", "super().add_row(block_ids, row_idx)\n", CORE),
        ("rows that change places are not sent again", "super().swap_row(src, tgt)\n        self.num_synced_blocks[:, [src, tgt]] = 0\n", "super().swap_row(src, tgt)\n", CORE),
        ("what a dummy run left on the device is trusted", "super().commit_block_table(num_reqs)\n        self.forget()", "super().commit_block_table(num_reqs)", CORE),
        ("previous rows stay behind their requests", "self.previous_rows[tgt] = self.previous_rows[src]", "pass", CORE),
    ],
    "attention/prefill_context_parallel.py": [
        ("K and V gathered in the order of other ranks", "group.all_gather(tensor.contiguous(), dim=0) for", "group.all_gather(tensor.contiguous(), dim=0).roll(len(tensor), 0) for", PROMPT_TOKENS),
        ("rows of ranks read the first requests' blocks", "rows = device.native(staged.device.pcp_table_rows[:num_rows])", "rows = device.native(torch.arange(num_rows, dtype=torch.int32))", PROMPT_TOKENS),
    ],
    "attention/context_parallel.py": [
        ("contexts on several ranks: results are merged without weights", "weights = (lses - lse).exp()", "weights = (lses - lse).exp() * 0 + 1 / len(lses)", MERGED),
        ("contexts on several ranks: results are merged without weights on NPUs", 'return torch.where(lses == float("-inf"), 0.0, weights), lse', "return torch.full_like(weights, 1 / len(lses)), lse", ROWS_ON_NPU),
        ("contexts on several ranks: a rank without rows counts the one that it read", "    if lens_np.all():", "    if lens_np.any():", MERGED),
    ],
    "attention/families.py": [
        ("npu: flags where values are added", 'torch.float16: {MaskKind.MATRIX: float("-inf")', "torch.float16: {MaskKind.MATRIX: 1.0", ATB),
    ],
    "attention/gated_delta.py": [
        ("a draft leaves its state in the first block", "self._keep(blocks[tokens], last[left]", "self._keep(blocks[first[left]], last[left]", STATE_LAYERS),
        ("a request begins with the state that a block's last owner left", ".float().masked_fill_(empty.unsqueeze(-1), 0)", ".float()", STATE_LAYERS),
        ("the convolution begins with the inputs of a block's last owner", "last = inputs.index_select(0, source).masked_fill_(empty, 0)", "last = inputs.index_select(0, source)", STATE_LAYERS),
        ("a new state is written over the one that was read", "blocks = metadata.state_indices[rows].long()", "blocks = metadata.initial_state_indices[rows].long()", STATE_LAYERS),
        ("on NPUs the delta rule keeps what it derived of old weights", "            self.fused.weights.refresh(self._fused_weights())", "            self._fused_weights()", MORE_STATES_ON_NPU),
    ],
    "attention/kernels/atb.py": [
        ("npu: lengths on the device", "torch.from_numpy(metadata.seq_lens_np)", "metadata.seq_lens", ATB),
        ("npu: sequence lengths for query lengths", "seq_len=query_lens", "seq_len=seq_lens", ATB),
        ("npu: decode operator for chunks", "if state == AttentionState.DecodeOnly and metadata.sliding_window is None:", "if state != AttentionState.PrefillNoCache:", ATB),
        ("npu: decodes of atb see all, whatever their window", " and metadata.sliding_window is None", "", WINDOWS_ON_NPU),
        ("npu: encoders of atb see all, whatever their window", "masked_fill_(~near, value)", "masked_fill_(~near, 0)", WINDOWS_ON_NPU),
    ],
    "attention/kernels/fia.py": [
        ("npu: wrong keyword", '"atten_mask": metadata.attn_mask', '"attn_mask": metadata.attn_mask', FIA),
        ("npu: query lengths not cumulative", "metadata.query_start_loc_np[1:].tolist()", "metadata.query_lens.tolist()", FIA),
        ("npu: kv length off by one", "[1:].tolist(), metadata.seq_lens_np.tolist()", "[1:].tolist(), (metadata.seq_lens_np - 1).tolist()", FIA),
        ("npu: missing mask", '"atten_mask": metadata.attn_mask', '"atten_mask": None', FIA),
        ("npu: no causal mode", "CAUSAL_MODE = 3", "CAUSAL_MODE = 0", FIA),
        ("npu: fresh kv lengths not cumulative", "kv_lengths = part.query_ends", "kv_lengths = part.seq_lens", FIA),
        ("npu: paged kv lengths cumulative", "kv_lengths = part.seq_lens", "kv_lengths = part.query_ends", FIA),
        ("npu: transposed cache", "[plane.flatten(2) for plane in self._kv]", "[plane.transpose(2, 3).flatten(2) for plane in self._kv]", FIA),
        ("npu: a batch with too many blocks is one call", "taken + count > most_blocks", "False", ("tests/attention/test_fused_limits.py",)),
        ("npu: cache mode left to its default", ', cache_mode="Norm"', "", FIA),
        ("npu: wrong layout", '"input_layout": "TND"', '"input_layout": "BSND"', FIA),
        ("npu: no scale", '"scale": layer.scale,', "", FIA),
        ("npu: K and V change places", "key_cache, value_cache = self._planes(kv_cache)", "value_cache, key_cache = self._planes(kv_cache)", FIA),
        ("npu: null block for every request", '"block_table": table,', '"block_table": table * 0,', FIA),
        ("npu: query heads for K and V", '"num_key_value_heads": layer.num_kv_heads', '"num_key_value_heads": layer.num_heads', FIA),
        ("npu: window one too wide", '"pre_tokens": window - 1', '"pre_tokens": window', WINDOWS_ON_NPU),
        ("npu: windows of encoders reach back only", '"next_tockens": reach}', '"next_tockens": 0}', WINDOWS_ON_NPU),
    ],
    "attention/kernels/fused_delta.py": [
        ("rows of the convolution are those of another block", "alpha=self.rows_of_block)", "alpha=self.rows_of_block + 1)", STATES_ON_NPU),
        ("on NPUs a prompt begins with the state that a block's last owner left", "states.masked_fill_(rows.is_empty.unsqueeze(-1), 0)", "states.masked_fill_(rows.is_empty.unsqueeze(-1) & False, 0)", STATES_OF_DRAFTS),
        ("on NPUs the convolution begins with the inputs of a block's last owner", "self.rows.read(rows.to_read).masked_fill_(rows.is_empty, 0)", "self.rows.read(rows.to_read)", STATES_OF_DRAFTS),
        ("on NPUs accepted tokens are ignored: the first state is read", "kept = torch.minimum(metadata.num_accepted_tokens[reqs], counts)", "kept = torch.ones_like(counts)", STATES_OF_DRAFTS),
    ],
    "attention/kernels/latent.py": [
        ("heads of zeros stand before the layer's", "(0, 0, 0, missing)", "(0, 0, missing, 0)", ROWS_ON_NPU),
    ],
    "attention/kernels/latent_fia.py": [
        ("context chunks on NPUs are not merged", "        return Attended(output.view_as(first.output), lse.view_as(first.lse))\n", "        return first\n", ROWS_ON_NPU),
        ("context chunks on NPUs are merged as if all weighed the same", "[part.lse.reshape(-1) for part in parts]", "[part.lse.reshape(-1) * 0 for part in parts]", ROWS_ON_NPU),
        ("pieces on NPUs are read from the context's begin", "seq_offset=chunk.starts", "seq_offset=chunk.starts * 0", ROWS_ON_NPU),
        ("decodes on NPUs read latent rows past a request's length", '"actual_seq_kvlen": part.seq_lens', '"actual_seq_kvlen": [n + 1 for n in part.seq_lens]', ROWS_ON_NPU),
        ("npu: latent decodes with too many blocks are one call", "self.limits_batches and not", "False and not", ("tests/attention/test_fused_limits.py",)),
        ("joined heads on NPUs get keys that are not rotated", "torch.cat((key, key_rope), -1)", "torch.cat((key, 0 * key_rope), -1)", ROWS_ON_NPU),
    ],
    "attention/kernels/latent_reference.py": [
        ("a prompt in pieces is masked the other way round", "tokens[None], own[None], positions[None], False", "tokens[None], positions[None], own[None], False", ("tests/attention/test_latent.py",)),
        ("rotated halves of latent queries are not read", "heads = torch.cat((query, query_rope), -1)", "heads = torch.cat((query, query_rope * 0), -1)", LATENT),
        ("context chunks are added without their log-sum-exp", "return merge_partials([first, second])", "return Attended((first.output + second.output) / 2, first.lse)", LATENT),
        ("latent rows are read past a piece's length", "int(start) + int(length))", "int(start) + int(length) + 1)", LATENT),
    ],
    "attention/kernels/reference.py": [
        ("compressed mask off by one in chunks", "masked = lookup(ahead - next_tokens)", "masked = lookup(ahead - next_tokens - 1)", CORE),
        ("kv length off by one", "visible = (offsets < lengths[:, None])", "visible = (offsets < lengths[:, None] - 1)", CORE),
        ("V written from K", "zip(kv_cache, (key, value))", "zip(kv_cache, (key, key))", CORE),
        ("query heads grouped wrongly", "visible.repeat(1, 1, group, 1)", "visible.repeat_interleave(group, 2)", CORE),
        ("padding slots are written by the reference family", "real = slots >= 0\n", "real = slots >= -1\n", GRAPHS),
        ("windows of encoders reach back only", "(ahead <= -window) | (ahead >= window)", "ahead <= -window", CORE),
        ("cut queries of encoders read up to themselves", "return 0, behind if causal else seq_len", "return 0, behind", CORE),
        ("what windows have left behind is read, and masked", "return max(0, first_position - window + 1), end", "return 0, end", WINDOWS),
        ("one token before the window is read, and masked", "return max(0, first_position - window + 1), end", "return max(0, first_position - window), end", CORE),
    ],
    "attention/kernels/sparse_fia.py": [
        ("npu: blocks are taken for chosen tokens", "chosen.copy_(found.squeeze(1))", "chosen.copy_(found.squeeze(1) // plane.shape[1])", SPARSE_ON_NPU),
        ("npu: replays choose within the lengths of their capture", "actual_seq_lengths_key=metadata.seq_lens,", "actual_seq_lengths_key=torch.full_like(metadata.seq_lens, int(metadata.seq_lens_np.max())),", SPARSE_ON_NPU),
        ("npu: index keys of padding go to the last token's slot", "slot_mapping[: len(keys)].clamp_min(0)", "slot_mapping[: len(keys)]\n        slots = torch.where(slots < 0, slots.max(), slots)", ("tests/npu/on_device/test_sparse_operators.py",)),
        ("keys of padding have a slot below 0", "slot_mapping[: len(keys)].clamp_min(0)", "slot_mapping[: len(keys)]", ("tests/npu/on_device/test_sparse_operators.py",)),
    ],
    "attention/kernels/sparse.py": [
        ("a token chooses the position behind its own", "scores.masked_fill_(positions > own,", "scores.masked_fill_(positions > own + 1,", SPARSE),
        ("choosing takes more than is stated", "return max(keys + of_heads + scores, slots + PIECE_BYTES) + slots", "return slots", SPARSE),
        ("positions are chosen by another request's keys", "keys = rows[slots_of(metadata, request, positions,", "keys = rows[slots_of(metadata, 0, positions,", SPARSE),
        ("chosen rows of another request are read", "slots[rows] = slots_of(metadata, request, positions,", "slots[rows] = slots_of(metadata, 0, positions,", SPARSE),
        ("scores of index heads below 0 count", "@ keys).relu_()", "@ keys)", SPARSE),
        ("of equal scores the later position is chosen", "equal.cumsum(1, dtype=torch.int32) <= missing", "equal.flip(1).cumsum(1, dtype=torch.int32).flip(1) <= missing", SPARSE),
        ("a context of more than index_topk is seen whole", "if metadata.max_seq_len <= chosen.shape[1]:", "if metadata.max_seq_len:", SPARSE),
        ("scores that are not numbers choose nothing", "scores.nan_to_num_(nan=0.0)", "pass", SPARSE),
    ],
    "attention/sparse.py": [
        ("keys of indexers gathered in the order of other ranks", "gather_tokens((keys,)) if", "[gather_tokens((keys,))[0].roll(len(keys), 0)] if", (f"{SHARED_PROMPTS}[sparse]",)),
        ("decodes attend to what their prompts chose", "self.kernels.choose(*queries,", "if metadata.max_query_len > 1:\n            self.kernels.choose(*queries,", SPARSE_TOKENS),
        ("index keys go to the slots of other tokens", "self.kernels.write_keys(keys, plane, metadata)", "self.kernels.write_keys(keys.flip(0).contiguous(), plane, metadata)", SPARSE_TOKENS),
        ("index heads are rotated as a whole", '"rope_dim": self.rope_dim', '"rope_dim": self.head_dim', SPARSE_TOKENS),
        ("keys of indexers are not stored", "@maybe_transfer_kv_layer\n", "", ("tests/engine/test_kv_transfer.py::test_keys_of_indexers_are_stored_and_loaded[V2]",)),
    ],
    "attention/step_memory.py": [
        ("the bound of a step leaves out its largest layer", "return masks + max(working) + max(choosing)", "return masks - max(working) + max(choosing)", ("tests/device/test_cpu_memory.py",)),
    ],
    "attention/kv_cache.py": [
        ("encoders see all, whatever their window", "                sliding_window=layer.sliding_window,\n", "", POOLING),
        ("a state overlays another block's K", "first, second = buffer.view(2, -1, half)", "first, second = buffer.view(-1, 2, half).unbind(1)", ("tests/attention/test_kv_cache.py",)),
        ("latent rows overlay K and V", "(start, start + size, planes)", "(start, start + size, other_planes)", CORE),
        ("chunks for all layers of a group", 'WINDOWS = ("sliding_window", "attention_chunk_size")', 'WINDOWS = ("sliding_window",)', (f"{CHUNKS_ENGINE[0]}::test_tokens_equal_transformers[compressed-False-True]",)),
    ],
    "attention/kv_transfer.py": [
        ("K and V of stored blocks change places", "in zip(planes, rows.split", "in zip([*planes][::-1], rows.split", TRANSFER),
        ("stored blocks are loaded after the forward pass", '    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:\n', "    def start_load_kv(self, forward_context, **kwargs):\n        self.late = forward_context\n    def wait_for_save(self):\n        self.load_now(self.late)\n    def load_now(self, forward_context, **kwargs):\n", TRANSFER),
        ("preempted requests look for stored blocks", "if request.num_preemptions or ", "if ", TRANSFER),
        ("salted prompts are stored", "new for new in new_reqs if new.req_id not in self._salted", "new for new in new_reqs", TRANSFER),
        ("prompts count as stored once a layer is", "return all(os.path.exists(os.path.join(folder, name)) for name in self._files_of_prompt)", "return any(os.path.exists(os.path.join(folder, name)) for name in self._files_of_prompt)", TRANSFER),
        ("ranks store what they have under one name", 'f"{layer_name}.part{part}of{self._parts}"', 'f"{layer_name}.part0of{self._parts}"', TRANSFER),
        ("a prompt counts as stored once the first stage has stored it", "            for (_, part), names in layers.items()\n", "            for (stage, part), names in layers.items()\n            if stage == 0\n", (f"{TRANSFER[0]}::test_a_prompt_is_stored_once_all_stages_have_stored_it",)),
        ("a store is seen before it is whole", 'unfinished = f"{path}.{uuid.uuid4().hex}"', "unfinished = path", TRANSFER_ON_NPU),
        ("prompts are loaded one block too far on", "write_slots(self._planes(layer_name, cache), request.slot_mapping, stored)", "write_slots(\n                        self._planes(layer_name, cache),\n                        request.slot_mapping + self._block_size,\n                        stored,\n                    )", TRANSFER_ON_NPU),
    ],
    "attention/mooncake_store.py": [
        ("blocks of a pool are read before they arrive", "        super().start_load_kv(metadata)\n", "        super().start_load_kv(metadata)\n        for each in loads:\n            self.kv_recv_threads[0].set_finished_request(each.req_id)\n", (f"{POOL[0]}[K and V-V2]",)),
        ("a pool has planes of another layer", "cache, num_blocks = kv_caches[name], ", "cache, num_blocks = kv_caches[next(iter(kv_caches))], ", (f"{POOL[0]}[K and V-V2]",)),
        ("a pool has blocks of other requests", "set_kv_caches_base_addr([*nbytes])", "set_kv_caches_base_addr([at + n for at, n in nbytes.items()])", (f"{POOL[0]}[K and V-V2]",)),
        ("names in a pool do not tell dtypes apart", 'f"@planes:{hashlib.sha256(specs.encode()).hexdigest()[:16]}"', '""', ("tests/engine/test_mooncake_store.py::test_planes_of_another_form_are_not_found",)),
        ("threads of a pool do not wait for steps", "        self.end.synchronize()\n", "", ("tests/npu/on_device/test_mooncake_store.py",)),
        ("loads from a pool do not wait for steps", "            load.current_event.synchronize()\n", "            set_device(load.current_event.device)\n", ("tests/npu/on_device/test_mooncake_store.py::test_a_load_begins_after_what_was_issued_before_it",)),
        ("threads of a pool outlive its engine", "thread.request_queue.put(EndOfThread())", "pass", ("tests/engine/test_mooncake_store.py::test_planes_of_another_form_are_not_found",)),
    ],
    "attention/mooncake.py": [
        ("prompts over Mooncake are read before they arrive", "        unanswered = Unanswered(pull_metas)\n", "        unanswered = Unanswered(pull_metas)\n        self.finished_recving_reqs.update(pull_metas)\n", (f"{MOONCAKE[0]}[K and V-V2]",)),
        ("Mooncake moves blocks of other requests", "self.registered_group_indices.append(group)", "self.registered_group_indices.append(0)", (f"{MOONCAKE[0]}[windows-V2]",)),
        ("Mooncake moves planes of another layer", "cache = kv_caches[name]", "cache = kv_caches[next(iter(kv_caches))]", (f"{MOONCAKE[0]}[K and V-V2]",)),
        ("Mooncake leaves a part of each block out", "self.kv_block_len_per_layer = self.block_len_per_layer", "self.kv_block_len_per_layer = [n * 3 // 4 for n in self.block_len_per_layer]", REGIONS),
        ("ranks of other numbers get contiguous parts of blocks", "return self._by_token(local), self._by_token(remote), None", "return local, remote, None", REGIONS),
        ("blocks are given up while another rank writes to them", "if meta.pull_tasks_count <= 0:", "if True:", REGIONS),
        ("a dead producer fails what has arrived", "            pull_metas.pop(req_id, None)", "            pull_metas.get(req_id, None)", REGIONS),
        ("what a producer gave up is waited for", "self._handle_failed_recv(unanswered, list(unanswered), reason)", "pass", REGIONS),
        ("blocks of a stalled transfer go to others", "kept = unanswered.blocks()", "kept = list[int]()", STALLED),
        ("prompts are computed again where a stalled producer writes", "        self._is_hma_required = True\n", "", STALLED),
        ("blocks of a stalled transfer never come back", "self._kept.put(KeptBlocks([], kept))", "pass", STALLED),
        ("what a stalled producer says late is not heard", "self.async_zmq_ctx = PatientContext()", "self.async_zmq_ctx = zmq.asyncio.Context()", STALLED),
        ("blocks of a stalled transfer are kept once for each look", "elif unanswered and time", "elif time", REGIONS),
        ("planes of another dtype are taken", 'f"{name}{DTYPE}{dtype}"', 'f"{name}{DTYPE}any dtype"', REGIONS),
        ("a decoder computes a token without its window", "self._bounded_replay |= any(", "self._bounded_replay |= False and any(", (f"{MOONCAKE[0]}[windows-V2]",)),
    ],
    "attention/latent.py": [
        ("prefills begin with the step's first token", "prefills = Prefills(\n        first_token,", "prefills = Prefills(\n        0,", LATENT),
    ],
    "attention/layers.py": [
        ("layers of other classes than the known ones are served", "kind not in COMPUTED and not _is_ours(kind)", "False", ("tests/attention/test_layers.py",)),
        ("attention that no kernel has is left out", "        if getattr(config, name):\n", "        if False:\n", ("tests/attention/test_layers.py",)),
    ],
    "attention/local_block_tables.py": [
        ("layers with chunks keep vLLM's backend", "layer.attn_backend, layer.impl", "_, layer.impl", (f"{CHUNKS_ENGINE[0]}::test_graphs_keep_the_tokens",)),
    ],
    "attention/mask_cache.py": [
        ("a token sees the one after it", "self._compressed = ones.triu_(1)", "self._compressed = ones.triu_(2)", MASKS),
        ("rows of the device mask by index, not by position", "index_select(0, positions)", "index_select(0, torch.arange(len(positions)))", CORE),
        ("mask cache changes a matrix in flight", "        matrix = self._matrices.get((sliding_window, value))\n", "        matrix = self._matrices.get((sliding_window, value))\n        _ = matrix.zero_() if matrix is not None else None\n", CORE),
        ("npu: wrong dtype of the constant mask", "torch.ones(size, size, dtype=torch.int8", "torch.ones(size, size, dtype=torch.float32", FIA),
        ("npu: dense mask with strides", ".contiguous()", "", ATB),
        ("mask rows of positions in a request for chunks", "positions = positions % plan.attention_chunk_size", "positions = positions.clamp(max=plan.attention_chunk_size - 1)", MASKS),
    ],
    "attention/metadata.py": [
        ("attention in a full graph sees real tokens only", "self.num_input_tokens if self.in_full_graph else self.num_actual_tokens", "self.num_actual_tokens", GRAPHS),
    ],
    "attention/mla.py": [
        ("MLA layers cut off what graphs pad", '        """Tokens that the layer hands over: all."""\n        return self.step.num_input_tokens\n', "        return self.step.num_actual_tokens\n", ("tests/attention/test_mla.py",)),
    ],
    "attention/offloading.py": [
        ("blocks within a chunk of the host count from its beginning", "skipped = first % size", "skipped = 0", OFFLOADING),
        ("of a group only the first plane goes to the host", "groups.append(list(of_group.values()))", "groups.append(list(of_group.values())[:1])", OFFLOADING),
    ],
    "attention/recurrent_backend.py": [
        ("states stay behind when decodes enter another block", "            if has_state[row]:", "            if has_state[row] and old == new:", STATES_ON_NPU),
        ("no state is moved before the operator that writes where it reads", "if self._moves and states.num_decodes:", "if False and states.num_decodes:", STATES_ON_NPU),
    ],
    "compat/activation.py": [
        ("groups can't be cleaned up before general plugins are loaded", "            silence_accelerator_calls()\n", "            pass\n", ("tests/startup/test_start_up.py",)),
    ],
    "compat/entrypoints.py": [
        ("a server reads an adapter's folder for each request once it was loaded in place", "self.lora_requests[request.lora_name] = once(adapter)", "pass", ("tests/server/test_server.py",)),
    ],
    "compat/eplb.py": [
        ("npu: on V1, an exchange of experts waits for events that misread its stream", "getattr(torch, device.type).Stream(device=device)", "torch.Stream(device=device)", ("tests/npu/on_device/test_eplb.py::test_tokens_are_the_best_by_transformers_whatever_moves[engines, V1]",)),
    ],
    "compat/executor.py": [
        ("answers of ranks to a call that failed are taken for those to the next", "        while self.due:\n", "        self.due = 1\n        while self.due:\n", TWO_RANKS),
        ("who waits for another host is not woken", "                if self.shutting_down:\n", "                if False:\n", ("tests/startup/test_ray_cluster.py",)),
        ("other hosts get this one's devices", 'update(("ASCEND_RT_VISIBLE_DEVICES", "HCCL_IF_IP"))', 'update(("HCCL_IF_IP",))', ("tests/startup/test_ray_cluster.py",)),
    ],
    "compat/kv_connector.py": [
        ("the host gives blocks of an adapter's old weights", "        group.offload_keys.clear()\n", "        pass\n", ("tests/soak/test_engines.py",)),
        ("sessions are served beside offloading, which ends the engine", 'if offloads and settings.get("resumable"):', "if False:", ("tests/engine/test_offloading.py",)),
    ],
    "compat/lora.py": [
        ("an adapter that a request exchanges is read in every step", "                request.lora_request = once(adapter)\n", "                request.lora_request = adapter\n", V2_LORA),
        ("blocks of an adapter's old weights are found after it was exchanged", '(*key, load_of(request) or "")', "key", V2_LORA),
        ("a request goes on with keys and values of an adapter's old weights", "            and load_of(request) != self._held.get(request.lora_request.lora_int_id)\n", "            and False\n", V2_LORA),
        ("a layer that a model holds by two names has adapters by one", "                    setattr(owner, name, of_layer[child])", "                    pass", EXPERT_ADAPTERS),
        ("an adapter that is read has one go that is in use", "self._load([*self._in_use.values(), adapter])", "self._load([adapter])", ("tests/runner/test_lora.py",)),
        ("an adapter that can't be read ends the engine", "            self.refuse(request, error)\n", "            raise\n", V2_LORA),
        ("what is held of an adapter changes with its file", "            if not value.is_pinned():", "            if False:", V2_LORA),
    ],
    "compat/models.py": [
        ("layers are looked at after their weights were loaded", "        check(model, vllm_config)\n", "", ("tests/attention/test_layers.py",)),
    ],
    "compat/multimodal.py": [
        ("pixels that the prefix cache made needless never come", "        if items:\n            found[req_id] = items", "        if not items:\n            found[req_id] = items", ("tests/engine/test_multimodal.py::test_the_prefix_cache_knows_images_by_what_they_show",)),
        ("a client takes images of refused requests for sent", "        mm_item[0].entry = Entry(*mm_item)\n", "        self.cache_if_fits(self._cache, mm_hash, Entry(*mm_item))\n", ("tests/engine/test_multimodal.py::test_a_request_preempted_within_an_image_comes_back",)),
        ("a client's cache evicts in the order of processing", "entry = cachetools.Cache.__getitem__(entries, mm_hash)", "entry = entries[mm_hash]", ("tests/engine/test_multimodal.py::test_a_clients_cache_has_what_the_engines_has",)),
        ("handles of refused requests hold shared memory", "                references[number] -= 1\n", "                references[number] -= 0\n", ("tests/engine/test_multimodal.py::test_a_handle_that_is_not_sent_holds_no_shared_memory",)),
        ("a request that the engine refuses is waited for", "            self.abort_request(added, internal=True)\n", "            self.abort_request(added[:0], internal=True)\n", ("tests/engine/test_multimodal.py::test_a_request_preempted_within_an_image_comes_back",)),
        ("blocks of embeddings whatever the mask of token ids", "        if not keys or is_token_ids is None:", "        if True:", ("tests/engine/test_prompt_embeds.py::test_a_prompt_of_ids_and_embeddings",)),
    ],
    "compat/processes.py": [
        ("an engine or a rank that ends collects garbage among all its objects", "gc.unfreeze = gc.freeze", "gc.collect()", SERVERS),
    ],
    "compat/releases.py": [
        ("a release of vLLM has the rules of the one before", ">= _numbers(release)", "> _numbers(release)", ("tests/test_releases.py",)),
        ("a step in flight samples no token of a request that drafts", "num_output_tokens + 1 + in_flight", "num_output_tokens + 1", ("tests/test_releases.py",)),
        ("drafts are left out though some request needs them", "step.skip_drafts = not any(", "step.skip_drafts = not all(", ("tests/test_releases.py",)),
        ("a connector is told that drafts are needed which are not", "output.num_scheduled_tokens[each] if entered else 0", "output.num_scheduled_tokens[each]", ("tests/test_releases.py",)),
        ("nobody is told with which torch a release was tested", "    pinned = OTHER_TORCH.get(version)\n", "    pinned = None\n", ("tests/test_releases.py", "tests/inspect/test_doctor.py")),
    ],
    "compat/scheduler.py": [
        ("drafts beyond the end of a session's answer count as computed", "session.num_computed_tokens = min(session.num_computed_tokens, kept)", "pass", ("tests/engine/test_sessions.py",)),
        ("a session's next part cuts a prompt whose answer never began", "max(session.num_tokens - 1, session.num_prompt_tokens)", "session.num_tokens - 1", ("tests/scheduling/test_outputs.py",)),
        ("a session is taken for one whose answer has ended", 'getattr(session, "begins_anew", False)', "session.begins_anew", ("tests/scheduling/test_outputs.py",)),
        ("a session goes on with the states that a step in flight has left", "self.has_mamba_layers and beyond", "False", ("tests/engine/test_sessions.py",)),
        ("a session goes on with the states that drafts have left", "request.num_in_flight_tokens > 0 or self.num_spec_tokens > 0", "request.num_in_flight_tokens > 0", ("tests/engine/test_sessions.py",)),
        ("a session that begins anew keeps its blocks", "    scheduler._free_request_blocks(request)\n", "    pass\n", ("tests/engine/test_sessions.py",)),
        ("the step does not tell that a session began anew", "    scheduler.reset_preempted_req_ids.add(request.request_id)", "    pass", ("tests/engine/test_sessions.py",)),
    ],
    "compat/torch.py": [
        ("npu: asynchronous output recorded on no event", "names.update(self._stand_ins)", 'names.update(self._stand_ins | {"Event": NoOpEvent})', FIA),
    ],
    "compat/v2.py": [
        ("V1's reasons overrule who chose V2", "is_open = envs.VLLM_USE_V2_MODEL_RUNNER is None and", "is_open =", ("tests/startup/test_refusals.py",)),
        ("an engine has V2 whatever V1 alone has", "        return not (is_open and platform.reason_for_v1(self)) and upstream(self)\n", "        return upstream(self)\n", ("tests/startup/test_start_up.py",)),
    ],
    "config.py": [
        ("dense masks beyond the budget are taken", "fits = dense_bytes <= config.mask_budget_bytes", "fits = True", ("tests/test_config.py",)),
    ],
    "device/__init__.py": [
        ("pinned memory counts as asked for, not as rounded", "    return 1 << (nbytes - 1).bit_length()\n", "    return nbytes\n", ("tests/startup/test_device_settings.py",)),
    ],
    "device/communicator.py": [
        ("experts get tokens of ranks that share prompts in the order of other ranks", "return group.all_gather(hidden_states, dim=0), ", "return group.all_gather(hidden_states, dim=0).roll(len(hidden_states), 0), ", (f"{SHARED_PROMPTS}[int8, experts]",)),
        ("padding of other ranks reaches experts", "group.all_gatherv(mine.view(torch.uint8), dim=0", "group.all_gatherv(torch.zeros_like(mine, dtype=torch.uint8), dim=0", ("tests/ops/test_experts.py",)),
        ("a rank tells the others of as many tokens as the first one has", "context.is_padding, sizes[group.rank_in_group]", "context.is_padding, sizes[0]", ("tests/ops/test_experts.py",)),
        ("MC2: a rank has the mask of another rank's tokens", "start = get_tensor_model_parallel_rank() * num_tokens", "start = 0 * num_tokens", MC2),
        ("MC2: padding goes to experts, and tokens don't", "active = context.is_padding.logical_not()", "active = context.is_padding", MC2),
        ("MC2: tokens that fill up a step count as tokens", "(0, most - num_tokens), value=True)", "(0, most - num_tokens), value=False)", MC2),
        ("MC2: without a mask, all tokens have experts", "elif num_tokens < most:", "elif False:", MC2),
        ("MC2: a token is combined twice", "if MC2 in get_forward_context().additional_kwargs:  # experts", "if False:  # experts", MC2),
        ("MC2: a rank keeps as many results as the first one has", "hidden_states[: sizes[group.rank_in_group]]", "hidden_states[: sizes[0]]", MC2),
        ("MC2: ranks choose by their own tokens", "(most := max(sizes)) <= self.mc2.max_tokens:", "(most := max(sizes)) and len(hidden_states) <= self.mc2.max_tokens:", MC2),
    ],
    "device/failures.py": [
        ("a step without memory ends in torch's words", "if isinstance(error, torch.OutOfMemoryError):", "if isinstance(error, MemoryError):", FAULTS),
        ("ranks that disagree are told as a rank that was lost", "\\[\\S*gloo", "\\[.*gloo", FAILURES),
    ],
    "device/mc2.py": [
        ("MC2: an uneven number of experts is taken", "        sizes.experts % num_ranks\n        or sizes", "        sizes", MC2),
        ("MC2: a buffer holds a token too many", "return max(0, (buffer - (one - each)) // each)", "return max(0, (buffer - (one - each)) // each + 1)", MC2),
        ("MC2: A2 exchanges with few ranks by itself", "num_ranks >= fewest and", "num_ranks >= 2 and", MC2),
        ("MC2: a rank does no work while it waits for others to join", '    dist.all_reduce(torch.zeros(1, device="npu"), group=group)\n', "", MC2_LAYER),
        ("MC2: CANN 8.5 takes what 9.1 takes", "return A2_8_5 if cann is not None and cann < (9, 0) else A2", "return A2", MC2),
    ],
    "device/npu.py": [
        ("npu: copy on a stream of its own", "            target[:nbytes].copy_(", "            with torch_npu.npu.stream(torch_npu.npu.Stream()): target[:nbytes].copy_(", FIA),
        ("npu: asynchronous output waits for the wrong stream", "current_stream=torch_npu.npu.current_stream", "current_stream=torch_npu.npu.Stream", FIA),
        ("a load that counts as done when it is issued", "            end.record()\n        return end", "        return end", OFFLOADING_ON_NPU),
        ("a store that does not wait for the step that writes", "self._stream.wait_stream(torch_npu.npu.current_stream())", "pass", ("tests/npu/on_device/test_offloading.py::test_copies_begin_after_what_was_issued_before_them",)),
        ("graphs are captured with a task queue of level 2", "torch_npu.npu.set_task_queue_enable(1)", "pass", ("tests/npu/on_device/test_graphs.py::test_graphs_are_captured_with_a_task_queue_of_level_1",)),
    ],
    "device/npu_regions.py": [
        ("NPU memory is mapped again with whatever is in it", "self.data.zero_()  # what", "pass  # what", ("tests/npu/on_device/test_sleep.py::test_memory_that_comes_back_is_zero",)),
        ("pieces of a region that were mapped are kept when one has no memory", "                self._unmap()\n                refuse_to_wake", "                refuse_to_wake", ("tests/npu/on_device/test_sleep.py::test_a_region_is_one_range_of_several_pieces",)),
    ],
    "device/regions.py": [
        ("caches are mapped again with their old content", "self._pages.madvise(mmap.MADV_DONTNEED)\n        self.is_mapped = False", "self.is_mapped = False", ("tests/device/test_sleep.py",)),
        ("weights that were written in part count as kept", "rest = rest[os.write(file.fileno(), rest) :]", "rest = rest[os.write(file.fileno(), rest) * 0 + len(rest) :]", ("tests/device/test_sleep.py",)),
        ("weights that were read back in part count as awake", "        if rest:\n", "        if False:\n", ("tests/device/test_sleep.py",)),
    ],
    "device/staging.py": [
        ("async: sampled tokens are not scattered", "        if last_samples is not None:  #", "        if False:  #", ENGINE),
        ("copy ends before the logits indices", "self.submit(nbytes)", "self.submit(nbytes - step.layout.max_logits * 8)", ENGINE),
        ("npu: stale block table", "        if num_changes:  #", "        if False:  #", FIA),
        ("npu: staging buffer reused while its copy is in flight", "        if buffer.event is not None:\n", "        if False:\n", ("tests/npu/on_device/test_staging.py",)),
        ("npu: two copies a step", "        self.submit(nbytes)\n", "        self.submit(nbytes)\n        self.submit(nbytes)\n", COUNTS),
    ],
    "graph/modes.py": [
        ("the largest decode off the grid", "if largest not in sizes:", "if False:", GRAPHS),
        ("full graphs around layers that a connector saves", "if transfer is not None and transfer.kv", "if False and transfer.kv", TRANSFER),
        ("full graphs are replayed with waits for each launch", "    if waits_for_launches(device_type):\n", "    if False:\n", ("tests/graph/test_config.py",)),
        ("graphs of A3 are planned with more streams whatever the driver", "    has_queues = driver_key(driver) is not None and not is_older(driver, QUEUES)\n", "    has_queues = True\n", ("tests/graph/test_config.py",)),
    ],
    "graph/counts.py": [
        ("eager steps are not told from replays", "if padding.mode in REPLAYED:", "if True:", GRAPHS),
    ],
    "graph/fake_graph.py": [
        ("what graphs read past a rank's share goes unchecked", "        _check_rank_padding(step, staged)\n", "", ("tests/graph/test_fake_graph.py",)),
        ("every size runs at capture", "if not 0 < num_tokens <= self.num_tokens or not has_rows:", "if True:", ("tests/graph/test_fake_graph.py",)),
        ("moved inputs are overlooked", "if places != self.places:", "if False:", GRAPHS),
        ("results stay where they were made", "home if home is result else home.copy_(result)", "result", GRAPHS),
        ("MLA layers' inputs of a graph go unchecked", 'getattr(metadata, "step", metadata)', "metadata", ("tests/graph/test_fake_graph.py",)),
    ],
    "graph/npu.py": [
        ("npu: attention is not told the step's lengths", "                call(metadata)\n", "", FIA),
        ("npu: lengths told behind nothing", "            self._update_stream.wait_event(self._replayed)\n", "", FIA),
        ("npu: no event behind a replay", "                self._replayed.record(stream)\n", "                pass\n", FIA),
        ("npu: replays that don't wait for their lengths", "            event.wait(stream)\n", "", FIA),
    ],
    "inspect/page.py": [
        ("a page traces tokens to the first group's slots only", "[step.slot_mapping[table] for table in view.tables.values()]", "[step.slot_mapping[0] for table in view.tables.values()]", PAGES),
    ],
    "inspect/run.js": [
        ("Shift and an arrow key go one step on the page of a run", "ArrowRight: event.shiftKey ? 10 : 1,", "ArrowRight: 1,", RUN_KEYS),
        ("Enter on the page of a run opens another rank's step", "const page = ranks[view.rank].pageOf(view.step);\n    if (page) location", "const page = ranks[0].pageOf(view.step);\n    if (page) location", RUN_KEYS),
    ],
    "inspect/run.py": [
        ("rejected drafts are shown as accepted", "_digit(span.drafts - rejected)", "_digit(rejected)", RUN_PAGES),
        ("requests of before the record are shown as prefix hits", "(span is None and begins)", "span is None", RUN_PAGES),
        ("a block that requests share is counted for each", "return int(np.count_nonzero(marks[1:]))", "return int(np.count_nonzero(ids))", RUN_PAGES),
    ],
    "inspect/run_page.py": [
        ("the data of a run's page may end its element", 'for c in "<>&\\u2028\\u2029"', 'for c in "&"', RUN_PAGES),
    ],
    "inspect/run_steps.py": [
        ("the page of a run links to one step too few", "if first <= run.numbers[index] < end]", "if first <= run.numbers[index] < end - 1]", RUN_KEYS),
        ("the page of a step leads back to another", "pages[at - 1], pages[at + 1])", "pages[at + 1], pages[at - 1])", RUN_KEYS),
    ],
    "inspect/texts.py": [
        ("words of the last step's rows stand for tokens that the host did not know", 'known &= ~record.prepared["is_on_device"].astype(bool)', "pass", ("tests/inspect/test_explain_record.py",)),
        ("the model's tokenizer counts for more than the one beside the records", "        if not file.exists():\n", "        if True:\n", ("tests/inspect/test_explain_record.py", "tests/examples/test_smollm2_steps.py")),
    ],
    "inspect/view.py": [
        ("explain names the last request that a rule holds for", "row = int(rows[0])", "row = int(rows[-1])", PAGES),
    ],
    "observe/check.py": [
        ("a message about states reads the row of the batch, where V2 keeps requests elsewhere", "at.tables.block_table(at.group)[at.row]", "at.tables.block_table(at.group)[at.req]", MESSAGES),
        ("a message about states names the block behind the right one", "row[state_column(first, token, *sizes)]", "row[state_column(first, token, *sizes) + 1]", MESSAGES),
        ("the cheap check leaves out states where the pass that wrote the step found nothing", "step.rule == Rule.HOLDS and not shape.local.groups and not shape.states.groups", "step.rule == Rule.HOLDS and not shape.local.groups", MESSAGES),
        ("a fault in a dummy run on V2 is a traceback until a request came", "runner.input_batch.req_ids if step.num_reqs else []", "runner.input_batch.req_ids", MESSAGES),
    ],
    "observe/choices.py": [
        ("a choice that cannot be right is not named", "wrong_choice(of_tokens, positions) if self.check else None", "None", (f"{SPARSE_ENGINE}the_full_check_names_a_choice_that_cannot_be_right",)),
        ("choices of one layer are recorded for all", "self._seen[layer] = of_tokens.copy()", "self._seen[layer] = self._seen.get(self.layers[0], of_tokens.copy())", CHOICES),
    ],
    "observe/ledger.py": [
        ("the ledger takes the scheduler's count for one before drafts are verified", "told = min(told, request.certain - 1 + num_kept)", "pass", SPECULATION),
        ("the check takes a state that the host brought for what its block held before", "            self.states[block] = expected\n", "            self.states.setdefault(block, expected)\n", OFFLOADING),
        ("any state that was written once may be read", "if self.states.get(block) == expected:", "if block in self.states:", CHECKS_OF_STATES),
        ("K and V leave the state that was in their block", "            self.states.pop(block, None)\n            self.writers[block] = req_id\n", "            self.writers[block] = req_id\n", CHECKS_OF_STATES),
        ("a state that is another request's, too, may be written", "others = [other for other in owners.get(block, {}) if other != req_id]", "others: list[str] = []", CHECKS_OF_STATES),
        ("the ledger doesn't see that an adapter was loaded anew", "if request.adapter and (load := self.owned.load_of(request.adapter)) != request.load:", "if False:", CHECKS),
    ],
    "observe/ledger_owners.py": [
        ("what a request of V2 had generated is unknown after a preemption", "[*prompt, *(new.prefill_token_ids or ())[length:]]", "[*prompt]", ("tests/engine/test_full_check.py::test_what_a_preempted_request_had_generated_is_known",)),
        ("preempted requests keep their blocks in the ledger", "        for req_id in output.preempted_req_ids or ():\n            self._release(req_id)\n", "", CHECKS),
        ("a block that was given back is nobody's", "            self.freed.update(dict.fromkeys(blocks, req_id))\n", "", CHECKS),
        ("V2: the ledger forgets which blocks a preempted request had", "arrived.former = before.former", "pass", ("tests/engine/test_full_check.py",)),
    ],
    "observe/metrics.py": [
        ("metrics count padding as tokens", "counts[self._tokens] += num_tokens", "counts[self._tokens] += step.padding.num_input_tokens", ("tests/inspect/test_metrics.py",)),
        ("an engine that has ended keeps the files of its metrics open", "            file.close()\n        self._files = {}", "            pass", ("tests/inspect/test_metrics.py",)),
    ],
    "observe/recorder.py": [
        ("two engines name a request in two ways", "transfer = self._transfers.get(req_id)", "transfer = None", ("tests/inspect/test_run_page.py::test_two_engines_are_on_one_page",)),
        ("samples that come after their step was written are lost", "            if number <= self._last_written:\n                self._write_sampled(", "            if number <= self._last_written:\n                str(", RECORDS),
        ("records name the requests of the first step", "if req_ids != self._req_ids:", "if not self._req_ids:", (*RECORDS, "tests/engine/test_record.py")),
        ("a record has the waits of all steps before it", "            self._waits = waits\n", "", RUN_PAGES),
        ("a full disk is told as an exception of the code", "        except PrepError as error:\n            self._stop(str(error))", "        except KeyError as error:\n            self._stop(str(error))", ("tests/inspect/test_recorder.py",)),
    ],
    "observe/step_snapshot.py": [
        ("records have the block tables of before the ring", "block_table_flat[indices[entry]] = staged[first + entry]", "pass", RECORDS),
    ],
    "observe/watched_output.py": [
        ("who waits for an output in vain tells nobody", "self._tell(error)", "pass", ("tests/runner/test_outputs.py",)),
    ],
    "ops/moe_method.py": [
        ("scales stay where their experts were", 'if name.startswith(("w13_", "w2_")) and parameter.numel()', 'if name in ("w13_weight", "w2_weight")', (f"{MOVING}scales_move_with_their_weights[W8A8]",)),
        ("padding works on the first experts", "end = elsewhere", "end = 0", ("tests/ops/test_experts.py",)),
        ("an expert gets the adapters of its neighbour", "weight[expert if len(weight) > 1 else 0]", "weight[(expert + 1) % len(weight)]", EXPERT_ADAPTERS),
        ("experts multiply for adapters that no row of the step has", "is not None and self.adapters.is_active else None", "is not None else None", EXPERT_ADAPTERS_ON_NPU),
        ("experts of other ranks are taken for the last one here", "torch.where(experts < 0, experts, expert_map.long()[experts.clamp(min=0)])", "expert_map.long()[experts] % num_local_experts", ("tests/ops/test_experts.py",)),
    ],
    "ops/moe_lora.py": [
        ("rows of an expert get the sum of all adapters", "shrunk.masked_fill_(foreign, 0).flatten(1)", "shrunk.flatten(1)", EXPERT_ADAPTERS),
        ("an adapter of experts stays in the slot of another", "class FusedMoEWithLoRA(upstream.FusedMoEWithLoRA):\n", "class FusedMoEWithLoRA(upstream.FusedMoEWithLoRA):\n    def reset_lora(self, index: int) -> None: ...\n\n", EXPERT_ADAPTERS),
        ("updates of gates and ups are exchanged", "torch.cat(updates, 1)", "torch.cat(updates[::-1], 1)", EXPERT_ADAPTERS),
        ("an adapter of experts that lacks some is given a slot", "            if found and lacking:\n", "            if False:\n", EXPERT_ADAPTERS),
        ("a rank adds its part of an update where another one's belongs", "            start = self.layer.tp_rank * b.shape[-2]\n", "", EXPERT_ADAPTERS),
    ],
    "ops/moe_topk.py": [
        ("a bias weighs the experts that it chooses", "weights = scores.gather(1, chosen)", "weights = choice.gather(1, chosen)", ("tests/ops/test_experts.py",)),
    ],
    "ops/npu/activations.py": [
        ("GeGLU activates the other half", "activate_left=True", "activate_left=False", FUSED),
    ],
    "ops/npu/experts.py": [
        ("MC2: results come back unweighed", "        topk_weights.float(),\n", "        torch.ones_like(topk_weights).float(),\n", MC2_LAYER),
        ("MC2: weights of inputs are applied to results, too", "        topk_weights = torch.ones_like(topk_weights)\n", "", MC2_LAYER),
        ("MC2: padding is sent to experts", "\"x_active_mask\": ranks.active", "\"x_active_mask\": None", MC2_LAYER),
        ("pairs without a row read the second one", "row_of_pair.bitwise_and(PAST_ANY_ROW)", "row_of_pair.abs()", EXPERTS),
        ("a sum that knows pairs without a row reads one for them", "expanded_src_to_dst_row=row_of_pair,", "expanded_src_to_dst_row=row_of_pair.abs(),", EXPERTS),
        ("rows of float16 are added in float16", "return dtype in FINALIZED and hidden_size", "return hidden_size", EXPERTS),
        ("on NPUs, rows of an expert have the masks of tokens", "foreign = _route(masks, ids, owned)[0].view(torch.bool)[..., None]", "foreign = masks.repeat_interleave(ids.shape[1], 0).view(torch.bool)[..., None]", EXPERT_ADAPTERS_ON_NPU),
        ("on NPUs, adapters multiply rows that were rounded", "plain = _route(x, ids, owned)[0] if is_quantised else values", "plain = values", EXPERT_ADAPTERS_ON_NPU),
        ("the group list is off by one expert", "group_list=rows.group_list,", "group_list=rows.group_list.roll(1),", EXPERTS),
        ("the sum takes the weights of a token's experts the wrong way round", "None if apply_router_weight_on_input else topk_weights\n", "None if apply_router_weight_on_input else topk_weights.flip(1)\n", EXPERTS),
        ("gate and up are exchanged", "grouped_product(rows, self.layer.w13_weight.transpose(1, 2))", "grouped_product(rows, torch.cat(self.layer.w13_weight.chunk(2, 1)[::-1], 1).transpose(1, 2))", EXPERTS),
        ("shared experts are added as they are", "torch.addcmul(routed, shared, gate.sigmoid())", "torch.addcmul(routed, shared, torch.ones_like(gate))", EXPERTS),
        ("a rank computes its neighbour's experts", "return cls(num_experts, start, start + count)", "return cls(num_experts, max(start - 1, 0), max(start - 1, 0) + count)", EXPERTS),
        ("scattered experts keep their numbers", "return topk_ids if self.numbers is None else self.numbers[topk_ids]", "return topk_ids", EXPERTS),
    ],
    "ops/npu/latent.py": [
        ("padding of compiled draft passes counts as prefills", "    if seen < len(q):", "    if seen < 0:", SPARSE_ON_NPU),
        ("latent weights are copied in every step", "weight.data = weight.data.contiguous()", "weight.data = weight.data", ("tests/npu/on_device/test_latent.py",)),
        ("keys of fused latent layers are not rotated", "        output = self._attend(query, query_rope, latent, key_rope)\n", "        output = self._attend(query, query_rope, latent, k_pe.unsqueeze(1))\n", SPARSE_ON_NPU),
    ],
    "ops/npu/norms.py": [
        ("a norm without its epsilon", "    if first is None:\n        return operator(x, weight, epsilon)[0]", "    if first is None:\n        return operator(x, weight, 0.0)[0]", FUSED),
        ("a residual that is not updated", "    return output, total\n", "    return output, x_residual\n", FUSED),
        ("heads of a slice one place further", "[:, first : first + heads]", "[:, first - 1 : first - 1 + heads]", FUSED),
    ],
    "ops/npu/projection.py": [
        ("int8 projections are grouped like those of 16 bits", "            and self.params_dtype in (torch.float16", "            or self.params_dtype in (torch.float16", ("tests/npu/on_device/test_quantization.py::test_a_dense_layer_takes_two_launches_more",)),
    ],
    "ops/npu/rotary.py": [
        ("rotary pairs of the other form", '"half" if is_neox_style else "interleave"', '"interleave" if is_neox_style else "half"', FUSED),
        ("the operator rotates more heads than an older CANN holds", "return most is not None and math.prod(query.shape[1:]) > most", "return False", FUSED),
        ("sections in turn go to a CANN that does not know them", "        self._merges |= self.mrope_interleaved and is_missing(MROPE_V2)\n", "", FUSED),
    ],
    "ops/npu/router_norms.py": [
        ("routers in float32 read the residual", "return CastRows(values, cast), total", "return CastRows(values, total.float()), total", ("tests/npu/on_device/test_fused.py::test_a_router_in_float32_gets_the_rows_of_the_norm",)),
    ],
    "ops/npu/routing.py": [
        ("groups of experts are counted as they are", "padded = number * -(-size", "padded = number + -(-size", ("tests/ops/test_experts.py",)),
        ("padding reaches an expert", "ids.masked_fill_(is_padding[:, None], NO_EXPERT)", "ids.masked_fill_(is_padding[:, None], 0)", EXPERTS),
        ("padding whose weights are taken away reaches an expert", "limits[0].masked_fill_(is_padding[:, None], NO_EXPERT)", "limits[0].masked_fill_(is_padding[:, None], 0)", EXPERTS),
        ("padding keeps its weights where the sum relies on zeros", "limits[1].masked_fill_(is_padding[:, None], 0)", "limits[1].masked_fill_(is_padding[:, None], ANY)", EXPERTS),
    ],
    "ops/triton/drafting.py": [
        ("drafts go on behind the context's end", "exceeds_max = clamped_positions >= max_model_len", "exceeds_max = clamped_positions > max_model_len", DRAFTING),
        ("requests without drafts have a rejected one", "has_drafts = num_drafts.clamp(max=1)", "has_drafts = torch.ones_like(num_drafts)", DRAFTING),
        ("samples of discarded requests count", "    is_valid.masked_fill_(discard_request_mask[:num_reqs, None], False)\n", "", DRAFTING),
        ("the sample counts as drafted in parallel", "torch.logical_and(offsets > 0,", "torch.logical_and(offsets >= 0,", DRAFTING),
        ("drafters go on from a rejected token's hidden state", "num_rejected_tokens, out=last_tokens)", "0 * num_rejected_tokens, out=last_tokens)", MTP),
        ("drafters go on from the token before the last one", "torch.gather(choices, 1, last_valid, out", "torch.gather(choices, 1, (last_valid - 1).clamp(min=0), out", MTP),
        ("later draft passes stay at the first one's positions", "torch.add(positions[:batch_size], 1, out", "torch.add(positions[:batch_size], 0, out", MTP),
        ("later draft passes write in slots of the step's tokens", "torch.add(clamped_positions % block_size, block_ids", "torch.add((clamped_positions - 1) % block_size, block_ids", MTP),
    ],
    "ops/triton/eplb.py": [
        ("the map of experts is off by one", "logical_to_physical_map[logical, replica]", "logical_to_physical_map.roll(1, 0)[logical, replica]", EPLB),
        ("a rank masks the tokens of another by its own number", "    del num_unpadded_tokens\n", "    if num_unpadded_tokens is not None:\n        own = torch.arange(len(topk_ids)) < num_unpadded_tokens\n        record_enabled = own[:, None] & record_enabled\n", EPLB),
        ("padding counts as load", "is_counted = is_pair & record_enabled", "is_counted = record_enabled.expand(is_pair.shape)", EPLB),
    ],
    "ops/triton/gumbel.py": [
        ("V2: seeds draw the same noise at every position", "(seeds >> 32) & WORD, pos & WORD)", "(seeds >> 32) & WORD)", KERNELS),
    ],
    "ops/triton/lora.py": [
        ("plain rows take the last adapter", "torch.ne(self._indices[:2, :, None, None], self._slots", "torch.ne(self._indices[:2, :, None, None] % len(self._slots), self._slots", LORA),
        ("rows get the sum of all adapters", ".masked_fill_(foreign[: len(x)], 0)\n", "\n", LORA),
    ],
    "ops/triton/rejection.py": [
        ("a rejected draft is kept", "rows.masked_fill_(num_ends > ends, PLACEHOLDER)", "rows.masked_fill_(num_ends > ends.int() + 1, PLACEHOLDER)", CORE),
    ],
    "ops/triton/rejection_v2.py": [
        ("V2: in place of a rejected draft comes any token of the target", "torch.where(as_it_is, target_logits, excess)", "target_logits", (*DRAWN_DRAFTS, "tests/v2/test_drawn_drafts.py")),
        ("V2: a drawn draft is accepted with the target's probability of it", "of_target.gather(1, tokens) - of_drafter.gather(1, tokens)", "of_target.gather(1, tokens)", (*DRAWN_DRAFTS, "tests/v2/test_drawn_drafts.py")),
    ],
    "ops/triton/sampling_v2.py": [
        ("V2: rows past a request's samples have masks", "(place < num_sampled_tokens[:, None]).flatten()", "(place >= 0).expand(len(num_sampled_tokens), -1).flatten()", KERNELS),
        ("V2: penalties don't see prompts", "torch.where(in_prompt | is_in_output, repetition, 1.0)", "torch.where(is_in_output, repetition, 1.0)", KERNELS),
        ("V2: penalties count drafts of other requests", "return sums - sums[first.long()]", "return sums", KERNELS),
        ("V2: bad words don't see drafts", "at = known + local_pos - (end", "at = known - (end", KERNELS),
        ("V2: a temperature of 0 divides", "torch.where(chosen == 0, 1.0, chosen)", "torch.where(chosen == 0, 0.5, chosen)", KERNELS),
    ],
    "ops/triton/thinking.py": [
        ("budgets of thinking: drafts before a row don't count", "length = known + local_pos", "length = known + 0 * local_pos", THINKING),
        ("budgets of thinking: one who has ended a thought is stopped again", "is_over = (start > end) & (budget >= 0)", "is_over = (start >= 0) & (budget >= 0)", THINKING),
        ("budgets of thinking: markers are looked for in the last token alone", "length, length, most_new + markers.longest - 1)", "length, length, markers.longest)", THINKING),
    ],
    "prep/arrays.py": [
        ("padding writes slot 0", "PAD_SLOT_ID = -1", "PAD_SLOT_ID = 0", CORE),
        ("padding not marked", 'is_padding: A = array(bool_, "tokens", TOKEN, True,', 'is_padding: A = array(bool_, "tokens", TOKEN, False,', CORE),
    ],
    "platform.py": [
        ("torch.compile does not split a model where positions are chosen", 'split_models_at("vllm::npu_prep_choose_positions")', "pass", SPARSE_ON_NPU),
        ("layers that share an indexer are not told to vLLM", '"S" if each == "shared" else "F"', '"F"', ("tests/startup/test_start_up.py",)),
    ],
    "prep/choices.py": [
        ("a position that was chosen twice goes unnoticed", "| is_twice.any(1)", "", SPARSE),
        ("a token at the border chooses one position less", "return np.minimum(positions + 1, index_topk)", "return np.minimum(positions, index_topk)", ("tests/prep/test_choices.py",)),
    ],
    "prep/batch.py": [
        ("a full graph takes the batch's own state", "in_full_graph = padding.mode is GraphMode.FULL", "in_full_graph = False", ("tests/prep/test_graph_padding.py",)),
    ],
    "prep/elements.py": [
        ("products of a row read the weights of the next one", "index = builder.add(nth_row(first_weight, weights_row, i), loop.index)", "index = builder.add(nth_row(first_weight, weights_row, min(i + 1, 3)), loop.index)", COMPILED),
        ("sums of a row begin at 0 in each run of keys", "builder, builder.load(at, align=4)) for at in kept]", "builder, nothing) for at in kept]", COMPILED),
        ("powers of two lose their last term", "C4 + x * (C5 + x * C6)", "C4 + x * C5", COMPILED),
        ("a half-precision number is cut, not rounded", "builder.add(builder.add(bits, word(0x7FFF)), odd)", "bits", ("tests/ops/test_cpu.py",)),
    ],
    "prep/bookkeeping.py": [
        ("V2: samples of requests that sit a step out are not put aside", "        sample_rows[request_rows[index]] = NO_PREVIOUS_ROW\n    left_out", "        sample_rows[:] = NO_PREVIOUS_ROW\n    left_out", V2),
        ("V2: drafts are taken back again after a pause", "counts[index] = min(counts[index], ends[request_row] - rejected)", "counts[index] -= rejected", (*V2, *SPECULATION)),
        ("V2: an older row of samples is taken for one of the last step", "sample_rows[request_row] - num_older", "sample_rows[request_row]", V2),
        ("V2: the last sample is no known token", "max(prefill, computed + 1)", "max(prefill, computed)", V2),
        ("V2: one of the rejected drafts stays counted", "rejected = drafts + 1 - num_valid", "rejected = drafts - num_valid", V2),
        ("V2: a count that the scheduler has corrected is corrected again", "min(counts[index], ends[request_row] - rejected)", "counts[index] - rejected", V2),
        ("drafts are written before a request's last token", "token_ids[row, end + draft] = draft", "token_ids[row, end - 1 + draft] = draft", UPDATES),
        ("tokens outside of the vocabulary are appended", "if token == NO_TOKEN or token >= vocab_size:", "if token == NO_TOKEN:", UPDATES),
        ("discarded samples are booked", "        if discard_request_mask[req]:\n            continue\n", "", UPDATES),
    ],
    "prep/capture_sizes.py": [
        ("sizes whose padding fits no row are captured", "if size - fewest_tokens <= max_model_len:", "if True:", ("tests/prep/test_graph_padding.py",)),
    ],
    "prep/checks.py": [
        ("contexts on several ranks: the check takes slots of the wrong rank", "if run % world_size != rank:", "if run % world_size < 0:", CHECKS),
        ("states are checked at a request's place in the batch, not in its row", "row = first_entry + t.request_rows[req] * t.max_num_blocks[group]", "row = first_entry + req * t.max_num_blocks[group]", STATES),
        ("a decode's wrong position goes unnoticed", "is_wrong = out.positions[start] != first or token_id < 0", "is_wrong = token_id < 0", CHECKS),
        ("rows of logits out of order go unnoticed", "is_wrong |= out.logits_indices[index] >= out.logits_indices[index + 1]", "is_wrong |= False", CHECKS),
        ("a shared state goes unnoticed", "                return Rule.STATE_SHARED, writers[order[place]], -1, group", "                return Rule.HOLDS, writers[order[place]], -1, group", CHECKS),
    ],
    "prep/embeds.py": [
        ("embeddings of a prompt's start in every chunk", "return token_indices, reqs[token_indices], positions[token_indices]", "return token_indices, reqs[token_indices], step.query_pos[token_indices]", EMBEDS),
        ("later chunks of an image as token ids", "len(placeholders.touched(tables.num_computed_tokens, num_scheduled_tokens)[0]) > 0", "bool((tables.num_computed_tokens[placeholders.rows] <= placeholders.starts).any())", VISION),
        ("embeddings in every step", "    if not len(placeholders.rows):\n        return False\n    return len", "    return True or len", VISION),
    ],
    "prep/fused_pass.py": [
        ("contexts on several ranks: a token gets the slot of the next rank", "if run % world_size == rank:", "if (run + 1) % world_size == rank:", SHARDS),
        ("contexts on several ranks: a rank's length leaves its last run out", "rounds * size + min(max(left, 0), size)", "rounds * size + min(max(left, 0), 0)", SHARDS),
        ("positions start at zero in every chunk", "positions[offset] = first + offset", "positions[offset] = offset", CORE),
        ("slot of the logical block", "slot = t.block_table_flat[row + block] * block_size", "slot = block * block_size", CORE),
        ("slots of a block's later tokens shifted", "slots[offset] = slot + offset", "slots[offset] = slot", CORE),
        ("first group's block table for all groups", "row = table + t.request_rows[req] * width", "row = t.request_rows[req] * width", CORE),
        ("short query_start_loc in a mixed full graph", "query_len = longest if decode_query_len == 0 else", "query_len = 1 if decode_query_len == 0 else", CORE),
        ("padding decodes of one token under speculation", "min(end + query_len, num_input_tokens)", "min(end + 1, num_input_tokens)", CORE),
        ("padding requests without keys", "out.seq_lens[req] = end - start", "out.seq_lens[req] = 0", CORE),
        ("padding requests past a row of the block table", "query_len = longest if decode_query_len == 0 else", "query_len = 1 << 30 if decode_query_len == 0 else", ("tests/prep/test_graph_padding.py",)),
        ("one logit too few for drafts", "range(end - 1 - drafts, end)", "range(end - drafts, end)", CORE),
        ("whole prompts are discarded", "seq_len < t.num_tokens[request_row]", "seq_len <= t.num_tokens[request_row]", CORE),
        ("sampled token placed behind the drafts", "first = out.input_ids_offset + out.query_start_loc[req + 1] - 1 - drafts", "first = out.input_ids_offset + out.query_start_loc[req + 1] - 1", CORE),
        ("one fresh request makes a prefill", "max_computed = max(max_computed, first)", "max_computed = first", CORE),
        ("a draft's logits verify the one before it", "= num_logits + draft", "= num_logits + 1 + draft", CORE),
        ("a place kept for a draft is looked up", "        out.input_ids[token] = max(out.input_ids[token], 0)", "        out.input_ids[token] = out.input_ids[token]", CORE),
        ("drafters go on from the last token behind a chunk", "known = min(out.seq_lens[req], t.num_tokens[request_row] - 1)", "known = t.num_tokens[request_row] - 1", CORE),
        ("drafts of another row", "out.variable_int64[target] = first + 1 + draft", "out.variable_int64[target] = first + draft", CORE),
        ("samples that nobody waits for overwrite a token", "out.variable_int64[index] = out.input_ids_offset + out.positions.shape[0]", "out.variable_int64[index] = out.input_ids_offset", CORE),
        ("rows of padding keep their blocks", "last_padded = min(out.seq_lens.shape[0], max_num_reqs)", "last_padded = num_reqs", CORE),
        ("block ids sent beside their place", "2 * (num_targets + count)", "2 * num_targets + count", CORE),
        ("block changes over the samples' targets", "index_of, id_of = num_targets,", "index_of, id_of = 0,", ENGINE),
        ("groups' tables without rows of padding between them", "table += (max_num_reqs + PADDING_ROWS) * width", "table += max_num_reqs * width", CORE),
        ("drafts count as tokens of a prompt", "if start - num_drafts != num_reqs:", "if start != num_reqs:", ("tests/prep/test_against_oracle.py",)),
    ],
    "prep/latent_split.py": [
        ("starts of prefills are the step's", "step.query_start_loc[req] - num_decode_tokens", "step.query_start_loc[req]", ("tests/prep/test_latent_split.py",)),
        ("a context is cut inside of a block", "length = room // block_size * block_size", "length = room", ("tests/prep/test_latent_split.py",)),
        ("a prefill without context leaves a chunk open", "        if context_len == 0:\n            is_open = False\n", "", ("tests/prep/test_latent_split.py",)),
    ],
    "prep/local_attention.py": [
        ("a token of the next chunk in a virtual request", "min(seq_len, chunk_start + attention_chunk_size)", "min(seq_len, chunk_start + attention_chunk_size + 1)", CHUNKS),
        ("blocks of a virtual request begin a chunk late", "req * t.chunks_per_req[group] + chunk", "req * t.chunks_per_req[group] + chunk + 1", CHUNKS),
        ("blocks of a virtual request are the first group's", "row = t.first_local_rows[group] + req", "row = t.first_local_rows[0] + req", CHUNKS),
        ("padding virtual requests have a request's blocks", "t.num_tokens.shape[0] * t.chunks_per_req[group]", "0 * t.chunks_per_req[group]", CHUNKS),
        ("padding virtual requests leave tokens out", "out.chunk_local_query_start_loc[padding + 1] = end", "out.chunk_local_query_start_loc[padding + 1] = start", CHUNKS),
        ("one virtual request too few has a place", "return 2 * num_reqs_padded + spare // self.attention_chunk_size", "return 2 * num_reqs_padded + spare // self.attention_chunk_size - 1", CHUNKS),
    ],
    "prep/mask.py": [
        ("a token can't see itself", "columns > rows", "columns >= rows", CORE),
        ("window one too wide", "columns <= rows - sliding_window", "columns < rows - sliding_window", CORE),
        ("padding rows mask everything", "masked = np.zeros((num_rows, max_seq_len), dtype=bool)", "masked = np.ones((num_rows, max_seq_len), dtype=bool)", CORE),
        ("decodes with a window have no mask", "state == AttentionState.DecodeOnly and sliding_window is None", "state == AttentionState.DecodeOnly", CORE),
    ],
    "prep/mrope.py": [
        ("height and width of M-RoPE swapped", "= prompt[dim, position]", "= prompt[dim if dim == 0 else 3 - dim, position]", VISION),
        ("what is behind an image counts on from the sequence", "[dim, token] = position + delta", "[dim, token] = position", VISION),
    ],
    "prep/padding.py": [
        ("no row for what a mixed graph leaves over", "max_num_reqs if decode_query_len else max_num_reqs + PADDING_ROWS", "max_num_reqs", ("tests/prep/test_graph_padding.py",)),
    ],
    "prep/pcp.py": [
        ("the late halves of ranks swapped", "chunk if chunk < world_size else 2 * world_size - 1 - chunk", "chunk if chunk < world_size else chunk - world_size", PROMPTS),
        ("gathered K and V get the slots of another rank", "            place = rank * rank_tokens + token", "            place = (world_size - 1 - rank) * rank_tokens + token", PROMPTS),
        ("a rank's late chunk begins where its prompt does", "computed = out.num_computed_tokens[req] + first - start", "computed = out.num_computed_tokens[req]", PROMPTS),
        ("positions of a rank's late chunk continue its first", "out.pcp_positions[token + offset] = out.positions[first + offset]", "out.pcp_positions[token + offset] = out.positions[start + token + offset]", PROMPTS),
        ("every decode goes to the first rank", "                rank = num_singles % world_size\n                num_singles += 1", "                rank = 0", PROMPTS),
        ("samples go to the rank's first token", "out.pcp_input_ids_offset + token + count - 1", "out.pcp_input_ids_offset", PROMPTS),
        ("padding rows see the first request's blocks", "out.pcp_table_rows[row] = null_row", "out.pcp_table_rows[row] = 0", PROMPTS),
        ("ranks pad as the first one does", "return tokens.max(), rows.max()", "return tokens[0], rows[0]", PROMPTS),
    ],
    "prep/checks_pcp.py": [
        ("slots of gathered tokens go unchecked", "if out.pcp_slot_mapping[group, place] != out.slot_mapping[group, token]:", "if False:", PROMPTS),
        ("positions of a rank go unchecked", "is_wrong = out.pcp_positions[own] != out.positions[token]", "is_wrong = False", PROMPTS),
        ("contexts of rows go unchecked", "if is_wrong or out.pcp_seq_lens[row] != computed + last - first:", "if is_wrong:", PROMPTS),
        ("a row may have the blocks of a request of the same length", "is_wrong = out.pcp_table_rows[row] != req", "is_wrong = out.seq_lens[out.pcp_table_rows[row]] != out.seq_lens[req]", PROMPTS),
        ("a request may be sampled after another one of the same length", "out.pcp_logits_indices[sample] != token - 1:", "out.pcp_positions[out.pcp_logits_indices[sample]] != out.seq_lens[req] - 1:", PROMPTS),
    ],
    "prep/recurrent_states.py": [
        ("states of the next block", "return num_computed if keeps_each else seq_len - 1", "return num_computed if keeps_each else seq_len", STATES),
        ("states are looked up at a request's place in the batch, not in its row", "row = t.first_state_entries[index] + t.request_rows[req] * width", "row = t.first_state_entries[index] + req * width", STATES),
        ("a state index is shifted by one", "            out.state_indices[index, req] = t.block_table_flat[row + column]\n            if num_drafts", "            out.state_indices[index, req] = t.block_table_flat[row + column] + 1\n            if num_drafts", STATES),
        ("every request has an initial state", "out.has_initial_state[req] = out.num_computed_tokens[req] > 0", "out.has_initial_state[req] = True", STATES),
        ("a state is read from the block of the step's last token", "column = read_column(out.num_computed_tokens[req], kept, size, num_drafts)", "column = read_column(out.seq_lens[req], kept, size, num_drafts)", STATES),
        ("accepted tokens are ignored: the first state is read", "kept = out.num_accepted_tokens[req] if num_drafts > 0 else 1", "kept = 1", STATES),
        ("the state at the end of a block stays among those of drafts", "    if ends <= num_drafts:", "    if ends < 0:", STATES),
    ],
    "prep/state.py": [
        ("decodes win over drafts", "if flags & SOME_DRAFTS and not flags & SOME_NOT_VERIFYING:", "if flags & SOME_DRAFTS and flags & SOME_NOT_VERIFYING:", CORE),
        ("chunked prefill ignored", "if not chunked_prefill and", "if chunked_prefill and", CORE),
    ],
    "quantization/checkpoint.py": [
        ("int4: act-order passes the check of files", "order.size and not np.array_equal(", "order.size and np.array_equal(", INT8_FILES),
        ("int4: scales of other groups pass the check of files", "    if given not in allowed:", "    if given in ():", INT8_FILES),
        ("int8: keys of an indexer are taken for int8", r'r"|\.indexer\.(wk|weights_proj)$"', 'r""', INT8_FILES),
        ("int8: layers of Qwen3.5 that draft are known by their numbers alone", "return module.startswith(MTP) or ", "return ", INT8_FILES),
        ("int8: experts in one tensor of layers that draft are taken for int8", 'if not layer.endswith(".experts") or last not in FUSED_EXPERTS:', "if True:", INT8_FILES),
        ("int8: layers of MiMo that draft begin at the first layer", "layers.{num_decoder_layers + int(found[1])}.", "layers.{int(found[1])}.", INT8_FILES),
        ("int8: mixtures of MiniMax are looked for by the names of their weights", 'module.replace(".block_sparse_moe.", ".mlp.")', "module", (f"{INT8_TOKENS[0]}[MiniMaxM2]",)),
        ("int8: scales of columns pass the check of files", "{(), (1,)}, {(outputs,), (outputs, 1)}", "{(), (1,)}, {(outputs,), (outputs, 1), (1, outputs)}", INT8_FILES),
    ],
    "quantization/compressed.py": [
        ("int8: what memory held passes for scales that no file has", "scale.data.fill_(torch.nan if isinstance(scheme, INT4) else 0)", "pass", ("tests/engine/test_pooling.py::test_an_int8_copy_without_the_head_is_refused",)),
        ("int4: weights that no file has are zeros", "torch.nan if isinstance(scheme, INT4) else 0", "0", ("tests/engine/test_quantization.py::test_weights_that_no_file_has_end_the_start[a part of a fused layer]",)),
        ("int4: a reload fills a weight by one of its two names", '            del layer.weight_packed\n            scheme.kernel.w_q_name = "weight"\n', "", (f"{INT8_TOKENS[0]}[W4A8, groups]",)),
        ("int8: float MTP layers that nothing names are taken for int8", "*float_modules_that_draft(headers, decoders)]", "*float_modules_that_draft(headers, decoders)[:0]]", INT8_MTP),
    ],
    "quantization/experts.py": [
        ("int8: experts take each other's scales", "w13_scale[expert])(rows)", "w13_scale[expert - 1])(rows)", INT8),
    ],
    "quantization/expert_forms.py": [
        ("int4: groups of experts have the second scale of the next one", "scale = scale * second", "scale = scale * second.roll(-1, 2)", W4A8_TOKENS),
        ("int4: experts have each other's scales", "scale[expert], zero", "scale[expert - 1], zero", W4A16_TOKENS),
        ("int4: NPUs move zero points of experts the other way", "(SYMMETRIC_ZERO - zero)", "(zero - SYMMETRIC_ZERO)", PACKED_EXPERTS),
        ("int4: NPUs take outputs of experts in another order", "pack_outputs(numbers.t() - SYMMETRIC_ZERO)", "pack_outputs(numbers.t().flip(1) - SYMMETRIC_ZERO)", PACKED_EXPERTS),
        ("int4: outputs of AWQ's experts are in the order of words", "AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)", "AWQ_PLACES = (0, 1, 2, 3, 4, 5, 6, 7)", (f"{INT8_TOKENS[0]}[AWQ, experts]",)),
        ("int4: gate and up of packed experts are exchanged", "zip(levels, scales)", "zip(levels.roll(levels.shape[1] // 2, 1), scales)", W4A8_ON_NPU),
        ("int4: packed experts have each other's corrections", '"correction": correction}', '"correction": correction.roll(1, 0)}', W4A8_ON_NPU),
        ("int4: zero points of experts are off by one", "scale[expert], zero", "scale[expert], zero + 1", (f"{INT8_TOKENS[0]}[W4A16, experts, zero points of rows]",)),
    ],
    "quantization/rounding.py": [
        ("int8: an indexer reads inputs that were rounded", ' and wrapper.indexer is None:\n            _fuse_norm(decoder', ':\n            _fuse_norm(decoder', (f"{INT8_ON_NPU[0]}::test_logits_and_launches_of_a_layer[sparse]",)),
        ("int8: an indexer reads queries that were rounded", "            readers.append(wrapper.indexer.wq_b)\n", "            pass\n", (f"{INT8_ON_NPU[0]}::test_logits_and_launches_of_a_layer[sparse, float queries of the indexer]",)),
        ("int8: gate and up exchanged where they are rounded", "activate_left=True", "activate_left=False", INT8_ON_NPU),
        ("int8: halves of latent queries are split in the order of heads", "    layer.int8 = layer.int8.ordered(order)\n", "", INT8_ON_NPU),
        ("int8: norms without a residual keep their epsilon", "self._round(x, x, 4 * epsilon)[0]", "self._round(x, x, epsilon)[0]", INT8_ON_NPU),
        ("int8: Gemma's norms multiply by one factor of 16 bits", "smooth_scale1=self.second", "smooth_scale1=None", INT8_ON_NPU),
    ],
    "quantization/int4.py": [
        ("int4: outputs of a pair are swapped", "((pairs << 4) >> 4, pairs >> 4)", "(pairs >> 4, (pairs << 4) >> 4)", W4A8_TOKENS),
        ("int4: nibbles are swapped", "torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)", "torch.tensor([4, 0, 12, 8, 20, 16, 28, 24], dtype=torch.int32)", INT4),
        ("int4: zero points are off by one", "(groups - zeros)", "(groups - zeros + 1)", INT4),
        ("int4: each piece of a weight has the scales of the first one", "scales[part], zero)", "scales[: len(numbers)], zero)", INT4),
        ("int4: groups have the scale of the next one", "scale.float()[..., None]", "scale.float().roll(-1, 1)[..., None]", INT4),
        ("int4: NPUs take the first output for the last", "torch.arange(0, 32, 4, dtype=torch.int32, device=levels.device)", "torch.arange(28, -1, -4, dtype=torch.int32, device=levels.device)", INT4_ON_NPU),
        ("int4: NPUs move zero points the other way", "(SYMMETRIC_ZERO - zeros.t())", "(zeros.t() - SYMMETRIC_ZERO)", INT4_ON_NPU),
        ("int4: NPUs take the next group's scale beside int8 inputs", "bits.t().long()", "bits.roll(-1, 1).t().long()", INT4),
        ("int4: the sign of a scale is repeated in the bits above it", "bits.t().long() & 0xFFFFFFFF", "bits.t().long()", INT4),
        ("int4: NPUs get half of what the 8 in each row adds", "8 * (sums *", "4 * (sums *", INT4),
        ("int4: corrections of latent queries stay in the order of heads", "self.correction[order]", "self.correction", INT4),
        ("int4: NPUs take groups of 128 beside int8 inputs", "size = whole if groups == 1 else GROUP_ON_NPUS", "size = whole if groups == 1 else 128", INT4),
        ("int4: the border of two ranks may lie in a group", "    if inputs % whole:\n", "    if inputs % 8:\n", INT4),
    ],
    "quantization/int8.py": [
        ("int4: groups of rounded inputs begin one later", "slice(group * size, (group + 1) * size)", "slice(group * size - group, (group + 1) * size - group)", W4A8_TOKENS),
        ("int8: all tokens get the first one's scale", "product *= rows.scale[:, None]", "product *= rows.scale[:1, None]", INT8_TOKENS),
        ("int8: sums are cut off on processors without VNNI", "        if self.sums_exactly:\n", "        if True:\n", ("tests/quantization/test_int8.py",)),
        ("int8: a traced model asks what a product gives", "        if self.sums_exactly:\n", "        if torch_sums_exactly():\n", INT8_TOKENS),
        ("int8: float32 sums more products than it holds exactly", "EXACT_COLUMNS = 1024", "EXACT_COLUMNS = 4096", ("tests/quantization/test_int8.py",)),
        ("int8: the offset of inputs stays in", "sums = sums + self.sum_bias", "sums = sums + 0 * self.sum_bias", INT8_TOKENS),
        ("int8: scales of latent queries stay in the order of heads", "weight_scale=self.weight_scale[..., order]", "weight_scale=self.weight_scale", INT8_ON_NPU),
        ("SwiGLU rounds rows that CANN's operator takes in parts", "    if is_static or columns <= MOST_COLUMNS_OF_SWIGLU:\n", "    if True:\n", INT8_ON_NPU),
    ],
    "quantization/loaded.py": [
        ("int8: decodes absorb weights with one scale for all channels", "scale = layer.channel_scale.view(", "scale = layer.channel_scale.mean().expand_as(layer.channel_scale).contiguous().view(", INT8_LATENT),
    ],
    "quantization/modelslim.py": [
        ("int4: groups have the second scale of the next one", "scale = scale * second", "scale = scale * second.roll(-1, 1)", W4A8_TOKENS),
        ("int8: each rank takes the offset out", "layer.tp_rank > 0:", "layer.tp_rank > 9:", INT8_RANKS),
        ("int8: scales kept as bits are read as numbers", "scale.to(torch.int32).view(torch.float32)", "scale.float()", ("tests/engine/test_quantization.py::test_scales_kept_as_bits_are_those_kept_as_numbers",)),
        ("int8: each of two ranks has its neighbour's scales", "made[name] = _parameter(ChannelQuantScaleParameter, loader, data, output_dim=0)", "made[name] = _parameter(ChannelQuantScaleParameter, lambda p, w, *a: loader(p, w.roll(len(w) // 2, 0), *a), data, output_dim=0)", INT8_RANKS),
    ],
    "quantization/modules.py": [
        ("int8: a model that drafts forgets which of its modules are fused", 'getattr(self, "_fused", FUSED_MODULES)', "FUSED_MODULES", INT8_FILES),
        ("int8: a module that the model lacks is not looked for", "if start and start in layers and module not in made and not is_experts:", "if start in () and module not in made and not is_experts:", INT8_FILES),
    ],
    "records/comparison.py": [
        ("replays take a sample that can't have been drawn", "if not any(first <= token < first + count for first, count in runs):", "if False:", V2_ENGINE),
        ("a message about drafts names the request whose row is the draft's number", "        req = int(np.searchsorted(np.cumsum(rows), index[0], side=\"right\"))\n", "        req = index[0]\n", ("tests/engine/test_hybrids.py::test_drafts_that_are_looked_up_leave_no_trace_in_states[V1]",)),
    ],
    "records/record_file.py": [
        ("an archive is read however much it holds", "if sum(member.file_size for member in members) > MAX_RECORD_BYTES:", "if False:", RECORDS),
    ],
    "records/scenario.py": [
        ("shared block that is written is accepted", "if not (is_prefix and other_is_prefix):", "if False:", CORE),
        ("a null block before the state that is read is refused", "        group.holds_states,\n    )\n    for place", "    )\n    for place", ("tests/inspect/test_states.py",)),
        ("unknown keys of latent name the scenario's", "if part in OBJECTS]", "if part in (\"requests\", \"multimodal\")]", ("tests/test_explain_command.py",)),
    ],
    "runner/accepted.py": [
        ("a decode continues after all of its last drafts", "counts = np.where((starts == UNKNOWN) | (computed == 0), np.int32(1), computed - starts)", "counts = np.where(computed == 0, np.int32(1), states.decode_threshold).astype(np.int32)", ("tests/runner/test_accepted.py",)),
        ("a request that is resumed counts from where it was preempted", "starts[[req_id in begin for req_id in req_ids]] = UNKNOWN", "pass", ("tests/runner/test_accepted.py",)),
        ("accepted tokens are counted from the rows of the batch", "computed = tables.num_computed_tokens[tables.request_rows[:num_reqs]]", "computed = tables.num_computed_tokens[:num_reqs]", ("tests/runner/test_accepted.py",)),
        ("a request that returns is taken for a new one", "[self._left.pop(req_id, UNKNOWN) for req_id in req_ids]", "[UNKNOWN for req_id in req_ids]", ("tests/runner/test_accepted.py",)),
        ("a session's next part counts drafts of its last answer", "        begin = {new.req_id for new in scheduler_output.scheduled_new_reqs}\n", "        begin: set[str] = set()\n", ("tests/runner/test_accepted.py",)),
    ],
    "runner/common.py": [
        ("layers that share K and V have caches of their own", "caches[name] = caches[target]", "caches[name] = caches[target].clone()", WINDOWS),
        ("steps are not checked", "self.step_check.verify(self, scheduler_output)", "pass", CHECKS),
    ],
    "runner/eplb.py": [
        ("weights are exchanged too early", "        super().add_model(model, model_config, *args, **kwargs)\n", "        super().add_model(model, model_config, *args, **kwargs)\n        (state,) = self.model_states.values()\n        state.expert_buffer[:] = model.expert_weights[0]\n", MOVED),
        ("what runs before the first step counts as load", "            each.expert_load_pass.zero_()\n", "            pass\n", (f"{MOVING}load_is_each_token_of_all_ranks_once[V2]",)),
        ("a rank whose exchange fails waits", "            os._exit(1)\n", "            pass\n", (f"{MOVING}a_rank_that_ends_in_an_exchange_ends_the_engine[fails]",)),
        ("a record keeps an old map", "            self._placement = None\n", "            pass\n", EPLB),
    ],
    "runner/exchange.py": [
        ("MC2: experts of a drafter exchange more than they can", "min(tokens, communicator.mc2.max_tokens)", "communicator.mc2.max_tokens", MC2),
        ("MC2: a drafter's experts exchange what they can't take", "communicator.mc2, communicator.may_exchange = None, False", "communicator.may_exchange = False", MC2),
        ("MC2: a drafter lets a model's experts exchange what they can't take", "communicator.mc2, communicator.may_exchange = None, False", "communicator.mc2 = None", MC2),
    ],
    "runner/graphs.py": [
        ("sizes that memory did not suffice for stay on the grid", "            self._forget_sizes(given_up)\n", "            pass\n", ("tests/runner/test_graphs.py",)),
        ("sizes that are given up keep their streams", "                                _delete_graphs(given_up)  # which", "                                # which", ("tests/runner/test_graphs.py",)),
        ("each rank gives up sizes of its own", "        given_up = self.agree(given_up)\n", "", ("tests/runner/test_graphs.py",)),
    ],
    "runner/lora.py": [
        ("prompts are scored by the adapters of the samples", "with alone(req_id), logits_of(manager, lora_id):", "with alone(req_id):", LORA),
        ("a mapping of other samples is taken for the old one", "            and np.array_equal(self.prompt_mapping, other.prompt_mapping)\n", "", LORA),
    ],
    "runner/new_weights.py": [
        ("MTP layers stay those of the old weights", "drafter is None or of_drafter is None or not follows", "True", (f"{DRAFTS_AFTER_SLEEP}[V1]",)),
        ("MTP layers without new weights lose their old ones", "            _keep_old_weights(drafter, of_drafter)\n", "", (f"{DRAFTS_AFTER_SLEEP}[V1]",)),
        ("a reload that fails leaves tensors at new addresses", "        finally:\n            _put_back(model, before)\n", "        _put_back(model, before)\n", ("tests/device/test_sleep.py",)),
        ("a reload that fails leaves layers with no weights", "            _keep_old_weights(model, model_config)\n", "", ("tests/device/test_sleep.py",)),
        ("a reload looks for layers under the names that adapters give them", "        setattr(owner, name, child.base_layer)\n", "        setattr(owner, name, child)\n", ("tests/device/test_sleep.py",)),
    ],
    "runner/outputs_in_flight.py": [
        ("outputs are let go while they are copied", "while self._kept and self._kept[0][0].query():", "while self._kept:", ("tests/runner/test_outputs.py",)),
    ],
    "runner/padding.py": [
        ("full graphs of ranks may read more blocks than the cache has", "if not limits.allow(batch, most_rows):", "if False:", ("tests/runner/test_padding.py",)),
        ("steps of ranks are padded to the tokens of one", "num_tokens = self.num_ranks * descriptor.num_tokens", "num_tokens = descriptor.num_tokens", ("tests/runner/test_padding.py",)),
        ("a full graph with more blocks than the cache", "return blocks <= self.num_blocks", "return True", ("tests/runner/test_padding.py",)),
        ("a call for each request when a step is prepared", "        self.counts.add(decision.kind)\n", "        self.counts.add(decision.kind)\n        [abs(n) for n in range(num_reqs)]\n", ("tests/benchmarks/test_benchmarks.py",)),
        ("padding decided for other counts", "            num_reqs,\n            query_len,\n            num_encoder", "            0,\n            query_len,\n            num_encoder", ("tests/runner/test_padding.py",)),
        ("graphs captured over upstream's buffers", "        if dispatched[0] != CUDAGraphMode.NONE:", "        if False:", GRAPHS),
        ("npu: graphs captured over upstream's buffers", "        if dispatched[0] != CUDAGraphMode.NONE:", "        if False:", FIA),
        ("steps with embeddings take the padding of steps without", "            batch.takes_embeds,\n            num_tokens", "            False,\n            num_tokens", EMBEDS),
    ],
    "runner/preparer.py": [
        ("each rank prepares whole prompts", "        pcp=find_pcp(vllm_config),\n", "", PROMPTS),
        ("each rank keeps whole contexts", "        dcp=find_dcp(vllm_config.parallel_config),\n", "", PROMPTS),
        ("the block table of another group", "block_tables[group] if builder.causal", "block_tables[0] if builder.causal", WINDOWS),
    ],
    "runner/prompt_embeds.py": [
        ("ids of embedded tokens left as they are", "        step.input_ids[token_indices] = 0\n", "", EMBEDS),
        ("prompts of embeddings keep the ids of their row's last request", "    if new.prompt_embeds is None:", "    if True:", EMBEDS),
        ("token ids beside embeddings count as unknown", "new.prompt_is_token_ids or [False]", "[False]", EMBEDS),
    ],
    "runner/v1/bookkeeping.py": [
        ("log-probabilities dropped", "if sampler_output.logprobs_tensors is not None:", "if False:", BOOKS),
    ],
    "runner/v1/drafters.py": [
        ("draft passes keep rejected tokens", "self._seq_lens -= num_rejected_tokens(self._num_draft_tokens, valid)", "self._seq_lens -= 0 * num_rejected_tokens(self._num_draft_tokens, valid)", SPECULATION),
        ("the first draft pass of a draft model is one short", "extra = self.net_num_new_slots_per_request", "extra = 0 * self.net_num_new_slots_per_request", SPECULATION),
        ("dummy runs of a drafter write into slots of the last step", "        self._slot_mapping_buffer.fill_(PADDING_SLOT_ID)\n", "", MTP),
        ("draft passes look up slots in the first group's table", "self.block_table_of_group(index)[: common.num_reqs]", "self.block_table_of_group(self.kv_cache_gid)[: common.num_reqs]", SPECULATION),
        ("draft passes look up slots in the first request's row", "block_table[rows, numbers]", "block_table[0 * rows, numbers]", SPECULATION),
        ("drafts behind images in slots of their rotation", "        if not self.vllm_config.model_config.uses_mrope:\n            return super()._update_positions", "        if True:\n            return super()._update_positions", VISION),
        ("drafts behind images rotate by what is about to be written", "return buffer.copy_(following)", "return buffer.copy_(positions + 1)", VISION),
    ],
    "runner/v1/model_inputs.py": [
        ("images and M-RoPE stay with rows when requests leave", "if not new_req_ids and req_ids == list(known):", "if not new_req_ids:", VISION),
        ("an image begins anew in every chunk", "output[run.first_row + start - run.start : run.first_row + end - run.start]", "output[run.first_row : run.first_row + end - start]", VISION),
        ("an output of the encoder that another image of its size left", "            if output is None:\n", "            output = vars(self).setdefault('stale', {}).setdefault(len(output), output)\n            if output is None:\n", VISION),
        ("images of a model without M-RoPE are left out", "takes_items or mrope_dims > 0", "takes_items and mrope_dims > 0", ("tests/runner/test_inputs.py",)),
        ("a request id that comes back at once keeps its old images", "if req_id in known and req_id not in new_req_ids", "if req_id in known", ("tests/runner/test_inputs.py",)),
    ],
    "runner/v1/request_updates.py": [
        ("lost tokens are overlooked", "stays &= has_outputs <= outputs", "stays &= has_outputs >= 0", BOOKS),
        ("drafts of the last step stay in a request's state", "            spec_token_ids[:] = draft_token_ids\n", "            spec_token_ids.extend(draft_token_ids)\n", UPDATES),
        ("drafts that were assumed are not taken back", "batch.num_computed_tokens_cpu[rows[verified]] = computed", "pass", UPDATES),
        ("drafts are taken back again after a pause", "updated.num_computed_tokens[verified], last_ends[last] - 1 + num_valid_tokens[last]\n", "*[updated.num_computed_tokens[verified] - assumed[verified] - 1 + num_valid_tokens[last]] * 2\n", (*UPDATES, *SPECULATION)),
        ("outputs keep placeholders of rejected drafts", "                del output_token_ids[change:]\n", "                pass\n", UPDATES),
        ("a step in which a request left is taken for a quiet one", "len(scheduler_output.num_scheduled_tokens) == batch.num_reqs\n        and len(", "True or len(", UPDATES),
        ("a call for each request when a step is updated", "computed = np.array(cached.num_computed_tokens, np.int32)", "computed = np.array([abs(n) for n in cached.num_computed_tokens], np.int32)", ("tests/benchmarks/test_benchmarks.py",)),
        ("new blocks are not entered in the request", "                block_ids.extend(new_ids)\n", "                pass\n", ENGINE),
        ("requests that were taken back advance in their rows", "rows = np.where([r in resumed for r in req_ids], -1, rows)", "pass", UPDATES),
    ],
    "runner/v1/runner.py": [
        ("prompts are scored again when they are done", "        if req_id not in of_request:  # its prompt is done", "        if False:", ("tests/runner/test_lora.py",)),
        ("steps with embeddings replay graphs", "force_eager=counts.eager or counts.takes_embeds", "force_eager=counts.eager", EMBEDS),
        ("drafters get no common metadata", "return preparer.for_layers(in_flight.metadata), common", "return preparer.for_layers(in_flight.metadata), None", ENGINE),
        ("drafting stops for all near one request's end", "            return common_attn_metadata is not None\n", "            pass\n", MTP),
        ("npu: a length is read back", "        metadata = preparer.build_metadata(step, staged)\n", "        staged.device.seq_lens.max().item()\n        metadata = preparer.build_metadata(step, staged)\n", COUNTS),
        ("padding mask of a step from upstream", "        if self.in_flight is None:\n            is_padding", "        if True:\n            is_padding", BOOKS),
        ("a step that failed stays in flight", "            if self.execute_model_state is None:\n                self._end_step()\n", "            pass\n", BOOKS),
        ("a step whose samples failed stays in flight", "            generators.update(held)\n            self._end_step()\n", "            generators.update(held)\n        self._end_step()\n", BOOKS),
        ("dummy runs write into the last step's buffers", "        self.buffers.restore()\n", "", BOOKS),
        ("upstream's lengths in the step's buffers", "self.buffers.restore(leave=GRAPH_INPUTS)", "pass", GRAPHS),
        ("drafts are verified by another request's adapter", "num_scheduled_tokens, step.num_sampled_tokens)", "num_scheduled_tokens)", LORA),
        ("adapters that captures made up serve the first requests", "            self.maybe_remove_all_loras(self.lora_config)", "            pass", LORA),
        ("embeddings given to what was compiled", "get_forward_context().skip_compiled = True", "pass", EMBEDS),
        ("log-probabilities of prompts that are unknown", "self.num_prompt_logprobs.pop(req_id, None)", "pass", EMBEDS),
        ("rows of a pooled prompt that was preempted count twice", "states.clean()", "pass", (f"{POOLING[0]}::test_rows_for_each_token_outlive_the_steps_of_their_chunks",)),
        ("blocks of virtual requests are gathered before new ones are sent", "        preparer.staging.send(step, samples.token_ids)\n        # 6 metadata: one for each KV-cache group, from host values at hand\n        metadata = preparer.build_metadata(step, staged)\n", "        metadata = preparer.build_metadata(step, staged)\n        preparer.staging.send(step, samples.token_ids)\n", CHUNKS_ENGINE),
        ("states: requests that begin with drafts stay behind prompts", "put_drafts_among_decodes(scheduler_output, self.input_batch, states.decode_threshold)", "pass", ("tests/engine/test_hybrids.py::test_a_prompt_of_one_token_begins_with_drafts[V1]",)),
        ("requests with chosen tokens are scored as vLLM's V1 does it", "        if not self.input_batch.logprob_token_ids:\n", "        if True:\n", SPECULATION),
    ],
    "runner/v1/sampling.py": [
        ("chosen tokens are scored in the rows of other requests", "repeat_interleave(len(logprobs) // num_reqs, dim=0)", "repeat(len(logprobs) // num_reqs, 1)", SPECULATION),
        ("a budget of thinking tokens stays in the row of a request that left", "            holder._state.pop(row, None)\n", "            pass\n", ("tests/engine/test_thinking.py",)),
        ("whoever chose fewer tokens gets others' likeliest in their place", "torch.where(is_chosen, wanted, ids[:, columns])", "wanted", SPECULATION),
    ],
    "runner/v1/setup.py": [
        ("real text: rotary of another base", "        super().load_model(*args, **kwargs)\n", "        self.model_config.hf_config.rope_parameters['rope_theta'] = 1e4\n        super().load_model(*args, **kwargs)\n", REAL_TEXT),
        ("drafters keep vLLM's routers", 'self._replace_layers(self.get_model(), getattr(self, "drafter", None))', "self._replace_layers(self.get_model(), None)", ("tests/npu/on_device/test_speculation.py::test_launches_of_a_draft_pass[DeepseekV3-V1]",)),
        ("prefix hits counted as fresh", "num_computed_tokens=batch.num_computed_tokens_cpu", "num_computed_tokens=batch.num_computed_tokens_cpu * 0", ENGINE),
        ("drafters read the first group's table", "self._drafting_group = drafter.kv_cache_gid", "pass", ("tests/engine/test_speculation.py::test_a_drafter_beside_windows_has_groups_of_its_own[several]",)),
        ("one window for all layers of a group", "split_by_window(groups, layers) for groups", "groups for groups", WINDOWS),
    ],
    "runner/v1/speculation.py": [
        ("async: tokens known are the scheduler's guess", "        batch.num_tokens_no_spec[rows] = batch.num_computed_tokens_cpu[rows] + 1\n", "", SPECULATION),
        ("drafts of other rows", "torch.cat((sampled_token_ids, drafts, drafts), 1)", "torch.cat((sampled_token_ids, drafts, drafts.flip(0)), 1)", ("tests/runner/test_speculation.py",)),
    ],
    "runner/v1/upstream_buffers.py": [
        ("seq_lens not bound", '            "seq_lens": device.seq_lens,\n', "", ENGINE),
    ],
    "runner/v2/adapters.py": [
        ("V2: tokens have the adapters of other requests", "lora_ids.repeat(num_scheduled_tokens)", "lora_ids[::-1].repeat(num_scheduled_tokens)", V2_LORA),
        ("V2: of two adapters of one name a step has one", "return list({each.lora_int_id: each for each in asked}.values())", "return list(set(asked))", ("tests/runner/test_lora.py",)),
    ],
    "runner/v2/block_tables.py": [
        ("V2: a new block takes the place of the last one", "places = self.num_blocks[0, rows]", "places = self.num_blocks[0, rows] - 1", V2),
        ("real text, V2: a preempted request comes back to the blocks of its row on the device", "self.num_synced_blocks[:, place] = 0", "self.num_synced_blocks[:, place] = self.num_device_blocks[:, place]", V2_REAL_TEXT),
    ],
    "runner/v2/context_ranks.py": [
        ("samples of gathered tokens in the order of ranks", "gathered.index_select(0, arrays.pcp_gathered_rows[: step.num_reqs])", "gathered[: step.num_reqs]", PROMPT_TOKENS),
        ("scores of prompts in the order of ranks", "dim=0).index_select(0, places)", "dim=0)[: len(places)]", PROMPT_TOKENS),
    ],
    "runner/v2/buffers.py": [
        ("V2: of two values for one place the earlier one counts", "contents[::-1][last]", "contents[last]", V2),
        ("V2: values are sent once only", "not np.array_equal(self._sent, self.np)", "not self._sent.any()", V2),
    ],
    "runner/v2/dp_agreement.py": [
        ("V2: an idle engine replays the graph that it would choose by itself", "                manager.of_dummy_run = found[0]", "                pass", V2_ENGINES),
    ],
    "runner/v2/draft_passes.py": [
        ("V2: pieces of draft passes read the positions of the pass before", "        inputs.positions[..., :num_tokens].copy_(positions)", "        pass", ("tests/engine/test_mtp.py::test_tokens_and_accepted_drafts[DeepseekV3-async-FULL_AND_PIECEWISE-V2]",)),
        ("V2: engines pad draft passes each for itself", "PassSize(0 if is_eager else found.num_tokens, ", "PassSize(0 if is_eager else padded, ", ("tests/v2/test_draft_passes.py",)),
    ],
    "runner/v2/drafters.py": [
        ("V2: a draft model's rows of rejected tokens write", "                is_rejected,\n                int(self.block_tables", "                torch.zeros_like(is_rejected),\n                int(self.block_tables", V2_DRAFT_MODEL),
        ("V2: EAGLE-3 heads read the states of default layers", "        setattr(of_head, key, named[key])", "        pass", V2),
    ],
    "runner/v2/drawing.py": [
        ("V2: float64 logits are compared as float32", "exact = logits if logits.dtype == torch.float64 else logits.float()", "exact = logits.half().float()", ("tests/v2/test_drawn_drafts.py",)),
        ("V2: greedy rows get noise, random ones get none", "(requests.temperature == 0)[:, None], 0)", "(requests.temperature != 0)[:, None], 0)", V2_ENGINE),
        ("V2: a draft is verified by the number that drew it", "positions + DRAFTING", "positions + VERIFYING", V2),
        ("V2: drafts are drawn at a temperature of 1", "logits.float() / temperature.masked_fill(temperature == 0, 1)[:, None]", "logits.float()", V2),
    ],
    "runner/v2/graphs.py": [
        ("V2: any batch replays a graph of decodes", "uniform = counts.query_len or None", "uniform = 1", V2_GRAPHS),
        ("V2: steps with and without adapters share a graph", "num_active_loras=desc.num_active_loras,", "num_active_loras=0,", V2_LORA),
    ],
    "runner/v2/kept_tokens.py": [
        ("V2: penalties count discarded samples alone", "is_kept = (~is_discarded)", "is_kept = is_discarded", V2_ENGINE),
        ("V2: bad words are looked for one place further", "first = batch.seq_lens  #", "first = batch.seq_lens + 1  #", V2_ENGINE),
        ("V2: samples of requests with a budget are not noted", "wants_tokens = wants_tokens or with_budgets.use_thinking_budget[request_rows].any()", "pass", V2_THINKING),
    ],
    "runner/v2/logit_bias.py": [
        ("V2: a long list of one request holds for all of its batch", "ctx.expanded_idx_mapping == row", "ctx.expanded_idx_mapping >= 0", ("tests/engine/test_sampling.py",)),
        ("V2: long lists of stop tokens hold to the end", "is_own & (pos + 1 < self.min_len)", "is_own & (pos >= 0)", V2),
        ("V2: a row keeps long lists of the request before", "        self._long.pop(req_idx, None)  # of the row's last request\n", "", ("tests/engine/test_sampling.py",)),
    ],
    "runner/v2/ngram.py": [
        ("V2: drafts are looked up with another request's length", "lengths = self._states.total_len.gpu.index_select(0, idx_mapping)", "lengths = self._states.total_len.gpu[: len(idx_mapping)]", V2_REAL_TEXT),
        ("V2: the last tokens of a request are found where they are", "is_found = places < lengths - size", "is_found = places <= lengths - size", V2),
    ],
    "runner/v2/order.py": [
        ("V2: a slot's next request has the same block table on the device", ", self.filled = places, req_ids, free", ", _ = places, req_ids, free", V2),
        ("V2: the fused pass reads the tables of a place's former request", "rows[place] = self._in_tables[place] = row", "rows[place] = row", V2),
        ("V2: a request that comes back is looked for in its old row", "{*self.filled, *map(self.places.__getitem__, arrived)}", "self.filled", V2),
        ("V2: a request that computes its prompt again still counts as a decode", "\n        and not states.some_prefill", "", V2),
        ("V2: a request that comes back keeps the batch in which it was", "\n        and not arrived", "", V2),
        ("V2: a batch of as many other requests is the last one", "\n        and req_ids is last.req_ids", "", V2),
        ("V2: a step of decodes has the drafts of the one before", "\n        and num_tokens == last.num_tokens", "", V2),
        ("V2: requests of a batch change places in every step", "                placed[place] = req_id", "                others.append(req_id)", V2),
        ("V2: prefills of latent attention keep places among decodes", "if place < len(names) and (place < num_decodes) == (index < num_decodes):", "if place < len(names):", V2),
    ],
    "runner/v2/output.py": [
        ("V2: samples never reach their record", "self._note(self._output)", "pass", V2_ENGINE),
        ("V2: masks of rejected drafts are handed out", "np.arange(*each) for each in zip(starts, starts + counts)", "np.arange(*each) for each in zip(starts, starts + counts[::-1])", V2_ENGINE),
        ("V2: rows of prompts that are not complete are handed out", "if row is not None and is_finished else None", "if row is not None else None", V2),
        ("V2: samples of prompts' chunks reach the scheduler", "for req in self._discard:", "for req in ():", V2_ENGINE),
        ("V2: scores of named tokens stay on the device", '{\n                    req_id: scores.to("cpu", non_blocking=True) for req_id, scores in named.items()\n                }', "named", ("tests/npu/on_device/test_sampling.py::test_prompts_are_scored_by_v2",)),
        ("V2 takes logits that are no numbers", "                raise_if_nan_logits(counts)\n", "                pass\n", V2_ENGINE),
    ],
    "runner/v2/prompt_embeds.py": [
        ("V2: embeddings are those of another slot", "prompts = {row: self._prompts[int(request_rows[row])] for row in rows}", "prompts = {row: self._prompts[int(request_rows[rows[0]])] for row in rows}", V2),
    ],
    "runner/v2/prompt_scores.py": [
        ("V2: prompts are scored without their adapter", "int(adapters.lora_ids[request_row])", "0", V2_LORA),
        ("V2: scores of named tokens end with the first chunk of a prompt that has an adapter", "            tokens_of.update(worker.token_id_scores)", "            pass", V2_LORA),
    ],
    "runner/v2/request_states.py": [
        ("V2: drafts continue a discarded sample where nothing else has changed", "if not (all_count and request_rows is self._settled):", "if request_rows is not self._settled:", V2),
        ("V2: the sample of a request that sat a step out is another slot's", "left_out = left_out[np.argsort(self.rows[left_out])]", "left_out = left_out[np.argsort(-self.rows[left_out])]", V2),
        ("V2: synchronous samples are entered a place too late", "places = self.num_computed_tokens_np[request_rows] + num_scheduled", "places = self.num_computed_tokens_np[request_rows] + num_scheduled + 1", V2),
        ("V2: a slot keeps the sample of its former request", "        self.rows[request_row] = NO_PREVIOUS_ROW", "        pass", V2),
        ("V2: penalties count token 0 where a prompt has an embedding", "return np.where(self.is_token_ids[request_row, :length], ids, UNKNOWN_TOKEN)", "return ids", V2),
        ("V2: a slot keeps the places of an earlier request's embeddings", "            self.is_token_ids[request_row] = True", "            pass", V2),
        ("V2: stages are not told what was sampled", "            self.token_ids[request_row, start : start + len(tokens)] = tokens", "            pass", V2),
        ("V2: drafts of another request follow a sample", "torch.cat((sampled_token_ids[:, None], drafts, drafts), 1)", "torch.cat((sampled_token_ids[:, None], drafts.flip(0), drafts), 1)", V2),
    ],
    "runner/v2/rope.py": [
        ("V2: a slot's next request has the positions of the one before it", "delta))\n        self._followed = np.empty(0, np.int64)", "delta))", V2),
    ],
    "runner/v2/runner.py": [
        ("experts of V2 never move", "    @step_eplb_after()\n    def sample_tokens", "    def sample_tokens", MOVED),
        ("V2: nobody looks at what a graph reads past its step", "        self.graphs.check_padding(in_flight, self.preparer)\n", "", V2_GRAPHS),
        ("V2: drafters read the ids of images", "images = self._images_after(batch)", "pass", V2_SEES),
        ("V2: drafters read images one token late", "draft_lookahead=1", "draft_lookahead=0", V2_SEES),
        ("V2: connectors never hear that a step has ended", "output.kv_connector_output = self.kv_connector.post_forward(state.finished_req_ids)", "output.kv_connector_output = None", ("tests/engine/test_own_connector.py",)),
        ("V2: graphs are captured over metadata that warming up has filled", "        in_flight = self._all_padding(cudagraph_runtime_mode, desc)\n        self.prep_device.synchronize()\n", "        in_flight = warm\n        self.prep_device.synchronize()\n", STATES_OF_DRAFTS),
        ("V2: prompts of embeddings have log-probabilities", "            self.prompt_logprobs_worker.uses_prompt_logprobs[request_rows] = False", "            pass", EMBEDS),
        ("V2: nobody gets scores of named tokens", "prompt_token_id_logprobs_dict=scores.named", "prompt_token_id_logprobs_dict={}", V2_ENGINE),
        ("V2: dummy steps of M-RoPE read positions at another address", "            self.model_state.positions = arrays.mrope_positions", "            pass", ("tests/engine/test_multimodal.py::test_v2_sees_what_v1_sees[graphs]",)),
        ("a user's logits processors of V2 write when a request arrives only", "                self.sampler.apply_staged_writes()\n", "                pass\n", V2_ENGINE),
    ],
    "runner/v2/sampler.py": [
        ("V2: a row keeps the parameters of its former request", "if may_compare and params == self._entered.get(req_idx):", "if req_idx in self._entered:", V2_ENGINE),
        ("V2: NaNs are counted in what sampling parameters leave of logits", "self._num_nans(logits,", "self._num_nans(processed,", V2),
        ("V2: NaNs of a request's drafts go to the requests after it", "if len(rows_of_logits) == len(request_rows):", "if True:", V2),
        ("V2: drafts are verified by what the first one was drawn from", "num_steps + input_batch.expanded_local_pos[rows]", "num_steps", V2),
    ],
    "runner/v2/setup.py": [
        ("V2: layers with windows share the builder of full attention", "        if len(split) > len(groups):", "        if False:", V2_EPISODES),
        ("a user's logits processors of V2 read no tokens", "            self.req_states.keeps_all_tokens = True\n", "            pass\n", V2_ENGINE),
    ],
    "runner/v2/speculator.py": [
        ("V2: later passes of a draft model attend to a token less", "            seq_lens_np += np.int32(self.num_extra_query_per_req)", "            pass", V2_DRAFT_MODEL),
        ("V2: logits of drafts are kept by row", "at = requests.idx_mapping * self", "at = torch.arange(len(logits)) * self", V2),
        ("V2: drafts after an image rotate by their places in the sequence", "places = positions if rotations is None else rotations", "places = positions", V2_SEES),
        ("V2: the first draft pass reads tokens that are not shifted", "input_ids.roll(-1)", "input_ids.clone()", V2),
    ],
    "runner/v2/stages.py": [
        ("V2: a stage counts samples of freed rows", "discard=found.discard | is_freed", "discard=found.discard", V2),
        ("V2: a stage goes on before samples have come", "        found.sending.wait()\n", "", V2),
        ("V2: a stage takes samples in a step too late", "deque([None] * stages.world_size)", "deque([None] * (stages.world_size + 1))", V2),
    ],
    "runner/v2/step_inputs.py": [
        ("V2: the next batch has the inputs of the one before", "if kept is None or kept[1] is not requests:", "if kept is None:", V2),
        ("V2: a batch of the same sizes has the requests of the one before", "            vars(last).update(of_requests)\n", "", V2),
        ("V2: a step has the inputs of another buffer", "self._inputs.get(staged)", "next(iter(self._inputs.values()), None)", V2),
        ("V2: logits of padding are sampled", "logits_indices: Any = slice(num_logits)", "logits_indices: Any = slice(None)", V2_GRAPHS),
    ],
    "runner/v2/thinking.py": [
        ("V2: a request has not begun to think in its prompt", "self._markers.last_of(token_ids)", "[-1, -1]", V2_THINKING),
    ],
    "runner/v2/verification.py": [
        ("V2: drafts follow the first token of a prompt that ends", "arrays.query_start_loc[1 : num_reqs + 1].sub(num_rejected)", "arrays.query_start_loc[:num_reqs].add(num_valid)", V2),
        ("V2: drafts that a grammar forbids are accepted", "is_rejected.logical_or_(is_forbidden)", "pass", V2),
        ("V2: a request's places continue those of the request before it", "return rows - self._expanded(starts)", "return rows", V2),
        ("V2: a draft that a grammar forbids is verified like any other", "draft_token_ids = draft_token_ids.masked_fill(is_forbidden, -1)", "pass", V2),
    ],
    "runner/v2/watched.py": [
        ("V2: the full check finds samples by the rows that it checks", "found[req_id]\n            for req_id, request_row", "int(states.samples.rows[request_row])\n            for req_id, request_row", ("tests/engine/test_full_check.py",)),
    ],
    "scheduling/blocks.py": [
        ("drafts have no states", "                there -= manager.num_speculative_blocks  #", "                there -= 0  #", (f"{SEED}[52]",)),
        ("the state at the end of a prompt keeps nobody waiting", "                    cached = 0\n", "                    pass\n", (f"{SEED}[111]",)),
        ("a block is cached one block late", "(blocks + 1) * manager.block_size", "(blocks + 2) * manager.block_size", SCHEDULING),
        ("a window's blocks are freed one block late", "manager.block_size - skipped % manager.block_size", "2 * manager.block_size - skipped % manager.block_size", SCHEDULING),
        ("a state is left one block late", "(num_tokens - 1) // manager.block_size + 1)", "(num_tokens - 1) // manager.block_size + 2)", SCHEDULING),
        ("a chunk's blocks are freed one chunk late", "(num_tokens // size + 1) * size", "(num_tokens // size + 2) * size", SCHEDULING),
    ],
    "scheduling/outputs.py": [
        ("stale outputs are appended as if new", "                or request.num_stale_output_tokens\n", "", SCHEDULING),
        ("events of a request are lost", "                or request.events\n", "", SCHEDULING),
        ("prefill statistics are lost", "                or request.prefill_stats is not None\n", "", SCHEDULING),
        ("special rows are plain", "                or request.traits & SPECIAL\n", "", SCHEDULING),
        ("an output one token too long", "length >= request.stop_length", "length > request.stop_length", SCHEDULING),
        ("a stop among accepted drafts is missed", "else request.stop_tokens.isdisjoint(new_ids)", "else new_ids[-1] not in request.stop_tokens", SCHEDULING),
        ("a stop token is missed", "new_ids[0] not in request.stop_tokens", "True", SCHEDULING),
        ("tokens in flight after a verified draft", "request.num_in_flight_tokens -= num_scheduled", "request.num_in_flight_tokens -= num_new", SCHEDULING),
        ("rejected drafts count as computed", "                    if request.num_computed_tokens > 0:\n", "                    if False:\n", SCHEDULING),
        ("rejected drafts stay placeholders", "                    if request.num_output_placeholders > 0:\n", "                    if False:\n", SCHEDULING),
        ("drafts that a grammar refused count as proposed", "num_drafts -= invalid_drafts.get(request_id, 0)", "pass", SCHEDULING),
        ("images stay in the encoder's cache", "                scheduler._free_encoder_inputs(request)\n", "                pass\n", SCHEDULING),
        ("hashes of blocks that drafts filled are missing", "if length % hash_block_size < num_new:", "if length % hash_block_size == 0:", SCHEDULING),
        ("placeholders are cached", "else request.num_output_placeholders", "else 0", SCHEDULING),
        ("blocks of asynchronous decodes are not cached", "                if cacheable >= request.cached_until:\n", "                if False:\n", SCHEDULING),
        ("trace headers are lost", "if not traits & TRACED", "if True", SCHEDULING),
        ("special outputs come first", "before = len(self.outputs.get(client, ()))", "before = 0", SCHEDULING),
        ("clients in another order", "{client: number - 0.5 for", "{client: number + 9.5 for", SCHEDULING),
        ("statistics of drafts forget accepted tokens", "stats.num_accepted_tokens += rows * num_accepted", "stats.num_accepted_tokens += num_accepted", SCHEDULING),
        ("statistics of drafts forget positions", "stats.num_draft_tokens_per_pos[position] += rows", "stats.num_draft_tokens_per_pos[position] += 1", SCHEDULING),
        ("outputs of requests that failed come in between", "        or output.finish_reason is not FinishReason.ERROR\n", "        or True\n", SCHEDULING),
        ("a request that is gone has a row", "                request is None\n                or request.status", "                request.status", SCHEDULING),
        ("a request that does not run has a plain row", "                or request.status is not RUNNING\n", "", SCHEDULING),
        ("outputs do not grow", "            request._output_token_ids += new_ids\n", "", SCHEDULING),
        ("placeholders of accepted drafts stay", "request.num_output_placeholders -= num_new", "request.num_output_placeholders -= 1", SCHEDULING),
        ("statistics go to the last client", "next(iter(joined.values()))", "next(reversed(joined.values()))", SCHEDULING),
    ],
    "scheduling/requests.py": [
        ("a decode is quiet past its last block", "            request.blocks_until,\n", "", SCHEDULING),
        ("a decode is quiet past its window", "            request.window_until,\n", "", SCHEDULING),
        ("a decode without news gets a token past its last one", "request.stop_length - 1,", "request.stop_length + 1,", SCHEDULING),
        ("structured output goes unseen in decodes without news", "    if not request.traits & GRAMMAR:\n", "    if True:\n", SCHEDULING),
        ("requests with log-probabilities are plain", "        or params.num_logprobs is not None\n", "", SCHEDULING),
        ("repetitions are not looked for", "        or params.repetition_detection is not None\n", "", SCHEDULING),
        ("streamed input is plain", "        or request.resumable\n        or request.spec", "        or request.spec", SCHEDULING),
        ("EOS is missed", "        stops.add(params.eos_token_id)\n", "        pass\n", SCHEDULING),
        ("requests that are pooled are plain", "        or request.pooling_params is not None\n", "", SCHEDULING),
        ("requests with prompt log-probabilities are plain", "        or params.prompt_logprobs is not None\n", "", SCHEDULING),
    ],
    "scheduling/running.py": [
        ("a connector sees structured output too early", "        cached = output.scheduled_cached_reqs\n", "        cached = output.scheduled_cached_reqs\n        self.tell_of_grammars(output)\n", (f"{RARE}[2-drafts beside a connector]",)),
        ("a step more after max_tokens is on its way", "computed + 2 - placeholders >= request.last_length", "computed + 1 - placeholders >= request.last_length", SCHEDULING),
        ("a decode is a step late under Model Runner V2", "if eligible and step < request.next_decode_eligible_step:", "if eligible and step <= request.next_decode_eligible_step:", SCHEDULING),
        ("drafts past max_model_len", "min(new, longest - computed)", "min(new, longest + 1 - computed)", SCHEDULING),
        ("decodes past the token budget", "            if new > budget:\n", "            if False:\n", SCHEDULING),
        ("no blocks for the tokens that drafters look ahead", "computed + new + lookahead > request.blocks_until", "computed + new > request.blocks_until", SCHEDULING),
        ("a full block is cached a step late", "computed + 1 - placeholders >= request.cached_until", "computed - placeholders >= request.cached_until", SCHEDULING),
        ("blocks stay when they leave the window", "                    or computed - in_flight >= request.window_until\n", "", SCHEDULING),
        ("a step does not tell of its grammars", "                taken.grammar = True\n", "                taken.grammar = False\n", SCHEDULING),
        ("a step does not wait for the tokens of its grammars", "taken.grammar_pending |= asynchronous and placeholders > 0", "taken.grammar_pending |= False", SCHEDULING),
        ("outputs under way are not counted", "add_output(len(request._output_token_ids) + placeholders)", "add_output(len(request._output_token_ids))", SCHEDULING),
        ("drafts are verified that were cut", "drafts if whole else drafts[: new - 1]", "drafts", SCHEDULING),
        ("drafts are verified twice", "                request.spec_token_ids = []\n", "                pass\n", SCHEDULING),
        ("tokens in flight without drafts", "request.num_in_flight_tokens = in_flight + new", "request.num_in_flight_tokens = in_flight + 1", SCHEDULING),
        ("placeholders without drafts", "request.num_output_placeholders = placeholders + new", "request.num_output_placeholders = placeholders + 1", SCHEDULING),
        ("no room for the next drafts", "                        request.spec_token_ids = next_drafts", "                        request.spec_token_ids = []", SCHEDULING),
        ("decodes of a request are not kept apart", "                        request.next_decode_eligible_step = eligible", "                        request.next_decode_eligible_step = step", SCHEDULING),
        ("tokens of a request that was away are not sent", "if not had.issuperset(taken.req_ids):", "if False:", SCHEDULING),
        ("the last decode is taken, too", "                return index\n", "                return index + 1\n", SCHEDULING),
        ("a decode with nothing to compute counts as scheduled", "bool(placeholders and computed + 2 - placeholders >= noted.last_length)", "False", SCHEDULING),
        ("the last token of a prompt is a decode", "known + placeholders - computed != 1 or request.is_prefill_chunk:", "known + placeholders - computed != 1:", SCHEDULING),
        ("a decode at max_model_len is computed", "if enough or new <= 0:", "if enough or new < 0:", SCHEDULING),
        ("drafts cost no budget", "            budget -= new\n", "            budget -= 1\n", SCHEDULING),
        ("drafts are not computed", "request.num_computed_tokens = computed + new\n", "request.num_computed_tokens = computed + 1\n", SCHEDULING),
        ("new blocks are another request's", "taken.new_block_ids[len(taken.req_ids)] = ids", "taken.new_block_ids[taken.num_requests] = ids", SCHEDULING),
        ("tokens of those that upstream scheduled are missing", "        scheduled.update(self.others)\n", "", SCHEDULING),
        ("a step forgets the tokens that were taken", "output.total_num_scheduled_tokens += self.num_tokens", "output.total_num_scheduled_tokens += 0", SCHEDULING),
        ("drafts of those that upstream scheduled are missing", "            self.drafts.update(output.scheduled_spec_decode_tokens)\n", "", SCHEDULING),
        ("a grammar that upstream scheduled is forgotten", "output.has_structured_output_requests |= self.grammar", "output.has_structured_output_requests = self.grammar", SCHEDULING),
        ("tokens of a grammar that upstream scheduled are forgotten", "output.pending_structured_output_tokens |= self.grammar_pending", "output.pending_structured_output_tokens = self.grammar_pending", SCHEDULING),
        ("requests that were taken get no new blocks", "            blocks[index] = ids\n", "            pass\n", SCHEDULING),
        ("requests that were taken come last", "self.req_ids + cached.req_ids", "cached.req_ids + self.req_ids", SCHEDULING),
        ("new blocks in another order", "blocks + cached.new_block_ids", "cached.new_block_ids + blocks", SCHEDULING),
        ("computed tokens in another order", "self.num_computed_tokens + cached.num_computed_tokens", "cached.num_computed_tokens + self.num_computed_tokens", SCHEDULING),
        ("output tokens in another order", "self.num_output_tokens + cached.num_output_tokens", "cached.num_output_tokens + self.num_output_tokens", SCHEDULING),
        ("tokens of those that upstream resumed are missing", "self.all_token_ids | cached.all_token_ids", "self.all_token_ids", SCHEDULING),
        ("a decode that is kept apart counts as scheduled", "self._staggers and self.scheduler.current_step + 1 < noted", "False and self.scheduler.current_step + 1 < noted", SCHEDULING),
        ("a decode at max_model_len counts as scheduled", "            or computed >= longest\n", "", SCHEDULING),
        ("a request that a stage has in flight counts as scheduled", "            or computed >= request.num_tokens_with_spec + placeholders\n", "", SCHEDULING),
        ("prompts wait as if a stage had them in flight", "if known + placeholders > computed or request.spec_token_ids:", "if request.spec_token_ids:", SCHEDULING),
        ("stages get another token than the last one", "request._all_token_ids[computed : computed + 1]", "request._all_token_ids[computed - 1 : computed]", SCHEDULING),
        ("tokens of stages in another order", "self.new_token_ids + cached.new_token_ids", "cached.new_token_ids + self.new_token_ids", SCHEDULING),
        ("a connector sees requests that are counted already", "at_once = not self._counts_later", "at_once = not self.scheduler.defer_block_free", SCHEDULING),
        ("a connector gets no blocks of decodes that were taken", "            output.kv_connector_block_state.req_ids.update(self.req_ids)\n", "            pass\n", SCHEDULING),
        ("blocks are freed while a step writes to them", "                request.last_sched_seq = sequence\n", "                pass\n", SCHEDULING),
        ("beside a connector drafts are not computed", "            request.num_computed_tokens += new\n", "            request.num_computed_tokens += 1\n", SCHEDULING),
        ("beside a connector drafts are not in flight", "            request.num_in_flight_tokens += new\n", "            request.num_in_flight_tokens += 1\n", SCHEDULING),
        ("beside a connector drafts have no placeholders", "                request.num_output_placeholders += new\n", "                request.num_output_placeholders += 1\n", SCHEDULING),
        ("beside a connector the next drafts have no room", "                if speculates:\n                    request.spec_token_ids = next_drafts", "                if speculates:\n                    request.spec_token_ids = []", SCHEDULING),
    ],
    "scheduling/scheduler.py": [
        ("rows whose blocks were not loaded get tokens", "transfers.invalid_block_ids or transfers.failed_recving", "False", (f"{SEED}[45]",)),
        ("requests are admitted beside others that wait for blocks", "return late and asks and not self._blocks_suffice()", "return False", (f"{RARE}[10-adapters of requests that wait for blocks]",)),
        ("a step that upstream fails counts as scheduled", "            self.decodes.give_back(taken)\n", "", ("tests/scheduling/test_calls.py",)),
        ("more requests than may be active", "        self.max_num_active_reqs -= taken.num_requests\n", "        pass\n", SCHEDULING),
        ("a victim by priority is among the decodes that were taken", "get_num_free_blocks() >= most", "get_num_free_blocks() >= 0", SCHEDULING),
        ("prompts are not cut beside decodes", "return num_running + num_taken, num_waiting", "return num_running, num_waiting", SCHEDULING),
        ("an adapter too many", "len(active) < self.lora_config.max_loras", "True", SCHEDULING),
        ("no adapter besides those that run", "or request.lora_request.lora_int_id in active", "or False", SCHEDULING),
        ("admission does not know of decodes", "if throttle_prefills or (anyone_waits and self._admission_asks_for_decodes):", "if throttle_prefills:", SCHEDULING),
        ("throttled prefills run beside decodes", "if throttle_prefills or (anyone_waits and self._admission_asks_for_decodes):", "if anyone_waits and self._admission_asks_for_decodes:", SCHEDULING),
        ("decodes run while all are paused", "            or self._pause_state == PauseState.PAUSED_ALL\n", "", SCHEDULING),
        ("a preempted request keeps its notes on blocks", '        forget_blocks(cast("BatchedRequest", request))\n', "        pass\n", SCHEDULING),
        ("streamed input keeps its old length", "        note(session, self.max_model_len)\n", "        pass\n", SCHEDULING),
        ("drafts of a prompt's chunk are verified", "                or request.is_prefill_chunk\n", "", SCHEDULING),
        ("drafts that a grammar refuses are verified", "                or request.traits & GRAMMAR\n", "", SCHEDULING),
        ("states that entered the cache in the step before keep others waiting", "self.kv_cache_manager.new_step_starts()  #", "pass  #", SCHEDULING),
        ("states that decodes enter are found in the same step", '["new_step_starts"] = lambda: None', '["new_step_starts"] = self.kv_cache_manager.new_step_starts', SCHEDULING),
        ("decodes that were taken cost no budget", "        self.max_num_scheduled_tokens -= taken.num_tokens\n", "        self.max_num_scheduled_tokens -= 0\n", SCHEDULING),
        ("more requests run than may", "        self.max_num_running_reqs -= taken.num_requests\n", "        self.max_num_running_reqs -= 0\n", SCHEDULING),
        ("a step forgets whom it scheduled", "self.prev_step_scheduled_req_ids.update(output.num_scheduled_tokens)", "pass", SCHEDULING),
        ("counts of NaNs are lost", "            self.counts_nans = True\n", "            self.counts_nans = False\n", SCHEDULING),
        ("a request that has ended gets drafts", "                or request.is_finished()\n", "", SCHEDULING),
        ("prompts with states are cut by what decodes left", "        self.max_num_scheduled_tokens += num_taken\n        split", "        self.max_num_scheduled_tokens += 0\n        split", SCHEDULING),
        ("a step of decodes alone has no number", "            self.sched_step_seq += 1  #", "            self.sched_step_seq += 0  #", SCHEDULING),
        ("a connector sees no decodes that were taken", "            self._join(self.taken, scheduler_output)\n", "            pass\n", SCHEDULING),
        ("what a step counts as scheduled is counted twice", "scheduler_output.num_scheduled_tokens = others", "pass", SCHEDULING),
    ],
    "server/draining.py": [
        ("a second call to stop gives the engine three seconds", "    if drain is not None and drain.is_stopping:\n", "    if False:\n", ("tests/test_progress.py",)),
    ],
    "server/one_line.py": [
        ("a rank's refusal is read while another one writes", 'mine = Path(f"{path}.{os.getpid()}")', "mine = Path(path)", ("tests/test_one_line.py",)),
        ("a server's log loses tracebacks of bugs", "is_answer = type(error) is Exception and CALL_FAILED.match(str(error))", "is_answer = error is not None", ("tests/test_one_line.py",)),
    ],
    "server/processes.py": [
        ("a process of vLLM dies of SIGUSR1", "signal.signal(signal.SIGUSR1, signal.SIG_IGN)", "pass", SERVERS),
        ("an engine outlives its server", "while os.getppid() == parent:", "while True:", SERVERS),
        ("a process that does not heed SIGTERM outlives its parent", "os._exit(1)", "pass", SERVERS),
        ("an engine that ended in time is told as killed", "return self._process.is_alive() and pid is not None and psutil.pid_exists(pid)", "return self._process.is_alive()", SERVERS),
    ],
    "server/record_client.py": [
        ("a server is found from its own process only", "for each in _and_ancestors(pid) if", "for each in [pid] if", SERVERS),
        ("an answer of another program is a traceback of record", "    if not isinstance(found, dict):", "    if found is None:", ("tests/server/test_record_command.py",)),
    ],
    "server/record_server.py": [
        ("the first engine alone writes records", "for ranks in engines for rank in ranks", "for ranks in engines[:1] for rank in ranks", SERVERS),
        ("any user may have records written", "CREDENTIALS.unpack(raw)[1] in (ROOT, os.geteuid())", "True", SERVERS),
    ],
    "sleep.py": [
        ("a wake-up without memory leaves a half of it awake", "            self.release(done)\n", "            self.release(())\n", ("tests/device/test_sleep.py",)),
        ("a level 1 sleep loses weights", "self._regions[WEIGHTS] if level == 1 else self._of_drafter", "self._of_drafter", ("tests/device/test_sleep.py",)),
        ("a level 2 sleep loses drafters", "self._regions[WEIGHTS] if level == 1 else self._of_drafter", "self._regions[WEIGHTS] if level == 1 else []", ("tests/device/test_sleep.py",)),
        ("a region of weights is closed after it has passed its size", "for each in together) + shared.room > REGION_BYTES:", "for each in together) > REGION_BYTES:", ("tests/device/test_sleep.py",)),
    ],
    "startup/subjects/cache.py": [
        ("a connector that is registered by its name is taken for one of vLLM's", "        return KVConnectorFactory.get_connector_class(transfer).__module__\n", "        return None\n", ("tests/startup/test_start_up.py",)),
    ],
    "startup/subjects/features.py": [
        ("models of states by transformers' code", "            or not c.layer_types.isdisjoint(STATE_LAYERS)\n", "", ("tests/startup/test_refusals.py",)),
    ],
    "startup/subjects/graphs.py": [
        ("graphs are captured beside pinned memory that expands", "captures and EXPANDING_PINS in _allocator_settings()", "False", ("tests/startup/test_refusals.py",)),
    ],
    "startup/subjects/kernels.py": [
        ("chips whose operators nobody has read pass start-up", "and not KNOWN_CHIPS.match(device_name(c.kind.device_type))", "and False", ("tests/startup/test_refusals.py",)),
    ],
    "startup/subjects/speculation.py": [
        ("a drafter is refused under the name of its target", '"drafter": asked.drafter.model', '"drafter": asked.model.model', ("tests/startup/test_refusals.py",)),
        ("a drafter's head may be quantised", "lambda c: drafters_head_quantization(c.speculative) is not None", "lambda c: False", ("tests/startup/test_refusals.py",)),
    ],
    "startup/subjects/states.py": [
        ("gated delta nets load their weights on a CANN that lacks them", "        lambda c: c.functions_missing_for(*OPERATORS),\n", "        lambda c: False,\n", ("tests/startup/test_refusals.py",)),
    ],
    "verify/calls/call_recorder.py": [
        ("blocks and slots of captured calls are not kept", "                self._noted.append((tensor, found))", "                pass", CALLS_ON_NPU),
        ("floats are computed while calls are recorded", "or not any(map(_is_float, on_device))", "or True", CALLS_ON_NPU),
        ("caches are written while calls are recorded", 'schema.name == "aten::zeros" and ', "False and ", (f"{CALLS_ON_NPU[0]}::test_a_cache_is_not_written_while_calls_are_recorded",)),
        ("a recording waits for the ranks that tokens are sent to", "if on_device and schema.name.startswith(MC2):", "if False:", DATA_PARALLEL_CALLS),
        ("the other data-parallel ranks of a recording have no tokens", "as recorder, skip_dp_coordination():", "as recorder:", DATA_PARALLEL_CALLS),
    ],
    "verify/calls/call_rows.py": [
        ("a call that memory does not hold switches its operator off", "except torch.OutOfMemoryError as error:", "except MemoryError as error:", (f"{CALLS_ON_NPU[0]}::test_a_call_that_memory_does_not_hold_is_left_out",)),
        ("a kernel that is compiled first counts as slower", "SLOWER * of_form < taken <= LONG", "SLOWER * of_form < taken", (f"{CALLS_ON_NPU[0]}::test_a_call_that_takes_longer_than_kernels_do_is_not_slower",)),
        ("calls of two operators have one row's name", "        seen[operator] += 1\n", "        seen[call.name] += 1\n        seen[operator] = seen[call.name]\n", (f"{CALLS_ON_NPU[0]}::test_each_call_has_a_row_with_a_name_of_its_own",)),
        ("a result that changes later is the same", "if torch.equal(_words(one), _words(two)):", "if True:", CALLS_ON_NPU),
        ("no recorded call is captured", "        if call.captured:", "        if False:", CALLS_ON_NPU),
        ("graphs are told the numbers that they were captured with", '                ("replayed with its own numbers", OWN, first),\n', "", CAPTURED_EXPERTS),
    ],
    "verify/calls/call.py": [
        ("a call made again has no offset", "return host.as_strided(shape, strides, offset)", "return host.as_strided(shape, strides)", CALLS),
        ("a captured call is taken for an eager one", "return cls(operator, arguments, captured)", "return cls(operator, arguments)", CALLS_ON_NPU),
        ("a table of cosines is a cache of blocks", ' and len(value["shape"]) > 2', "", CALLS),
        ("floats tell no keys apart", "SPREAD = 3.0", "SPREAD = 0.5", CALLS),
        ("calls over a cache of another size are others", "            if self._has_blocks(name):", "            if False:", CALLS),
        ("lengths of any size are one kind", "(max(value) - 1).bit_length()]", "0]", CALLS),
    ],
    "verify/calls/expected.py": [
        ("any place of a largest number is right", "given.max(-1).values, rows, 0.0, given", "given.max(-1).values, rows, 9.0, given", CALLS),
    ],
    "verify/calls/expected_attention.py": [
        ("a recorded window is one key too short", 'a["pre_tokens"] + 1', 'a["pre_tokens"]', CALLS),
    ],
    "verify/calls/expected_part.py": [
        ("the last rows of a result are not compared", "torch.linspace(0, count - 1, most)", "torch.linspace(0, count - 2, most)", CALLS),
    ],
    "verify/calls/fitting.py": [
        ("drawn slots have no padding", "slots.masked_fill_(torch.arange(len(slots)) % GAP == GAP - 1, -1)", "pass", CALLS),
        ("the largest number of a wide row is in any part", "column]] = LARGEST", "column]] *= 1", (f"{TABLE_ON_NPU}::test_an_engine_serves_right_tokens_beside_a_stale_scale",)),
        ("graphs are told short contexts alone", "[room, *beside]", "[size, *beside]", LONG_CONTEXTS),
        ("graphs of one version of attention are told no lengths", '("block_table", "actual_seq_kvlen"),', "(),", LONG_CONTEXTS),
        ("graphs are told no other sizes of groups", '(("group_list",), _sizes_of_groups)', "((), _sizes_of_groups)", CAPTURED_EXPERTS),
        ("rows are written to one place by chance", "    index.copy_(torch.randperm(count, generator=random)[places].view(index.shape))", "    pass", CALLS),
        ("graphs read the null block alone", "        table.masked_fill_(~table.any(), -1)\n", "", LONG_CONTEXTS),
        ("a mask is a random one", "    if mask is not None and not mask.is_floating_point():", "    if False:", CALLS),
    ],
    "verify/calls/start_up.py": [
        ("a table of another device is read", "    table.refuse_other_software(here)\n", "", TABLE),
    ],
    "verify/calls/table.py": [
        ("a wrong call without another form is taken", "if result.verdict.is_bad and result.torch_got != \"\":", "if False:", TABLE),
        ("calls that a lost device did not begin are dead for good", "if key and result.seconds and", "if key and", TABLE),
        ("a call that was left out takes torch's form", " and result.verdict is not Verdict.LEFT_OUT:", ":", TABLE),
        ("a row that was cut off ends the reading", "        for line in lines[:-1]:", "        for line in lines:", TABLE),
        ("a table of another model is read", "        if other:\n", "        if False:\n", TABLE),
    ],
    "verify/calls/verified.py": [
        ("what makes room counts as an unverified call", "    if not is_tried(function):\n", "    if False:\n", ("tests/npu/on_device/test_verified.py",)),
        ("shapes that nobody tried keep a kernel that was wrong", "trusts_others=not wrong", "trusts_others=True", ("tests/npu/on_device/test_verified.py",)),
    ],
    "verify/command.py": [
        ("the table of verify-device needs a folder only when all has run", "    if args.markdown and not args.markdown.absolute().parent.is_dir():", "    if False:", ("tests/npu/test_verify_device.py::test_a_page_without_a_folder_is_refused_before_any_row",)),
    ],
    "verify/fused.py": [
        ("an operator that computes wrongly stays on", "return not outcome.verdict.is_bad", "return True", FUSED),
    ],
    "worker.py": [
        ("the first engine's worker stays in a patch of vLLM", "look_at_models_before_weights(look_at_model)", "look_at_models_before_weights(lambda *seen: (self, look_at_model(*seen)))", ("tests/soak/test_engines.py::test_nothing_of_the_first_engine_of_a_process_outlives_it",)),
        ("models without a cache are first traced over a step", "        if not self.model_runner.kv_caches:", "        if False:", POOLING),
        ("a rank without memory to wake up leaves the other one awake", "                sleeping.release(mapped)\n", "                sleeping.release(())\n", ("tests/device/test_sleep.py",)),
        ("a sleep that failed also wakes what slept before it", "                memory.restore(slept)\n", "                memory.resume()\n", ("tests/device/test_sleep.py",)),
        ("tokens wait while free memory is returned", "if nobody_runs and self._tokens_since_return", "if self._tokens_since_return", ("tests/device/test_cpu_memory.py",)),
        ("the allocator keeps what long prompts left", "            self.prep_device.return_free_memory()\n", "            self.prep_device.memory_in_use()\n", ("tests/device/test_cpu_memory.py",)),
        ("a connector's cache sleeps while it is registered", "        kv_connector.forget_caches()\n", "", ("tests/test_releases.py",)),
        ("a rank without requests shows where it waited for a lost one", "self._run(super().execute_dummy_batch)", "super().execute_dummy_batch()", FAILURES),
    ],
}
# fmt: on

MUTANTS = [
    Mutant(name, path, before, after, tests)
    for path, rows in PLANTED.items()
    for name, before, after, tests in rows
]
