"""Tests in `on_device` run under the emulator or on an NPU, started from here."""

import os

collect_ignore = [] if os.environ.get("NPU_PREP_ON_DEVICE") else ["on_device"]
