"""What is refused, a file for each subject; `vllm_npu_prep.startup.refusals` is the whole list."""
