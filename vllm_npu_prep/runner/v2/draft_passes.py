"""Forward passes of a drafter that is a model: eager, or with piecewise graphs.

Data-parallel ranks that share experts make their draft passes together, and idle ranks take part.
They agree on the graph and on the number of tokens twice a step, as in the V1 runner: before the
first pass, and before the later ones.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp

from vllm_npu_prep.graph.wrapper import GraphWrapper

Images = tuple[list[torch.Tensor], torch.Tensor]
"""The encoder's outputs of a pass, ``[tokens, hidden_size]`` each, and which tokens have one, bool
``[num_tokens]`` on the host."""


class GraphInputs(NamedTuple):
    """Input buffers of the piecewise graphs of a draft pass; their addresses never change.

    ``S`` is the largest captured size.
    """

    input_ids: torch.Tensor  # [S] int32
    positions: torch.Tensor  # [S] int64, with M-RoPE [num_dims, S]
    hidden_states: torch.Tensor  # [S, hidden_size]
    no_slots: torch.Tensor  # [S] int64: for captures and dummy runs, which write no cache
    inputs_embeds: torch.Tensor  # [S, hidden_size]; empty for a drafter that sees no images

    def of(self, num_tokens: int) -> "GraphInputs":
        return GraphInputs(
            *(
                each[..., :num_tokens] if each is self.positions else each[:num_tokens]
                for each in self
            )
        )


class PassSize(NamedTuple):
    """How a draft pass runs.

    Attributes
    ----------
    padded
        The number of tokens after padding, if the pass uses piecewise graphs; 0 if it runs eagerly,
        without padding.
    across
        The number of tokens of each data-parallel rank, int32 ``[data_parallel_size]`` on the host;
        None if there is one rank.
    """

    padded: int = 0
    across: torch.Tensor | None = None


class DraftPasses:
    """Runs the forward passes of a drafter, and captures their graphs.

    Attributes
    ----------
    sizes
        Numbers of tokens for which graphs are replayed, ascending; empty before the graphs are
        captured.
    model, layers
        The drafter and the names of its attention layers; set when it has been loaded.
    reads_embeds
        Whether the drafter reads embeddings in every pass, among them the encoder's outputs; set
        when it has been loaded.
    """

    model: Any
    layers: Collection[str] = ()
    reads_embeds = False

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        hidden_size: int,
        *,
        reads_target: bool,
        num_dims: int,  # of positions; 0 without M-RoPE
    ) -> None:
        self.sizes: Sequence[int] = ()
        self._config, self._device = vllm_config, device
        self._hidden_size, self._reads_target = hidden_size, reads_target
        self._num_dims = num_dims
        parallel = vllm_config.parallel_config
        self._engines, self._engine = parallel.data_parallel_size, parallel.data_parallel_rank
        self._inputs: GraphInputs | None = None
        self._captured: set[BatchDescriptor] = set()

    # ----------------------------------------------------------------- graphs

    def make_inputs(self, mode: CUDAGraphMode, *, enforce_eager: bool) -> None:
        """Allocate the inputs of piecewise graphs if the engine uses them; forget old captures."""
        self.sizes, self._inputs = (), None
        self._captured.clear()
        if mode.mixed_mode() != CUDAGraphMode.PIECEWISE or enforce_eager:
            return
        largest = self._config.compilation_config.max_cudagraph_capture_size or 0
        dtype = self._config.model_config.dtype
        assert isinstance(dtype, torch.dtype), "vLLM has resolved names of dtypes"
        places = (self._num_dims, largest + 1) if self._num_dims else (largest,)
        with torch.inference_mode(False):  # steps change them in place
            states = torch.zeros(largest, self._hidden_size, dtype=dtype, device=self._device)
            self._inputs = GraphInputs(
                torch.zeros(largest, dtype=torch.int32, device=self._device),
                torch.zeros(places, dtype=torch.int64, device=self._device),
                states,
                torch.full((largest,), PADDING_SLOT_ID, device=self._device),
                torch.zeros_like(states if self.reads_embeds else states[:0]),
            )

    def capture(self, num_tokens: int) -> None:
        """Warm up and capture the piecewise graphs of a pass, if the engine uses them.

        vLLM compiles no layer of some drafters (MTP layers of MiMo). If a pass has captured no
        graph, the passes stay eager, so that they are not padded in vain.
        """
        name = BatchDescriptor(num_tokens)
        if self._inputs is None or name in self._captured:
            return
        before, across = GraphWrapper.num_graphs(), None
        if self._engines > 1:  # all ranks capture graphs of one size
            across = torch.full((self._engines,), num_tokens, dtype=torch.int32)
        ids, positions, hidden_states, slots, embeds = self._inputs.of(num_tokens)
        given = ids, positions, hidden_states, None, dict.fromkeys(self.layers, slots)
        for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
            self._forward(*given, mode, across, embeds if self.reads_embeds else None)
        self._captured.add(name)
        if GraphWrapper.num_graphs() == before:
            self._inputs = None

    def use_graphs(self, sizes: Iterable[int]) -> None:
        """Replay graphs from now on, for passes of these numbers of tokens."""
        self.sizes = () if self._inputs is None else sorted(sizes)

    # ----------------------------------------------------------------- how a pass runs

    def size_of(self, num_tokens: int, *, is_step: bool = False) -> PassSize:
        """Decide how a pass runs; ranks that share experts have to call this together.

        With `is_step`, the pass is over a step's tokens. These are padded already, so a graph is
        used only if it has exactly this number of tokens.
        """
        place = bisect_left(self.sizes, num_tokens)
        padded = self.sizes[place] if place < len(self.sizes) else 0
        if is_step and padded != num_tokens:
            padded = 0
        if self._engines == 1:
            return PassSize(padded)
        counts = num_tokens, num_tokens, None, self._engines, self._engine
        found, agreed = dispatch_cg_and_sync_dp(self, *counts, need_eager=not padded)  # type: ignore[arg-type]
        assert agreed is not None, "each engine has tokens"
        is_eager = found.cg_mode == CUDAGraphMode.NONE
        return PassSize(0 if is_eager else found.num_tokens, agreed.num_tokens_across_dp)

    def dispatch(self, num_reqs: int, num_tokens: int, *_: Any, **__: Any) -> Any:
        """Return the graph for the number of tokens on which the ranks agreed.

        Upstream's ``dispatch_cg_and_sync_dp`` calls this in place of a graph manager.
        """
        padded = self.sizes[bisect_left(self.sizes, num_tokens)]
        return BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, padded, None)

    # ----------------------------------------------------------------- a pass

    def run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        size: PassSize,
        images: Images | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one pass; return hidden states for the logits, and those for the next pass.

        Parameters
        ----------
        input_ids, positions
            int32 and int64 ``[num_tokens]``; positions of a drafter with M-RoPE are ``[num_dims,
            num_tokens]``.
        hidden_states
            ``[num_tokens, hidden_size]`` of the target model or of the previous pass.
        metadata, slot_mappings
            By layer; None in dummy runs, which write nothing to the cache.
        """
        num_tokens, embeds = len(input_ids), None
        if self.reads_embeds:
            seen, are_seen = images or (None, None)
            embeds = self.model.embed_input_ids(
                input_ids, multimodal_embeddings=seen, is_multimodal=are_seen
            )
        if not size.padded:
            mode = CUDAGraphMode.NONE
            given = input_ids, positions, hidden_states, metadata, slot_mappings
            return self._forward(*given, mode, size.across, embeds)
        assert self._inputs is not None
        inputs = self._inputs
        inputs.input_ids[:num_tokens].copy_(input_ids)
        inputs.positions[..., :num_tokens].copy_(positions)
        if self._reads_target:
            inputs.hidden_states[:num_tokens].copy_(hidden_states)
        if embeds is not None:
            inputs.inputs_embeds[:num_tokens].copy_(embeds)
        ids, positions, hidden_states, no_slots, padded = inputs.of(size.padded)
        if slot_mappings is None:
            slot_mappings = dict.fromkeys(self.layers, no_slots)
        own = {name: slot_mappings[name] for name in self.layers if name in slot_mappings}
        slot_mappings = padded_slots(own, size.padded)
        mode = CUDAGraphMode.PIECEWISE
        embeds = padded if self.reads_embeds else None
        output, following = self._forward(
            ids, positions, hidden_states, metadata, slot_mappings, mode, size.across, embeds
        )
        return output[:num_tokens], following[:num_tokens]

    def _forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        mode: CUDAGraphMode,
        across: torch.Tensor | None,
        embeds: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = len(input_ids)
        of_target = {"hidden_states": hidden_states} if self._reads_target else {}
        with set_forward_context(
            metadata,
            self._config,
            num_tokens=num_tokens,
            num_tokens_across_dp=across,
            cudagraph_runtime_mode=mode,
            batch_descriptor=BatchDescriptor(num_tokens),
            slot_mapping=slot_mappings,
        ):
            output: Any = self.model(
                input_ids=input_ids, positions=positions, inputs_embeds=embeds, **of_target
            )
        return output if isinstance(output, tuple) else (output, output)


def padded_slots(slot_mappings: dict[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """Pad the slot mappings of layers to `size` tokens; padding writes nothing to the cache.

    Layers that share a slot mapping, int ``[num_tokens]``, share the padded one, too.
    """
    padded: dict[int, torch.Tensor] = {}
    for slots in slot_mappings.values():
        missing = size - len(slots)
        if id(slots) not in padded:
            pad = torch.nn.functional.pad
            padded[id(slots)] = (
                pad(slots, (0, missing), value=PADDING_SLOT_ID) if missing else slots
            )
    return {name: padded[id(slots)] for name, slots in slot_mappings.items()}
