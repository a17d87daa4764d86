"""Bugs that nobody planned: one operator or constant of the package changed at random.

    python -m tests.mutants.random_mutants [--count 50] [--seed N] [--minutes 30] [--fresh]
    python -m tests.mutants.random_mutants --show "part of a change's name"

A slice of the run in tests/results/random-mutants.jsonl. Each change is planted in a copy of the
packages, as planned bugs are; the tests of its module run until one fails, the fast ones first. A
survivor either gets a test that kills it, or a line in tests/mutants/equivalent.txt that says why
no test can. Exit code 1 while a change survives. With --show: nothing runs, changes are listed.
"""

import argparse
import hashlib
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.__main__ import ROOT, SEED, run_tests
from tests.mutants.planted import Mutant
from tests.mutants.sites import Site, draw, every_site
from tests.resume.slice import Slice, SliceError, add_arguments
from tests.resume.tree import RESULTS

COMMAND = "make mutants RANDOM={count}"
COUNT = 50
FEWER = {"NPU_PREP_TEST_EXAMPLES": "100", "NPU_PREP_TEST_STEPS": "60"}
"""Examples of a property and steps of an episode, for what `make test` has more of."""
LIMIT = 15 * 60
"""Seconds that the tests of a change may take. One that never ends is caught by this."""
MOST_SURVIVORS = 0.1
"""Share of the changes that may survive, of those that a test could notice."""

EXPLAIN = "tests/test_explain_command.py"
FULL_CHECK = "tests/engine/test_full_check.py"
ON_FIA = "tests/npu/test_on_emulated_npu.py::test_tokens_equal_the_reference_family[fia-eager]"
ON_ATB = "tests/npu/test_on_emulated_npu.py::test_tokens_equal_the_reference_family[atb-eager]"
STEPS_ON_NPU = "tests/npu/test_suites_on_device.py::test_on_the_device[steps]"
HYBRIDS_ON_NPU = "tests/npu/test_layer_suites_on_device.py::test_on_the_device[hybrids]"
FOLDER_TESTS = {
    "prep": ("tests/prep", "tests/attention", EXPLAIN, "tests/runner"),
    "attention": ("tests/attention", "tests/runner"),
    "attention/kernels": ("tests/attention", "tests/graph"),
    "runner": ("tests/runner",),
}
"""Tests of any module of a folder; those of the module itself, which `BY_NAME` adds, come first."""
LAST = ("tests/differential",)
"""What runs when no other test has failed."""
BY_NAME: dict[str, tuple[str, ...]] = {
    "prep/batch.py": ("tests/prep/test_against_oracle.py", "tests/prep/test_graph_padding.py"),
    "prep/bookkeeping.py": ("tests/runner/test_books.py", "tests/runner/test_bookkeeping.py"),
    "prep/capture_sizes.py": ("tests/prep/test_graph_padding.py", "tests/graph/test_config.py"),
    "prep/checks.py": ("tests/inspect/test_cheap_check.py", "tests/prep/test_states.py"),
    "prep/compiled.py": ("tests/prep/test_arrays.py",),
    "prep/embeds.py": ("tests/prep/test_embeds.py", "tests/engine/test_prompt_embeds.py"),
    "prep/fused_pass.py": ("tests/prep/test_against_oracle.py", "tests/prep/test_graph_padding.py"),
    "prep/layout.py": ("tests/prep/test_padding_and_layout.py",),
    "prep/mask.py": ("tests/attention/test_mask_cache.py",),
    "prep/oracle.py": ("tests/prep/test_against_oracle.py", "tests/prep/test_worked_examples.py"),
    "prep/padding.py": ("tests/prep/test_padding_and_layout.py", "tests/prep/test_dispatch.py"),
    "prep/tables.py": ("tests/prep/test_against_oracle.py", "tests/prep/test_slots.py"),
    "attention/backend.py": ("tests/engine/test_windows.py", "tests/engine/test_pooling.py"),
    "attention/families.py": ("tests/startup",),
    "attention/fused_calls.py": ("tests/attention/test_fused_limits.py",),
    "attention/fused_releases.py": ("tests/attention/test_fused_limits.py",),
    "attention/kv_transfer.py": ("tests/engine/test_kv_transfer.py",),
    "attention/latent_releases.py": ("tests/attention/test_fused_limits.py",),
    "attention/metadata.py": ("tests/engine/test_graphs.py",),
    "attention/state_pages.py": ("tests/attention/test_state_groups.py",),
    "attention/states.py": ("tests/attention/test_state_groups.py", "tests/engine/test_hybrids.py"),
    "attention/kernels/atb.py": (ON_ATB,),
    "attention/kernels/fia.py": ("tests/attention/test_fused_limits.py", ON_FIA),
    "attention/kernels/fused_delta.py": (HYBRIDS_ON_NPU,),
    "attention/kernels/gated_delta.py": ("tests/attention/test_gated_delta.py",),
    "attention/kernels/latent.py": ("tests/attention/test_latent.py", STEPS_ON_NPU),
    "attention/kernels/latent_fia.py": (STEPS_ON_NPU,),
    "attention/kernels/latent_reference.py": ("tests/attention/test_latent.py",),
    "attention/kernels/reference.py": ("tests/attention/test_reference_kernels.py",),
    "runner/drafters.py": ("tests/engine/test_speculation.py", "tests/engine/test_mtp.py"),
    "runner/graphs.py": ("tests/runner/test_graphs.py", "tests/engine/test_graphs.py"),
    "runner/inputs.py": ("tests/runner/test_inputs.py", "tests/engine/test_multimodal.py"),
    "runner/lora.py": ("tests/runner/test_lora.py", "tests/engine/test_lora.py"),
    "runner/new_weights.py": ("tests/engine/test_weights_and_resets.py",),
    "runner/prompt_embeds.py": ("tests/engine/test_prompt_embeds.py",),
    "runner/sampling.py": ("tests/engine/test_sampling.py",),
    "runner/speculation.py": (
        "tests/runner/test_speculation.py",
        "tests/engine/test_speculation.py",
    ),
}
"""Tests of a module whose own test file has another name, or that other tests meet best."""


def read_equivalent(text: str) -> dict[str, str]:
    """Changes of the list by name, and why nothing can notice them."""
    found: dict[str, str] = {}
    key = ""
    for line in text.splitlines():
        if line.startswith("    "):
            found[key] = f"{found[key]} {line.strip()}".strip()
        elif line and not line.startswith("#"):
            key = line
            found[key] = ""
    return found


EQUIVALENT = read_equivalent(Path(__file__).with_name("equivalent.txt").read_text())


def suite_for(path: str) -> tuple[str, ...]:
    """Tests of a module, in the order in which they run."""
    folder, _, name = path.rpartition("/")
    own = f"tests/{folder.split('/')[0]}/test_{name}"
    first = BY_NAME.get(path, ()) or ((own,) if (ROOT / own).exists() else ())
    return tuple(dict.fromkeys((*first, *FOLDER_TESTS[folder], *LAST)))


def mutant_of(site: Site) -> Mutant:
    """A change as a bug that can be planted."""
    return Mutant(site.key, site.path, *site.planted(), tests=suite_for(site.path))


def version(mutant: Mutant) -> str:
    """Changes with the change itself; tests may be added that notice it."""
    told = (mutant.path, mutant.before, mutant.after)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:8]


def resume(part: Slice, count: int, kept: str) -> int:
    """Run a slice of the changes that the run's seed draws."""
    mutants = {site.key: mutant_of(site) for site in draw(part.seed, count)}
    versions = {key: version(mutant) for key, mutant in mutants.items()}
    for key in mutants:
        known = part.latest.get(key)
        if key in EQUIVALENT and (known is None or known.outcome != "equivalent"):
            part.record(key, "equivalent", 0, by=EQUIVALENT[key], version=versions[key])
    todo = part.pending(versions)

    def one(key: str) -> None:
        start = time.perf_counter()
        mutant, variables = mutants[key], {**FEWER}
        if not mutant.path.startswith("prep/"):  # which has all compiled code: compiled once
            variables["NUMBA_CACHE_DIR"] = f"{kept}/numba"
        verdict = run_tests(mutant, kept, LIMIT, ("-p", "tests.mutants.order"), **variables)
        seconds = time.perf_counter() - start
        part.record(key, verdict.outcome, seconds, by=verdict.by, version=versions[key])

    whole = part.play(todo, one, len(todo))
    left = len(part.pending(versions))
    failed = part.finish(left, COMMAND.format(count=count))
    print(share({key: result.outcome for key, result in part.latest.items() if key in versions}))
    return failed if whole else 130


def share(outcomes: dict[str, str]) -> str:
    """How many changes survive, in a line."""
    killed, survived, equivalent = (
        sum(outcome == each for outcome in outcomes.values())
        for each in ("caught", "missed", "equivalent")
    )
    noticed = killed + survived
    part = survived / noticed if noticed else 0.0
    judged = "under" if part < MOST_SURVIVORS else "NOT under"
    return (
        f"{len(outcomes)} random changes: {killed} killed, {survived} survived, {equivalent} "
        f"equivalent; {part:.0%} of those that a test could notice survive, {judged} "
        f"{MOST_SURVIVORS:.0%}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.random_mutants")
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    add_arguments(parser)
    parser.add_argument("--count", type=int, default=COUNT, help="how many changes a run has")
    parser.add_argument("--seed", type=int, help=f"of a run that begins; {SEED} without it")
    parser.add_argument("--show", metavar="PART", help="list changes with this in their names")
    args = parser.parse_args()
    if args.show is not None:
        print("\n".join(site.key for site in every_site() if args.show in site.key))
        return 0
    try:
        part = Slice(
            RESULTS / "random-mutants.jsonl",
            args.minutes,
            seed=args.seed,
            default_seed=SEED,
            settings={"count": args.count, **FEWER},
            fresh=args.fresh,
            retry=args.retry,
        )
    except SliceError as error:
        print(f"{COMMAND.format(count=args.count)}: {error}", file=sys.stderr)
        return 2
    with part, tempfile.TemporaryDirectory(prefix="npu-prep-mutants-") as kept:
        return resume(part, args.count, kept)


if __name__ == "__main__":
    sys.exit(main())
