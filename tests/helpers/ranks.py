"""Engines of several ranks, each in processes of its own, and what happened on every rank.

Engines start in children of one process that has vLLM imported and computed nothing, which is what
a fork needs: threads of a parent don't come along.
"""

import asyncio
import gc
import multiprocessing
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tests.helpers.waiting import LIMIT
from tests.matrix.collect import add, note
from vllm_npu_prep.compat.v2 import RUNNER_ENV_VAR

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("NPU_PREP_DEVICE", "cpu")

DEFAULTS = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "kv_cache_memory_bytes": 16 << 20,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "seed": 0,
    "distributed_executor_backend": "mp",
    "worker_extension_cls": "tests.helpers.ranks.RankProbe",
    "additional_config": {"npu_prep": {"check": "full"}},
}
PRELOADED = ["vllm.v1.engine.async_llm", "vllm_npu_prep.worker", "tests.helpers.ranks"]


def in_a_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """What a function of this module returns in a fork of a process that only imported vLLM.

    That process has the environment of the first call; its forks get that of theirs.
    """
    import vllm.platforms

    _ = vllm.platforms.current_platform  # whose choice of a device sets variables of the fork, too
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        future = pool.submit(_with_environment, dict(os.environ), function, *args)
        try:
            return future.result(LIMIT)
        except TimeoutError:  # leaving the pool would wait for it; its ranks end with it
            for process in (pool._processes or {}).values():
                process.kill()
            raise


def _with_environment(environment: dict[str, str], function: Callable[..., Any], *args: Any) -> Any:
    os.environ.clear()
    os.environ.update(environment)
    return function(*args)


def serve_on_ranks(model: Path, settings: dict[str, Any], traffic: Callable[..., Any]) -> Any:
    """Start an engine as a server does, and return what an async function of its `Ranks` does."""
    returned, cell = in_a_fresh_process(_serve, model, settings, traffic)
    add([cell])
    return returned


def _serve(model: Path, settings: dict[str, Any], traffic: Callable[..., Any]) -> Any:
    """What the traffic returned, and the engine's cell of the matrix."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    # An engine collects garbage some fifteen times in each of its processes, with every module's
    # objects to look at: two thirds of a start. Only its own are looked at now, in its forks, too.
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None

    async def run() -> Any:
        args = AsyncEngineArgs(model=str(model), **{**DEFAULTS, **settings})
        llm = AsyncLLM.from_engine_args(args)
        assert chosen is None or llm.vllm_config.use_v2_model_runner == (chosen == "1")
        try:
            return await traffic(Ranks(llm)), note(llm.vllm_config)
        finally:
            llm.shutdown()

    chosen = os.environ.get(RUNNER_ENV_VAR)
    return asyncio.run(run())


class Ranks:
    """An engine of several ranks."""

    def __init__(self, llm: Any) -> None:
        self.llm, self._num_requests = llm, 0

    async def generate(
        self,
        prompts: list[Any],
        max_tokens: int,
        engine: int | None = None,
        loras: list[Any] | None = None,
        **params: Any,
    ) -> list[list[int]]:
        """Greedy tokens of all prompts together: token ids, or what `LLM.generate` takes.

        They go to one engine of data parallelism, or to any.
        """
        loras = loras or [None] * len(prompts)
        return await asyncio.gather(
            *(
                self._generate(prompt, max_tokens, engine, lora, params)
                for prompt, lora in zip(prompts, loras, strict=True)
            )
        )

    async def _generate(
        self, prompt: Any, max_tokens: int, engine: int | None, lora: Any, params: dict[str, Any]
    ) -> list[int]:
        tokens: list[int] = []
        async for output in self.stream(prompt, max_tokens, engine, lora, **params):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    def stream(
        self,
        prompt: Any,
        max_tokens: int,
        engine: int | None = None,
        lora: Any = None,
        **params: Any,
    ) -> AsyncIterator[Any]:
        """vLLM's outputs of one request, as they come; arguments as those of `generate`."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            **{"temperature": 0, "ignore_eos": True, "detokenize": False, **params},
            max_tokens=max_tokens,
        )
        self._num_requests += 1
        outputs: AsyncIterator[Any] = self.llm.generate(
            prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt},
            sampling,
            request_id=str(self._num_requests),
            lora_request=lora,
            data_parallel_rank=engine,
        )
        return outputs

    async def embed(self, prompts: list[list[int]]) -> list[list[float]]:
        """The embedding of each prompt, of all together."""
        from vllm import PoolingParams

        async def one(number: int, prompt: list[int]) -> list[float]:
            inputs, params = {"prompt_token_ids": prompt}, PoolingParams(task="embed")
            outputs = [each async for each in self.llm.encode(inputs, params, str(number))]
            return outputs[-1].outputs.data.tolist()  # tensors are shared while a process lives

        return await asyncio.gather(*(one(*each) for each in enumerate(prompts)))

    async def ask(self, method: str, *args: Any) -> list[Any]:
        """What a method of `RankProbe` returns on every rank."""
        core = self.llm.engine_core
        if hasattr(core, "call_utility_all_async"):
            answers = await core.call_utility_all_async("collective_rpc", method, None, args)
        else:
            answers = [await core.call_utility_async("collective_rpc", method, None, args)]
        return [answer for engine in answers for answer in engine]


class RankProbe:
    """Methods that vLLM adds to a worker, for `Ranks.ask`."""

    def probe_facts(self) -> dict[str, Any]:
        """Who and where this rank is, and how large its cache is."""
        import torch

        runner = self.model_runner
        return {
            "pid": os.getpid(),
            "rank": self.rank,
            "local_rank": self.local_rank,
            "runner": "V2" if self.use_v2_model_runner else "V1",
            "device": str(runner.device),
            "num_blocks": runner.kv_cache_config.num_blocks,
            "num_layers": len(runner.attn_groups[0][0].layer_names),
            "seed": torch.initial_seed(),
        }

    def probe_watch(self) -> None:
        """From now on, note each step and each dummy run."""
        runner = self.model_runner
        self.probe_steps: list[dict[str, Any]] = []
        self._watch_routers()
        if self.use_v2_model_runner:
            self._watch_v2(runner)
            return
        prepare, decide = runner._prepare_inputs, runner._determine_batch_execution_and_padding

        def prepare_inputs(*args: Any) -> Any:
            result = prepare(*args)
            self.probe_steps.append(_step_of(runner))
            return result

        def determine(*args: Any, **kwargs: Any) -> Any:
            decided = decide(*args, **kwargs)
            if runner.dummy_run is not None:
                self.probe_steps.append({"is_dummy": True, "num_real_tokens": 0})
            mode, descriptor, _, across, _ = decided
            self.probe_steps[-1] |= {
                "mode": mode.name,
                "num_tokens": descriptor.num_tokens,
                "across": None if across is None else across.tolist(),
            }
            return decided

        runner._prepare_inputs = prepare_inputs
        runner._determine_batch_execution_and_padding = determine

    def _watch_v2(self, runner: Any) -> None:
        """The same of the V2 runner, which decides and prepares in one method."""
        prepare, shared = runner._prepare_inputs, runner.dp_decisions

        def decided(mode: Any, num_tokens: int) -> dict[str, Any]:
            across = None if shared is None else shared.across
            across = None if across is None else across.tolist()
            return {"mode": mode.name, "num_tokens": num_tokens, "across": across}

        def prepare_inputs(*args: Any) -> Any:
            result = prepare(*args)
            mode, descriptor, _ = runner.in_flight.dispatched
            self.probe_steps.append(_step_of(runner) | decided(mode, descriptor.num_tokens))
            return result

        runner._prepare_inputs = prepare_inputs
        if shared is None:
            return
        take = shared.take

        def take_decision(*args: Any, **kwargs: Any) -> Any:
            is_dummy = runner.in_flight is None
            found = take(*args, **kwargs)
            if is_dummy:
                dummy = {"is_dummy": True, "num_real_tokens": 0}
                self.probe_steps.append(dummy | decided(found[0].cg_mode, found[0].num_tokens))
            return found

        shared.take = take_decision
        if runner.speculator is not None:
            self._watch_draft_passes(runner.speculator.passes)

    def _watch_draft_passes(self, passes: Any) -> None:
        """Note of each draft pass its padded tokens, 0 if it ran eagerly, and each engine's."""
        from vllm_npu_prep.runner.v2.draft_passes import PassSize

        run = passes.run
        self.probe_passes: list[tuple[int, list[int]]] = []

        def run_pass(*args: Any) -> Any:
            (size,) = (each for each in args if isinstance(each, PassSize))
            self.probe_passes.append((size.padded, size.across.tolist()))
            return run(*args)

        passes.run = run_pass

    def _watch_routers(self) -> None:
        """Note how many pairs of token and expert each step has in its last layer of experts."""
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        for module in self.model_runner.get_model().modules():
            if isinstance(module, MoERunner):
                num_experts = module.router.global_num_experts
                counting = module.router.capture_fn  # the plugin's, if tokens are recorded

                def note(
                    ids: Any, num_experts: int = num_experts, counting: Any = counting
                ) -> None:
                    if counting is not None:
                        counting(ids)
                    is_pair = (ids >= 0) & (ids < num_experts)
                    if self.probe_steps:
                        self.probe_steps[-1]["num_pairs"] = int(is_pair.sum())

                module.router.set_capture_fn(note)

    def probe_noted(self) -> list[dict[str, Any]]:
        """What was noted."""
        return self.probe_steps

    def probe_draft_passes(self) -> list[tuple[int, list[int]]]:
        """Draft passes of engines that share experts, on Model Runner V2."""
        return getattr(self, "probe_passes", [])

    def probe_cache(self) -> list[str]:
        """A digest of each block of the KV cache but the null block."""
        planes = [plane.flatten(1) for plane in self.model_runner.kv_caches]
        return [
            blake2b(b"".join(plane[block].numpy().tobytes() for plane in planes)).hexdigest()
            for block in range(1, len(planes[0]))
        ]

    def probe_counts(self) -> dict[str, int]:
        """How steps ran."""
        return dict(self.model_runner.padding.counts.by_kind)


def accepted_drafts() -> float:
    """Drafts of all engines of this process that were accepted so far."""
    return _counted("vllm:spec_decode_num_accepted_tokens")


def loaded_tokens() -> float:
    """Tokens that were found in a connector so far, of all engines of this process."""
    return _counted("vllm:external_prefix_cache_hits")


def preemptions() -> float:
    """How often requests of all engines of this process were preempted so far."""
    return _counted("vllm:num_preemptions")


def _counted(name: str) -> float:
    from prometheus_client import REGISTRY

    families = (each for each in REGISTRY.collect() if each.name == name)
    return sum(s.value for each in families for s in each.samples if s.name.endswith("_total"))


def _step_of(runner: Any) -> dict[str, Any]:
    """A step as it lies on the device: what every array holds, by its name."""
    step, arrays = runner.in_flight.step, runner.in_flight.staged.device
    digests = {}
    for name, value in vars(arrays).items():
        tensors = value if isinstance(value, tuple) else (value,)
        data = b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors)
        digests[name] = blake2b(data, digest_size=8).hexdigest()
    tables = runner.block_tables.device_rows(step.padding.num_reqs_padded)
    rows = b"".join(table[: step.num_reqs].cpu().numpy().tobytes() for table in tables)
    digests["block tables"] = blake2b(rows, digest_size=8).hexdigest()
    return {
        "is_dummy": False,
        "state": step.attn_state.name,
        "num_reqs": step.num_reqs,
        "num_real_tokens": int(step.batch.total_num_scheduled_tokens),
        "padding": [step.padding.num_input_tokens, step.padding.mode.name],
        "arrays": digests,
    }
