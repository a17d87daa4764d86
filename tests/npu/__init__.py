"""The plugin's NPU path, on the real torch_npu and the emulated runtime."""
