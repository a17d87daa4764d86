"""GraphWrapper: vLLM wraps a model, or a part of one, in it to capture and replay it."""

from typing import Any

from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.compilation.monitor import validate_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.platforms import current_platform

from vllm_npu_prep.graph import CaptureNotBegunError, GraphCall, GraphPool, make_pool
from vllm_npu_prep.graph.modes import streams_of_a_capture


class GraphWrapper(CUDAGraphWrapper):
    """Upstream's wrapper with this plugin's graphs in it.

    It is a subclass because vLLM checks for its wrapper's class when it looks for the unwrapped
    model or clears the graphs of a profiling run. `concrete_cudagraph_entries` holds the graphs by
    batch descriptor.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.concrete_cudagraph_entries: dict[Any, Any]
        self._pools: dict[Any, GraphPool] = {}  # by memory pool: upstream profiles in another one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Capture, replay or run eagerly, as the forward context decides."""
        context = get_forward_context() if is_forward_context_available() else None
        if context is None or context.cudagraph_runtime_mode != self.runtime_mode:
            return self.runnable(*args, **kwargs)
        call = GraphCall(self.runnable, args, kwargs)
        if self.runtime_mode == CUDAGraphMode.FULL:
            metadata: Any = context.attn_metadata  # a list only with micro-batches
            call.attn_metadata, call.layers = metadata, context.no_compile_layers
        batch: Any = context.batch_descriptor  # every step with a graph mode has one
        graph = self.concrete_cudagraph_entries.get(batch)
        if graph is not None:
            return graph.replay(call)
        validate_cudagraph_capturing_enabled()
        call.num_tokens = batch.num_tokens
        if self.graph_pool not in self._pools:
            device_type = self.vllm_config.device_config.device_type
            num_streams = streams_of_a_capture(self.vllm_config)
            self._pools[self.graph_pool] = make_pool(device_type, self.graph_pool, num_streams)
        graph = self._pools[self.graph_pool].new_graph()
        try:
            outputs = graph.capture(call)
        except CaptureNotBegunError:
            self._leave_memory_pool()
            raise
        # Stored only now, so that a failed capture leaves nothing to replay.
        self.concrete_cudagraph_entries[context.batch_descriptor] = graph
        return outputs

    @classmethod
    def num_graphs(cls) -> int:
        """Return the number of graphs that all wrappers of this process hold."""
        return sum(len(each.concrete_cudagraph_entries) for each in cls._all_instances)

    def _leave_memory_pool(self) -> None:
        """Let all wrappers capture in another memory pool; captured graphs stay in theirs.

        The workspaces stay, too. The new pool takes additional memory, for graphs that are smaller
        than the first one that failed.
        """
        left, taken = self.graph_pool, current_platform.graph_pool_handle()
        if current_platform.get_global_graph_pool() == left:
            type(current_platform)._global_graph_pool = taken  # for later engines in this process
        for wrapper in GraphWrapper._all_instances:
            if wrapper.graph_pool == left:
                wrapper.graph_pool = taken
                if isinstance(wrapper, GraphWrapper) and left in wrapper._pools:
                    pool = wrapper._pools[taken] = wrapper._pools.pop(left)
                    pool.memory_pool = taken

    def close_pools(self) -> None:
        """Close the pools, because start-up is over."""
        for pool in self._pools.values():
            pool.close()

    def clear_graphs(self) -> None:
        super().clear_graphs()
        self._pools.clear()
