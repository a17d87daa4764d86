"""The model runner and its parts.

`model_runner` is vLLM's V1 runner with this plugin's overrides. Everything that they do is done by
parts, plain objects that take what they need by arguments and know no runner: `preparer` (tables,
staging, the fused pass, metadata), `padding`, `inputs`, `bookkeeping`, `speculation`, `graphs`,
`lora` and `upstream_buffers`. `step` is what is known of a step while it is in flight.
"""
