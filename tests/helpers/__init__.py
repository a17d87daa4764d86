"""What several tests need."""

from vllm_npu_prep.compat import make_torchvision_importable

make_torchvision_importable()  # as in vLLM's processes: the tests ask transformers, too
