"""Models with int8 weights and int8 inputs (W8A8), in two formats.

- compressed-tensors, which vLLM reads: its int8 linear layers find `Int8LinearKernel` here, and its
  experts `Int8Experts`;
- ModelSlim's, ``--quantization ascend``: a file ``quant_model_description.json`` says of each
  weight how it was quantised.
"""


def register_formats() -> None:
    """Let vLLM read both formats by this plugin's configs: needed wherever flags are parsed."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from vllm_npu_prep.quantization.compressed import CheckedCompressedTensorsConfig
    from vllm_npu_prep.quantization.formats import COMPRESSED_TENSORS, MODELSLIM
    from vllm_npu_prep.quantization.modelslim import ModelSlimConfig

    register_quantization_config(MODELSLIM)(ModelSlimConfig)
    register_quantization_config(COMPRESSED_TENSORS)(CheckedCompressedTensorsConfig)


def register_kernels() -> None:
    """Let vLLM find the linear kernel of int8 weights: needed where a model is made."""
    from vllm_npu_prep.quantization.compressed import register_kernel

    register_kernel()
