"""`dispatch` says what vLLM's own dispatcher says: every mode, speculation, LoRA, several ranks."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from vllm.config import CUDAGraphMode
from vllm.lora.utils import get_captured_lora_counts
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from vllm_npu_prep.prep.padding import RUNTIME_MODES, CapturedGraphs, GraphMode, dispatch


def upstreams(graphs: CapturedGraphs, lora, specialize_lora: bool) -> CudagraphDispatcher:
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode[graphs.mode],
        cudagraph_capture_sizes=sorted(graphs.capture_sizes),
        max_cudagraph_capture_size=max(graphs.capture_sizes),
        compile_sizes=[],
        cudagraph_specialize_lora=specialize_lora,
        is_attention_compiled_piecewise=lambda: True,
    )
    config = SimpleNamespace(
        compilation_config=compilation,
        num_speculative_tokens=graphs.decode_query_len - 1,
        lora_config=lora,
        scheduler_config=SimpleNamespace(max_num_seqs=graphs.max_num_seqs),
    )
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(compilation.cudagraph_mode, graphs.decode_query_len)
    return dispatcher


@st.composite
def cases(draw):
    query_len = draw(st.integers(1, 4))
    # vLLM rounds capture sizes to multiples of the decode length.
    sizes = draw(st.sets(st.integers(1, 40), min_size=1, max_size=6))
    lora = draw(
        st.none()
        | st.builds(
            SimpleNamespace, max_loras=st.integers(1, 6), specialize_active_lora=st.booleans()
        )
    )
    specialize = draw(st.booleans())
    counts: tuple[int, ...] = (0,)
    if lora is not None:
        counts = (lora.max_loras + 1,)
        if specialize:
            counts = (0, *get_captured_lora_counts(lora.max_loras, lora.specialize_active_lora))
    graphs = CapturedGraphs(
        mode=draw(st.sampled_from(GraphMode)),
        capture_sizes=tuple(size * query_len for size in sizes),
        max_num_seqs=draw(st.integers(1, 48)),
        decode_query_len=query_len,
        lora_counts=counts,
    )
    num_reqs = draw(st.integers(1, graphs.max_num_seqs))
    uniform = draw(st.booleans())
    num_tokens = num_reqs * query_len if uniform else draw(st.integers(num_reqs, 200))
    num_loras = draw(st.integers(0, lora.max_loras)) if lora is not None else 0
    return graphs, lora, specialize, num_tokens, num_reqs, uniform, num_loras


@given(cases(), st.sampled_from([None, *sorted(RUNTIME_MODES)]))
def test_every_decision_is_that_of_vllm(case, agreed):
    """`agreed`: the one mode that data-parallel ranks settled on."""
    graphs, lora, specialize, num_tokens, num_reqs, uniform, num_loras = case
    allowed = RUNTIME_MODES if agreed is None else frozenset({agreed, GraphMode.NONE})
    mode, descriptor = upstreams(graphs, lora, specialize).dispatch(
        num_tokens,
        uniform_decode=uniform,
        has_lora=num_loras > 0,
        num_active_loras=num_loras,
        valid_modes={CUDAGraphMode[name] for name in allowed},
    )
    padding = dispatch(graphs, num_tokens, num_reqs, uniform, num_loras, allowed)
    assert padding.mode == mode.name
    assert padding.num_input_tokens == descriptor.num_tokens
    if padding.mode == GraphMode.FULL:
        # A mixed batch may fill every request of the graph and still leave tokens over.
        assert padding.num_reqs_padded == descriptor.num_reqs + (not descriptor.uniform)
        assert padding.decode_query_len == (graphs.decode_query_len if descriptor.uniform else 0)
    else:
        assert padding.num_reqs_padded == num_reqs
