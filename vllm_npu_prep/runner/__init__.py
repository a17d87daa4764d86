"""The model runner and its parts.

`model_runner` is vLLM's V1 runner with this plugin's overrides. The overrides call parts, which are
plain objects that get all they need as arguments and know no runner: `preparer` (tables, staging,
the fused pass, metadata), `padding`, `inputs`, `request_updates`, `bookkeeping`, `speculation`,
`graphs`, `lora` and `upstream_buffers`. `step` is the record of a step in flight.
"""
