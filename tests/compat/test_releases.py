"""Each supported release of vLLM in an environment of its own: `make test-all` has this."""

import subprocess

import pytest

from tests.resume.tree import ROOT
from vllm_npu_prep.compat.releases import SUPPORTED_VLLM


@pytest.mark.parametrize("version", SUPPORTED_VLLM)
def test_a_release_has_all_seams_and_the_plugin_starts(version):
    """Half an hour for one that has to be built."""
    command = ["make", "--no-print-directory", "compat", f"VLLM={version}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
