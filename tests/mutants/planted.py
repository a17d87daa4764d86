"""The planted bugs: one line of the package each, and the tests that ought to notice."""

from dataclasses import dataclass

CORE = ("tests/prep", "tests/attention", "tests/ops", "tests/test_explain_command.py")
ENGINE = ("tests/runner", "tests/engine")
BOOKS = ("tests/runner/test_bookkeeping.py",)
COUNTS = ("tests/npu/test_suites_on_device.py::test_on_the_device[steps]",)
ON_NPU = "tests/npu/test_on_emulated_npu.py::test_tokens_equal_the_reference_family"
FIA = (f"{ON_NPU}[fia-eager]",)
ATB = (f"{ON_NPU}[atb-eager]",)
FIA_PIECES = (f"{ON_NPU}[fia-piecewise]",)
FIA_FULL = (f"{ON_NPU}[fia-full]",)
DRAFTING = ("tests/ops/test_drafting.py",)
EMBEDS = ("tests/engine/test_prompt_embeds.py",)
POOLING = ("tests/engine/test_pooling.py",)
LORA = ("tests/ops/test_lora.py", "tests/engine/test_lora.py")
GRAPHS = ("tests/graph", "tests/engine/test_graphs.py")
TRANSFER = ("tests/engine/test_kv_transfer.py",)
RESETS = ("tests/engine/test_weights_and_resets.py",)


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


MUTANTS = [
    Mutant(
        "positions start at zero in every chunk",
        "prep/kernels.py",
        "positions[start + offset] = first + offset",
        "positions[start + offset] = offset",
    ),
    Mutant(
        "slot of the logical block",
        "prep/kernels.py",
        "slot = block_entries[row + block] * block_size",
        "slot = block * block_size",
    ),
    Mutant(
        "slots of a block's later tokens shifted",
        "prep/kernels.py",
        "slot_mapping[group, token + offset] = slot + offset",
        "slot_mapping[group, token + offset] = slot",
    ),
    Mutant(
        "first group's block table for all groups",
        "prep/kernels.py",
        "row = table + req * width",
        "row = req * width",
    ),
    Mutant("padding writes slot 0", "prep/kernels.py", "PAD_SLOT_ID = -1", "PAD_SLOT_ID = 0"),
    Mutant(
        "short query_start_loc in a mixed full graph",
        "prep/kernels.py",
        "            end = num_input_tokens\n",
        "            end = end\n",
    ),
    Mutant(
        "padding decodes of one token under speculation",
        "prep/kernels.py",
        "min(end + decode_query_len, num_input_tokens)",
        "min(end + 1, num_input_tokens)",
    ),
    Mutant(
        "stale lengths in padding rows", "prep/kernels.py", "seq_lens[req] = 0", "seq_lens[req] = 1"
    ),
    Mutant(
        "one logit too few for drafts",
        "prep/kernels.py",
        "range(end - 1 - drafts, end)",
        "range(end - drafts, end)",
    ),
    Mutant(
        "whole prompts are discarded",
        "prep/kernels.py",
        "seq_len < num_tokens[req]",
        "seq_len <= num_tokens[req]",
    ),
    Mutant(
        "sampled token placed behind the drafts",
        "prep/kernels.py",
        "tail_int64[previous_rows[req]] = end - 1 - drafts",
        "tail_int64[previous_rows[req]] = end - 1",
    ),
    Mutant(
        "decodes win over drafts",
        "prep/state.py",
        "if facts & SOME_DRAFTS and not facts & SOME_BEYOND_DRAFTS:",
        "if facts & SOME_DRAFTS and facts & SOME_BEYOND_DRAFTS:",
    ),
    Mutant(
        "one fresh request makes a prefill",
        "prep/kernels.py",
        "if first > 0:",
        "if first > 0 and req == 0:",
    ),
    Mutant(
        "chunked prefill ignored",
        "prep/state.py",
        "if not chunked_prefill and",
        "if chunked_prefill and",
    ),
    Mutant("a token can't see itself", "prep/mask.py", "columns > rows", "columns >= rows"),
    Mutant(
        "window one too wide",
        "prep/mask.py",
        "columns <= rows - sliding_window",
        "columns < rows - sliding_window",
    ),
    Mutant(
        "padding rows mask everything",
        "prep/mask.py",
        "masked = np.zeros((num_rows, max_seq_len), dtype=bool)",
        "masked = np.ones((num_rows, max_seq_len), dtype=bool)",
    ),
    Mutant(
        "rows of the device mask by index, not by position",
        "attention/mask_cache.py",
        "index_select(0, positions)",
        "index_select(0, torch.arange(len(positions)))",
    ),
    Mutant(
        "mask cache changes a matrix in flight",
        "attention/mask_cache.py",
        "        matrix = self._matrices.get((sliding_window, value))\n",
        "        matrix = self._matrices.get((sliding_window, value))\n"
        "        _ = matrix.zero_() if matrix is not None else None\n",
    ),
    Mutant(
        "compressed mask off by one in chunks",
        "attention/kernels/reference.py",
        "masked = lookup(ahead)",
        "masked = lookup(ahead - 1)",
    ),
    Mutant(
        "kv length off by one",
        "attention/kernels/reference.py",
        "visible = (columns < seq_lens[:, None])",
        "visible = (columns < seq_lens[:, None] - 1)",
    ),
    Mutant(
        "V written from K",
        "attention/kernels/reference.py",
        "zip(kv_cache, (key, value))",
        "zip(kv_cache, (key, key))",
    ),
    Mutant(
        "query heads grouped wrongly",
        "attention/kernels/reference.py",
        "visible.repeat(1, 1, group, 1)",
        "visible.repeat_interleave(group, 2)",
    ),
    Mutant(
        "metadata keeps the mask of another state",
        "attention/backend.py",
        "step.attn_state, step.num_input_tokens, step.max_seq_len",
        "type(step.attn_state)(0), step.num_input_tokens, step.max_seq_len",
        ENGINE,
    ),
    Mutant(
        "async: sampled tokens are not placed",
        "model_runner.py",
        "        if step.batch.num_sampled_rows:\n",
        "        if False:\n",
        ENGINE,
    ),
    Mutant(
        "async: sampled tokens of other rows",
        "attention/block_tables.py",
        "self.previous_rows[:num_reqs] = self._rows[:num_reqs]",
        "self.previous_rows[:num_reqs] = 0",
        ENGINE,
    ),
    Mutant(
        "seq_lens not rebound",
        "model_runner.py",
        "        self.seq_lens = device.seq_lens\n",
        "",
        ENGINE,
    ),
    Mutant(
        "drafters get no common metadata",
        "model_runner.py",
        "        return metadata, common",
        "        return metadata, None",
        ENGINE,
    ),
    Mutant(
        "copy ends before the logits indices",
        "model_runner.py",
        "self.staging.submit(step.nbytes)",
        "self.staging.submit(step.nbytes - step.layout.max_logits * 8)",
        ENGINE,
    ),
    Mutant(
        "prefix hits counted as fresh",
        "model_runner.py",
        "num_computed_tokens=batch.num_computed_tokens_cpu",
        "num_computed_tokens=batch.num_computed_tokens_cpu * 0",
        ENGINE,
    ),
    Mutant(
        "a rejected draft is kept",
        "ops/rejection.py",
        "device=output.device) <= num_accepted",
        "device=output.device) <= num_accepted + 1",
    ),
    Mutant(
        "drafts go on behind the context's end",
        "ops/drafting.py",
        "exceeds_max = clamped_positions >= max_model_len",
        "exceeds_max = clamped_positions > max_model_len",
        DRAFTING,
    ),
    Mutant(
        "requests without drafts have a rejected one",
        "ops/drafting.py",
        "    num_rejected_tokens.masked_fill_(num_draft_tokens <= 0, 0)\n",
        "",
        DRAFTING,
    ),
    Mutant(
        "samples of discarded requests count",
        "ops/drafting.py",
        " & ~discard_request_mask[:num_reqs, None]",
        "",
        DRAFTING,
    ),
    Mutant(
        "the sample counts as drafted in parallel",
        "ops/drafting.py",
        "torch.logical_and(offsets > 0,",
        "torch.logical_and(offsets >= 0,",
        DRAFTING,
    ),
    Mutant(
        "shared block that is written is accepted",
        "inspect/scenario.py",
        "if not (is_prefix and other_is_prefix):",
        "if False:",
    ),
    Mutant(
        "dense masks beyond the budget are taken",
        "config.py",
        "fits = dense_bytes <= config.mask_budget_bytes",
        "fits = True",
        ("tests/test_config.py",),
    ),
    # --- the NPU path, on the emulated runtime
    Mutant(
        "npu: wrong keyword",
        "attention/kernels/fia.py",
        '"atten_mask": metadata.attn_mask',
        '"attn_mask": metadata.attn_mask',
        FIA,
    ),
    Mutant(
        "npu: query lengths not cumulative",
        "attention/kernels/fia.py",
        "metadata.query_start_loc_np[1:].tolist()",
        "metadata.query_lens.tolist()",
        FIA,
    ),
    Mutant(
        "npu: kv length off by one",
        "attention/kernels/fia.py",
        "metadata.seq_lens_np.tolist()",
        "(metadata.seq_lens_np - 1).tolist()",
        FIA,
    ),
    Mutant(
        "npu: missing mask",
        "attention/kernels/fia.py",
        '"atten_mask": metadata.attn_mask',
        '"atten_mask": None',
        FIA,
    ),
    Mutant(
        "npu: no causal mode",
        "attention/kernels/fia.py",
        "CAUSAL_MODE = 3",
        "CAUSAL_MODE = 0",
        FIA,
    ),
    Mutant(
        "npu: fresh kv lengths not cumulative",
        "attention/kernels/fia.py",
        "kv_lengths = query_ends",
        "kv_lengths = seq_lens",
        FIA,
    ),
    Mutant(
        "npu: paged kv lengths cumulative",
        "attention/kernels/fia.py",
        "kv_lengths = seq_lens",
        "kv_lengths = query_ends",
        FIA,
    ),
    Mutant(
        "npu: transposed cache",
        "attention/kernels/fia.py",
        "[plane.flatten(2) for plane in self._kv]",
        "[plane.transpose(2, 3).flatten(2) for plane in self._kv]",
        FIA,
    ),
    Mutant(
        "npu: cache mode left to its default",
        "attention/kernels/fia.py",
        ', cache_mode="Norm"',
        "",
        FIA,
    ),
    Mutant("npu: wrong layout", "attention/kernels/fia.py", '"TND"', '"BSND"', FIA),
    Mutant("npu: no scale", "attention/kernels/fia.py", '"scale": layer.scale,', "", FIA),
    Mutant(
        "npu: K and V change places",
        "attention/kernels/fia.py",
        "key_cache, value_cache = self._planes(kv_cache)",
        "value_cache, key_cache = self._planes(kv_cache)",
        FIA,
    ),
    Mutant(
        "npu: null block for every request",
        "attention/kernels/fia.py",
        '"block_table": metadata.block_tables',
        '"block_table": metadata.block_tables * 0',
        FIA,
    ),
    Mutant(
        "npu: query heads for K and V",
        "attention/kernels/fia.py",
        '"num_key_value_heads": layer.num_kv_heads',
        '"num_key_value_heads": layer.num_heads',
        FIA,
    ),
    Mutant(
        "npu: wrong dtype of the constant mask",
        "attention/mask_cache.py",
        "torch.ones(size, size, dtype=torch.int8",
        "torch.ones(size, size, dtype=torch.float32",
        FIA,
    ),
    Mutant(
        "npu: slots past the end",
        "attention/backend.py",
        "slots = attn_metadata.slot_mapping[:num_tokens]",
        "slots = attn_metadata.slot_mapping[:num_tokens] + (1 << 20)",
        FIA,
    ),
    Mutant(
        "npu: stale block table",
        "model_runner.py",
        "        if step.num_block_changes:\n",
        "        if False:\n",
        FIA,
    ),
    Mutant(
        "npu: staging buffer reused while its copy is in flight",
        "device/staging.py",
        "        if slot.event is not None:\n",
        "        if False:\n",
        ("tests/npu/test_suites_on_device.py::test_on_the_device[staging]",),
    ),
    Mutant(
        "npu: copy on a stream of its own",
        "device/npu.py",
        "            target[:nbytes].copy_(",
        "            with torch_npu.npu.stream(torch_npu.npu.Stream()): target[:nbytes].copy_(",
        FIA,
    ),
    Mutant(
        "npu: asynchronous output waits for the wrong stream",
        "device/npu.py",
        "current_stream=torch_npu.npu.current_stream",
        "current_stream=torch_npu.npu.Stream",
        FIA,
    ),
    Mutant(
        "npu: asynchronous output recorded on no event",
        "compat.py",
        "            setattr(torch.cuda, name, stand_in)",
        '            setattr(torch.cuda, name, _InertEvent if name == "Event" else stand_in)',
        FIA,
    ),
    Mutant(
        "npu: slots of 64 bits",
        "attention/backend.py",
        "slots = attn_metadata.slot_mapping[:num_tokens]",
        "slots = attn_metadata.slot_mapping[:num_tokens].long()",
        ATB,
    ),
    Mutant(
        "npu: dense mask with strides",
        "attention/mask_cache.py",
        ".contiguous()",
        "",
        ATB,
    ),
    Mutant(
        "npu: flags where values are added",
        "attention/families.py",
        'torch.float16: {MaskKind.MATRIX: float("-inf")',
        "torch.float16: {MaskKind.MATRIX: 1.0",
        ATB,
    ),
    Mutant(
        "npu: lengths on the device",
        "attention/kernels/atb.py",
        "torch.from_numpy(metadata.seq_lens_np)",
        "metadata.seq_lens",
        ATB,
    ),
    Mutant(
        "npu: sequence lengths for query lengths",
        "attention/kernels/atb.py",
        "seq_len=query_lens",
        "seq_len=seq_lens",
        ATB,
    ),
    Mutant(
        "npu: decode operator for chunks",
        "attention/kernels/atb.py",
        "if state == AttentionState.DecodeOnly:",
        "if state != AttentionState.PrefillNoCache:",
        ATB,
    ),
    Mutant(
        "samples that nobody waits for overwrite a token",
        "prep/kernels.py",
        "tail_int64[row] = num_input_tokens",
        "tail_int64[row] = 0",
    ),
    Mutant(
        "padding not marked",
        "prep/kernels.py",
        "is_padding[token] = True",
        "is_padding[token] = False",
    ),
    Mutant(
        "rows of padding keep their blocks",
        "prep/kernels.py",
        "last_padded = min(num_reqs_padded, max_num_reqs)",
        "last_padded = num_reqs",
    ),
    Mutant(
        "block ids sent beside their place",
        "prep/kernels.py",
        "2 * (taken + count)",
        "2 * taken + count",
    ),
    Mutant(
        "block changes over the samples' targets",
        "prep/kernels.py",
        "index_of, id_of = taken,",
        "index_of, id_of = 0,",
        ENGINE,
    ),
    Mutant(
        "a row that is replaced is not sent again",
        "attention/block_tables.py",
        "super().add_row(block_ids, row_idx)\n        self.num_known_blocks[:, row_idx] = 0\n",
        "super().add_row(block_ids, row_idx)\n",
    ),
    Mutant(
        "rows that change places are not sent again",
        "attention/block_tables.py",
        "super().swap_row(src, tgt)\n        self.num_known_blocks[:, [src, tgt]] = 0\n",
        "super().swap_row(src, tgt)\n",
    ),
    Mutant(
        "what a dummy run left on the device is trusted",
        "attention/block_tables.py",
        "super().commit_block_table(num_reqs)\n        self.forget()",
        "super().commit_block_table(num_reqs)",
    ),
    Mutant(
        "previous rows stay behind their requests",
        "attention/block_tables.py",
        "self.previous_rows[tgt] = self.previous_rows[src]",
        "pass",
    ),
    Mutant(
        "lost tokens are overlooked",
        "bookkeeping.py",
        "(has_outputs <= np.array(cached.num_output_tokens, np.int32))",
        "(has_outputs >= 0)",
        BOOKS,
    ),
    Mutant(
        "new blocks are not entered in the request",
        "bookkeeping.py",
        "                    block_ids.extend(new_ids)\n",
        "                    pass\n",
        ENGINE,
    ),
    Mutant(
        "discarded samples are booked",
        "prep/kernels.py",
        "        if discard_request_mask[req]:\n            continue\n",
        "",
        ENGINE,
    ),
    Mutant(
        "padding decided for other counts",
        "graph/runner.py",
        "        key = (\n            num_tokens,\n            num_reqs,\n",
        "        key = (\n            num_tokens,\n",
        ENGINE,
    ),
    Mutant(
        "npu: two copies a step",
        "model_runner.py",
        "        self.staging.submit(step.nbytes)\n",
        "        self.staging.submit(step.nbytes)\n        self.staging.submit(step.nbytes)\n",
        COUNTS,
    ),
    Mutant(
        "npu: a length is read back",
        "model_runner.py",
        "        self._place_block_changes(step)\n",
        "        self._place_block_changes(step)\n        staged.device.seq_lens.max().item()\n",
        COUNTS,
    ),
    Mutant(
        "padding mask of a step from upstream",
        "model_runner.py",
        "        if self._is_padding is None:\n",
        "        if True:\n",
        BOOKS,
    ),
    Mutant(
        "log-probabilities dropped",
        "bookkeeping.py",
        "if sampler_output.logprobs_tensors is not None:",
        "if False:",
        BOOKS,
    ),
    # --- graphs
    Mutant(
        "a full graph takes the batch's own state",
        "prep/batch.py",
        "if padding.mode is GraphMode.FULL:",
        "if False:",
        ("tests/prep/test_graph_padding.py",),
    ),
    Mutant(
        "no row for what a mixed graph leaves over",
        "prep/padding.py",
        "max_num_reqs if decode_query_len else max_num_reqs + PADDING_ROWS",
        "max_num_reqs",
        ("tests/prep/test_graph_padding.py",),
    ),
    Mutant(
        "groups' tables without rows of padding between them",
        "prep/kernels.py",
        "table += (max_num_reqs + PADDING_ROWS) * width",
        "table += max_num_reqs * width",
    ),
    Mutant(
        "moved inputs are overlooked",
        "graph/stand_in.py",
        "if places != self.places:",
        "if False:",
        GRAPHS,
    ),
    Mutant(
        "results stay where they were made",
        "graph/stand_in.py",
        "home if home is result else home.copy_(result)",
        "result",
        GRAPHS,
    ),
    Mutant(
        "graphs captured over upstream's buffers",
        "graph/runner.py",
        "            if self._in_dummy_run and decision[0] != CUDAGraphMode.NONE:",
        "            if False:",
        GRAPHS,
    ),
    Mutant(
        "upstream's lengths in the step's buffers",
        "graph/runner.py",
        "self._restore_upstream_buffers(leave=GRAPH_INPUTS)",
        "pass",
        GRAPHS,
    ),
    Mutant(
        "attention in a full graph sees real tokens only",
        "attention/metadata.py",
        "self.num_input_tokens if self.in_full_graph else self.num_actual_tokens",
        "self.num_actual_tokens",
        GRAPHS,
    ),
    Mutant(
        "the largest decode off the grid",
        "graph/config.py",
        "if largest not in sizes:",
        "if False:",
        GRAPHS,
    ),
    Mutant(
        "sizes that memory did not suffice for stay on the grid",
        "graph/capture.py",
        "        _forget_sizes(runner, given_up)\n",
        "        pass\n",
        GRAPHS,
    ),
    Mutant(
        "eager steps are not told from replays",
        "graph/counts.py",
        "if padding.mode in REPLAYED:",
        "if True:",
        GRAPHS,
    ),
    Mutant(
        "padding slots are written by the reference family",
        "attention/kernels/reference.py",
        "real = slots >= 0\n",
        "real = slots >= -1\n",
        GRAPHS,
    ),
    Mutant(
        "plain rows take the last adapter",
        "ops/lora.py",
        "torch.ne(self._indices[:2, :, None, None], self._slots",
        "torch.ne(self._indices[:2, :, None, None] % len(self._slots), self._slots",
        LORA,
    ),
    Mutant(
        "rows get the sum of all adapters",
        "ops/lora.py",
        ".masked_fill_(foreign[: len(x)], 0)\n",
        "\n",
        LORA,
    ),
    Mutant(
        "a mapping of other samples is taken for the old one",
        "lora.py",
        "            and np.array_equal(self.prompt_mapping, other.prompt_mapping)\n",
        "",
        LORA,
    ),
    Mutant(
        "drafts are verified by another request's adapter",
        "model_runner.py",
        "num_scheduled_tokens, step.num_sampled_tokens)",
        "num_scheduled_tokens)",
        LORA,
    ),
    Mutant(
        "adapters that captures made up serve the first requests",
        "graph/capture.py",
        "        runner.maybe_remove_all_loras(runner.lora_config)",
        "        pass",
        LORA,
    ),
    Mutant(
        "prompts are scored by the adapters of the samples",
        "lora.py",
        "                with self._logits_of(req_id):\n",
        "                if True:\n",
        LORA,
    ),
    Mutant(
        "npu: graphs captured over upstream's buffers",
        "graph/runner.py",
        "            if self._in_dummy_run and decision[0] != CUDAGraphMode.NONE:",
        "            if False:",
        FIA_PIECES,
    ),
    Mutant(
        "npu: attention is not told the step's lengths",
        "graph/npu.py",
        "                call(metadata)\n",
        "",
        FIA_FULL,
    ),
    Mutant(
        "npu: lengths told behind nothing",
        "graph/npu.py",
        "            self._update_stream.wait_event(self._replayed)\n",
        "",
        FIA_FULL,
    ),
    Mutant(
        "npu: no event behind a replay",
        "graph/npu.py",
        "                self._replayed.record(stream)\n",
        "                pass\n",
        FIA_FULL,
    ),
    Mutant(
        "npu: events that stay set",
        "graph/npu.py",
        "            event.reset(stream)\n",
        "",
        FIA_FULL,
    ),
    Mutant(
        "ids of embedded tokens left as they are",
        "prompt_embeds.py",
        "        step.input_ids[token_indices] = 0\n",
        "",
        EMBEDS,
    ),
    Mutant(
        "embeddings of a prompt's start in every chunk",
        "prep/embeds.py",
        "step.req_indices[token_indices], step.positions[token_indices]",
        "step.req_indices[token_indices], step.query_pos[token_indices]",
        EMBEDS,
    ),
    Mutant(
        "embeddings given to what was compiled",
        "model_runner.py",
        "get_forward_context().skip_compiled = True",
        "pass",
        EMBEDS,
    ),
    Mutant(
        "encoders see all, whatever their window",
        "attention/kv_cache.py",
        "                sliding_window=layer.sliding_window,\n",
        "",
        POOLING,
    ),
    Mutant(
        "windows of encoders reach back only",
        "attention/kernels/reference.py",
        "(ahead <= -window) | (ahead >= window)",
        "ahead <= -window",
    ),
    Mutant(
        "cut queries of encoders read up to themselves",
        "attention/kernels/reference.py",
        "first + length if metadata.causal else seq_len",
        "first + length",
    ),
    Mutant(
        "models without a cache are first traced over a step",
        "worker.py",
        "        if not self.model_runner.kv_caches:",
        "        if False:",
        POOLING,
    ),
    Mutant(
        "a bias weighs the experts that it chooses",
        "ops/routing.py",
        "weights = scores.gather(1, chosen)",
        "weights = choice.gather(1, chosen)",
        ("tests/ops/test_experts.py",),
    ),
    Mutant(
        "padding works on the first experts",
        "ops/experts.py",
        "end = elsewhere",
        "end = 0",
        ("tests/ops/test_experts.py",),
    ),
    Mutant(
        "experts of other ranks are taken for the last one here",
        "ops/experts.py",
        "torch.where(experts < 0, experts, expert_map.long()[experts.clamp(min=0)])",
        "expert_map.long()[experts] % len(w13)",
        ("tests/ops/test_experts.py",),
    ),
    Mutant(
        "MLA layers cut off what graphs pad",
        "attention/mla.py",
        """        \"\"\"Tokens that the layer hands over: all.\"\"\"
        return self.step.num_input_tokens
""",
        "        return self.step.num_actual_tokens\n",
        ("tests/attention/test_mla.py",),
    ),
    Mutant(
        "MLA rows with the rotated key in front",
        "attention/mla.py",
        "torch.cat([kv_c_normed.unsqueeze(1), k_pe], dim=-1)",
        "torch.cat([k_pe, kv_c_normed.unsqueeze(1)], dim=-1)",
        ("tests/attention/test_mla.py",),
    ),
    Mutant(
        "MLA layers' inputs of a graph go unchecked",
        "graph/stand_in.py",
        'getattr(metadata, "step", metadata)',
        "metadata",
        ("tests/graph/test_stand_in.py",),
    ),
    Mutant(
        "K and V of stored blocks change places",
        "kv_transfer.py",
        "in zip(planes, stored",
        "in zip(planes.flip(0), stored",
        TRANSFER,
    ),
    Mutant(
        "preempted requests look for stored blocks",
        "kv_transfer.py",
        "if request.num_preemptions or ",
        "if ",
        TRANSFER,
    ),
    Mutant(
        "full graphs around layers that a connector saves",
        "graph/config.py",
        "if transfer is not None and transfer.kv_connector and",
        "if False and",
        TRANSFER,
    ),
    Mutant(
        "requests that were taken back advance in their rows",
        "bookkeeping.py",
        "[-1 if r in cached.resumed_req_ids else rows_by_id.get(r, -1) for r in req_ids]",
        "[rows_by_id.get(r, -1) for r in req_ids]",
        RESETS,
    ),
    Mutant(
        "prompts of embeddings keep the ids of their row's last request",
        "prompt_embeds.py",
        "    if new.prompt_embeds is None:",
        "    if True:",
        EMBEDS,
    ),
    Mutant(
        "steps with embeddings take the padding of steps without",
        "graph/runner.py",
        "            takes_embeds,\n            num_tokens,\n",
        "            num_tokens,\n",
        EMBEDS,
    ),
    Mutant(
        "steps with embeddings replay graphs",
        "graph/runner.py",
        "force_eager=takes_embeds",
        "force_eager=False",
        EMBEDS,
    ),
    Mutant(
        "log-probabilities of prompts that are unknown",
        "bookkeeping.py",
        "self.num_prompt_logprobs.pop(new.req_id, None)",
        "pass",
        EMBEDS,
    ),
    Mutant(
        "token ids beside embeddings count as unknown",
        "prompt_embeds.py",
        "new.prompt_is_token_ids or [False]",
        "[False]",
        EMBEDS,
    ),
    Mutant(
        "salted prompts are stored",
        "kv_transfer.py",
        "new for new in new_reqs if new.req_id not in self._salted",
        "new for new in new_reqs",
        TRANSFER,
    ),
    Mutant(
        "one window for all layers of a group",
        "model_runner.py",
        "split_by_window(groups, layers) for groups",
        "groups for groups",
        ("tests/engine/test_against_transformers.py",),
    ),
    Mutant(
        "prompts count as stored once a layer is",
        "kv_transfer.py",
        "return all(map(os.path.exists, files))",
        "return any(map(os.path.exists, files))",
        TRANSFER,
    ),
]
