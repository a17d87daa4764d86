"""Removes what models leave in tables of torch and of vLLM when their engine ends."""

from types import CodeType
from typing import Any

from torch._dynamo.convert_frame import _bytecode_hooks
from torch._dynamo.eval_frame import remove_from_cache
from torch._dynamo.utils import CleanupManager
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO


def forget_models(*models: Any) -> None:
    """Remove what keeps parts of models, and their weights, in memory.

    These are hooks of compiled parts, and what torch has compiled of them, which stays with the
    code of their class. vLLM also removes hooks when the engine's object is collected
    (`LLMEngine._cleanup_instance_caches` in ``vllm/v1/engine/llm_engine.py``), by a weak reference
    to the whole model. A runner that shuts down lets go of the whole model first, so this reference
    leads nowhere then, and the part that is compiled would stay.

    Compiled code calls a function that torch has put into the globals of the class's module, and
    which has the weights as examples of its inputs. torch removes it with the code. However,
    tracebacks that torch takes while the code runs, as it does when it compiles something else,
    keep the code for good (`MetricsContext` in ``torch/_dynamo/metrics_context.py`` collects them).
    So the globals are emptied here; their names are left, for torch to remove.

    Where weights were loaded anew, vLLM's table of such layers has them, too. Its keys are weak
    references, but its values lead to the same layers.

    ``torch._dynamo.reset()`` would be shorter. But it drops what is compiled for every engine of
    the process, and leaves the hooks, the globals and vLLM's table as they are.

    Parameters
    ----------
    models
        The engine's models, including its drafter's; None stands for no model.
    """
    for model in models:
        for module in model.modules() if model is not None else ():
            LAYERWISE_INFO.pop(module, None)
            if isinstance(module, TorchCompileWithNoGuardsWrapper):
                _remove_hooks(module)
                remove_from_cache(module.original_code_object())
                _empty_globals(getattr(module, "_compiled_bytecode", None))


def _remove_hooks(module: TorchCompileWithNoGuardsWrapper) -> None:
    """Remove a compiled part's hooks, of which `cleanup` knows only the last one.

    A class that is compiled and has a base class that is compiled, as Qwen3Model has Qwen2Model,
    registers two.
    """
    module.cleanup()
    for number, hook in list(_bytecode_hooks.items()):
        if getattr(hook, "__self__", None) is module:
            _bytecode_hooks.pop(number)


def _empty_globals(code: CodeType | None) -> None:
    """Let go of what torch has made global for code that nothing runs any longer."""
    for hook in CleanupManager.instance.get(code, ()) if code is not None else ():
        hook.scope[hook.name] = None
