"""Models with int8 or int4 weights, and int8 inputs or float ones, in several formats.

- compressed-tensors, which vLLM reads: its int8 linear layers find `Int8LinearKernel` here, its
  int4 ones `Int4LinearKernel`, and its experts `Int8Experts` and `Int4Experts`;
- AWQ's and GPTQ's, which vLLM reads, too: int4 linear layers, by the same kernel;
- ModelSlim's, ``--quantization ascend``: a file ``quant_model_description.json`` says of each
  weight how it was quantised.
"""


def register_formats() -> None:
    """Let vLLM read these formats by this plugin's configs: needed wherever flags are parsed."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from vllm_npu_prep.quantization.awq_gptq import CheckedAWQConfig, CheckedGPTQConfig
    from vllm_npu_prep.quantization.compressed import CheckedCompressedTensorsConfig
    from vllm_npu_prep.quantization.formats import AWQ, COMPRESSED_TENSORS, GPTQ, MODELSLIM
    from vllm_npu_prep.quantization.modelslim import ModelSlimConfig

    register_quantization_config(MODELSLIM)(ModelSlimConfig)
    register_quantization_config(COMPRESSED_TENSORS)(CheckedCompressedTensorsConfig)
    register_quantization_config(AWQ)(CheckedAWQConfig)
    register_quantization_config(GPTQ)(CheckedGPTQConfig)


def register_kernels() -> None:
    """Let vLLM find the linear kernels of quantised weights: needed where a model is made."""
    from vllm_npu_prep.quantization.compressed import register_kernel

    register_kernel()
