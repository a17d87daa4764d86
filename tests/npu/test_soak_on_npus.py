"""Engines that `make soak` plays on the emulated card: one of each kind, with hazards as errors.

Streams are slow in different ways. Tokens are held against transformers in float32.
"""

import pytest

from tests.helpers.emulator import emulate, why_no_emulator
from tests.soak.kinds import FILES, HOST, NPU
from tests.soak.test_engines import first, kept

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator())

STEPS = 30
SEEDS = {
    "hybrid": first(NPU, model="Qwen3_5ForCausalLM", runner="V2", int8="", sleeps=True).seed,
    "drafts": first(NPU, model="Qwen3NextForCausalLM", runner="V1", drafts="mtp", int8="").seed,
    "latent": first(
        NPU, model="DeepseekV3ForCausalLM", runner="V2", drafts="mtp", connector=""
    ).seed,
    "int8": first(NPU, model="Qwen3MoeForCausalLM", int8="compressed-tensors").seed,
    "adapters": first(NPU, adapters=True, runner="V2", sleeps=True).seed,
    "files": first(NPU, connector=FILES, runner="V1").seed,
    "host": first(NPU, connector=HOST, runner="V2").seed,
    "images": first(NPU, model="Qwen3VLForConditionalGeneration", runner="V1").seed,
    "ranks": first(NPU, layout="tp2", runner="V2").seed,
    "stages": first(NPU, layout="pp2").seed,
    "engines": first(NPU, layout="dp2").seed,
    **{f"seed {seed}": seed for seed in kept(NPU)},
}
"""Seeds of engines; those that failed once come last."""


@pytest.mark.parametrize("name", SEEDS)
def test_an_engine_of_each_kind_agrees(name):
    ran = emulate(
        *("-m", "tests.soak", "--seed", str(SEEDS[name]), "--steps", str(STEPS)),
        options=("--devices", "2", "--hang-seconds", "300", "--delay", "skewed"),
        timeout=900,
    )
    print(ran.stdout[-3000:])
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
    assert f"seed {SEEDS[name]} agreed" in ran.stdout
