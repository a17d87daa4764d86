"""A pool of K and V in Mooncake's own store, with its master, which two engines share over TCP."""

import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SEED
from tests.engine.test_mooncake_store import CASES as MODELS
from tests.engine.test_mooncake_store import MAX_TOKENS, pooled
from tests.helpers.engine import make_model
from tests.helpers.huggingface import reference
from tests.helpers.mooncake import described_store
from tests.helpers.prefill_decode import HOST, Side, variables_of_mooncake
from tests.helpers.prompts import prompts_of
from tests.helpers.ranks import PRELOADED
from tests.server.process import free_port

RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # First: processes are forked for it, which threads of a store would not outlive
    "two ranks": ("K and V", "V2", RANKS),
    "K and V": ("K and V", "V2", {}),
    "windows": ("windows", "V2", {}),
    "hybrid": ("hybrid", "V2", {}),
    "V1": ("latent", "V1", {}),
}


@pytest.fixture(scope="module")
def sides(tmp_path_factory) -> Iterator[list[Side]]:
    """Two processes for engines that have one pool, of which each holds a part."""
    folder, port = tmp_path_factory.mktemp("store"), free_port()
    variables = variables_of_mooncake()
    program = Path(variables["PYTHONPATH"], "mooncake", "mooncake_master")
    ports = [f"--rpc_port={port}", f"--metrics_port={free_port()}"]
    sizes = {"global_segment_size": 64 << 20, "local_buffer_size": 64 << 20}
    variables |= {"VLLM_HOST_IP": HOST}
    variables["MOONCAKE_CONFIG_PATH"] = str(described_store(folder, port, **sizes))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with open(folder / "master.log", "w") as log:
        given: dict[str, Any] = {"env": os.environ | variables, "stdout": log, "stderr": log}
        master = subprocess.Popen([program, *ports], **given)
        made = [Side(context, "kv_both", variables) for _ in range(2)]
        yield made
        for side in made:
            side.end()
        master.kill()
        master.wait()


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_found_that_the_other_engine_computed(sides, tmp_path, name):
    """All whole blocks are found, though the engine's own cache is empty."""
    of_model, runner, ranks = CASES[name]
    config, lengths, settings, more = MODELS[of_model]
    model, prompts = make_model(tmp_path / name, **config), prompts_of(SEED, lengths)
    expected = reference(model, prompts, MAX_TOKENS)
    settings = pooled(**{**settings, **more, **ranks})
    for side in sides:
        side.begin(runner, model, free_port(), **settings)
    for side in sides:
        side.answer()
    for turn, side in enumerate(sides):
        free = side.ask("free")
        tokens, cached = side.ask("generate", prompts, MAX_TOKENS, [{}] * len(prompts))
        assert tokens == expected
        size = settings["block_size"]
        assert cached == [turn * ((length - 1) // size * size) for length in lengths]
        assert side.ask("free") == free
    for side in sides:
        side.ask("end")
