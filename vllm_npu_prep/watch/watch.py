"""Records and checks each step of one runner, and never ends it."""

import logging
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.observe.check_level import make_check
from vllm_npu_prep.observe.full_check import FullCheck
from vllm_npu_prep.observe.recorder import StepRecorder, engine_facts, installed_versions
from vllm_npu_prep.observe.step_snapshot import Recorded
from vllm_npu_prep.observe.violation import StepCheckError
from vllm_npu_prep.prep.mask import MaskForm
from vllm_npu_prep.ranks import is_one_of_several, rank_across_engines
from vllm_npu_prep.records.settings import LayerGroup, WatchedRunner
from vllm_npu_prep.watch.adapter import RunnerAdapter, Wraps
from vllm_npu_prep.watch.config import WatchConfig
from vllm_npu_prep.watch.runner_step import StepMaker, check_lists

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM configures loggers below its own only

TIMED_STEPS = 32
"""The number of steps after which the log says what the watch costs."""


class Watch:
    """The watch of one runner, whose KV cache is allocated.

    Parameters
    ----------
    runner
        vLLM's model runner, or one made from it.
    adapter
        Reads its steps.
    version
        The version of the package that has the runner.

    Raises
    ------
    PrepError
        If the engine has layers or ranks whose steps can't be read, or the folder for records can't
        be made.
    """

    def __init__(
        self, runner: Any, adapter: RunnerAdapter, config: WatchConfig, version: str
    ) -> None:
        self.runner, self.adapter = runner, adapter
        self._wraps, self._output = Wraps(self._safely), None
        self._steps, self._times, self._is_off = 0, list[float](), False
        engine = runner.vllm_config
        self._groups = layer_groups(runner.kv_cache_config, engine.parallel_config)
        block_sizes, columns = adapter.tables()
        speculative, scheduler = engine.speculative_config, engine.scheduler_config
        self.maker = StepMaker(
            block_sizes,
            columns,
            max_num_reqs=scheduler.max_num_seqs,
            max_model_len=engine.model_config.max_model_len,
            max_drafts=speculative.num_speculative_tokens if speculative else 0,
            chunked_prefill=bool(scheduler.enable_chunked_prefill),
        )
        tables = self.maker.tables
        self.check = make_check(config.check, runner, tables)
        self.recorder = None
        if config.record is not None:
            whose = WatchedRunner(name=adapter.name, version=version, differs=[*adapter.differs])
            facts = engine_facts(engine, runner.kv_cache_config.num_blocks)
            manifest = {"versions": installed_versions(), "config": facts}
            parallel = engine.parallel_config
            several = is_one_of_several(parallel)
            self.recorder = StepRecorder(
                config.record,
                tables,
                Recorded(self._groups, MaskForm.COMPRESSED, 1, whose),
                manifest | {"runner": whose.model_dump()},
                f"-rank{rank_across_engines(parallel)}" if several else "",
                asked_by="dump_steps, and a fault,",
            )

    def attach(self) -> None:
        """Begin to look at each step."""
        self._wraps.put(self.runner, "execute_model", self._around_execute)
        self.adapter.before_forward(self._wraps, self._look)

    def detach(self) -> None:
        """Leave the runner as it was."""
        self._is_off = True
        self._wraps.undo()

    def dump_steps(self) -> str:
        """Write the last steps, for ``collective_rpc``; return one line that says where they are.

        Raises
        ------
        PrepError
            If none are recorded.
        """
        if self.recorder is None:
            raise PrepError(
                'no steps are recorded: start with NPU_PREP_WATCH=\'{"record": {"dir": ...}}\''
            )
        return str(self.recorder.dump("dump_steps"))

    # ----------------------------------------------------------------- each step

    def _around_execute(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(output: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dummy_run"):
                return execute(output, *args, **kwargs)
            # The runner changes what the scheduler has handed over, so this comes first.
            self._safely(self._follow, output)
            self._output = output
            try:
                return execute(output, *args, **kwargs)
            except Exception as error:
                if self.recorder is not None:
                    self.recorder.dump(f"execute_model has failed: {type(error).__name__}")
                raise
            finally:
                self._output = None

        return execute_model

    def _follow(self, output: Any) -> None:
        self.maker.requests.follow(output)
        if self.check is not None:
            self.check.follow(output)

    def _look(self) -> None:
        """Read, record and check the step that is about to run."""
        output = self._output
        if output is None:  # a dummy run
            return
        started = perf_counter()
        self._steps += 1
        given = self.adapter.read(output)
        step = self.maker.make(given, output)
        if self.recorder is not None:
            self.recorder.keep(step, given.kind, given.req_ids)
        if isinstance(self.check, FullCheck):
            names, groups = given.req_ids, self._groups
            kept = {req_id: len(tokens) for req_id, tokens in given.sampled.items()}
            self.check.verify_watched(step, names, output, groups, kept)
        elif self.check is not None:
            self.check.check_rules(step, given.req_ids)
        if self.check is not None:
            check_lists(given, step)
        self._times.append(perf_counter() - started)
        if len(self._times) == TIMED_STEPS:
            logger.info("The watch takes %.1f ms of a step.", 1e3 * median(self._times))

    def _safely(self, do: Callable[..., None], *args: Any) -> None:
        if self._is_off:
            return
        try:
            do(*args)
        except StepCheckError as error:
            self._report(error)
        except Exception as error:
            self.detach()
            logger.warning(
                "The watch has failed and is off; the engine goes on: %s: %s",
                type(error).__name__,
                " ".join(str(error).split())[:500],
            )

    def _report(self, error: StepCheckError) -> None:
        """Say what the first wrong value is; what follows from it would be reported again."""
        self.check = None
        number = self._steps - 1
        logger.error("Step %d of %s: %s", number, self.adapter.name, error)
        if self.recorder is not None:
            self.recorder.dump("the check has found a fault")
        logger.warning("Steps are not checked any more; the engine goes on.")


def layer_groups(cache: Any, parallel: Any) -> tuple[LayerGroup, ...]:
    """Return what the layers of each KV-cache group see of a step.

    Raises
    ------
    PrepError
        If there are layers or ranks whose steps are not read.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    groups, unread = [], set()
    for index, group in enumerate(cache.kv_cache_groups):
        spec = group.kv_cache_spec
        for each in getattr(spec, "kv_cache_specs", {}).values():  # layers of one kind
            spec = each
        if not isinstance(spec, FullAttentionSpec | SlidingWindowSpec):
            unread.add(type(spec).__name__)
        if getattr(spec, "attention_chunk_size", None):
            unread.add("attention in chunks")
        groups.append(LayerGroup(group=index, sliding_window=getattr(spec, "sliding_window", None)))
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            unread.add(name)
    if unread or not groups:
        raise PrepError(
            f"steps with {', '.join(sorted(unread)) or 'no KV cache'} can't be watched: the watch "
            "reads those of full and sliding-window attention, without context parallelism"
        )
    return tuple(groups)
