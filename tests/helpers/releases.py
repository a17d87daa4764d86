"""Names of vLLM that tests use and that its supported releases have in different places."""

from functools import cache
from importlib import import_module
from typing import Any

from vllm_npu_prep.compat.releases import is_since


@cache
def serve_parser() -> Any:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    folder = "common" if is_since("0.33.0") else "launchers"
    return import_module(f"vllm.entrypoints.{folder}.cli_args").make_arg_parser(
        FlexibleArgumentParser()
    )
