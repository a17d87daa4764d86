"""The two model runners, and the parts that both have.

`runner.v1` and `runner.v2` each have a runner, the overrides of vLLM's of the same name, and the
parts that it alone has. `common` is what both do around their steps. Parts are plain objects
that get all they need as arguments and know no runner: `preparer` (tables, staging, the fused pass,
metadata), `padding`, `graphs`, `accepted`, `prompt_embeds`, `lora` and `new_weights`. `step` is the
record of a step in flight.
"""
