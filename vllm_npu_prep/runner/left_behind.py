"""What models leave in tables of torch and of vLLM when their engine ends."""

from typing import Any

from torch._dynamo.eval_frame import remove_from_cache
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO


def forget_models(*models: Any) -> None:
    """Remove what keeps parts of models, and their weights, in memory.

    These are hooks of compiled parts, and what torch has compiled of them, which stays with their
    class's code. vLLM removes hooks, too, when the engine's object is collected
    (`LLMEngine._cleanup_instance_caches` in ``vllm/v1/engine/llm_engine.py``), by a weak reference
    to the whole model. A runner that shuts down lets go of the whole model first, so the reference
    leads nowhere then, and the part that is compiled would stay.

    Where weights were loaded anew, vLLM's table of such layers has them, too. Its keys are weak
    references, but its values lead to the same layers.

    Parameters
    ----------
    models
        Of the engine, its drafter's among them; None is none.
    """
    for model in models:
        for module in model.modules() if model is not None else ():
            LAYERWISE_INFO.pop(module, None)
            if isinstance(module, TorchCompileWithNoGuardsWrapper):
                module.cleanup()
                remove_from_cache(module.original_code_object())
