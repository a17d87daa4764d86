"""Which calls of ``npu_fused_infer_attention_score`` a release of CANN takes.

Several kernels are behind this one operator, and each release chooses among them by other rules:

===========  ======================================================================================
release      kernels for calls without rope and quantisation, in the layout TND
===========  ======================================================================================
9.0 and 9.1  FAI: any heads of up to 256; in a cache, blocks of 16 to 512. V3: everything else
8.5          V3: heads of 64 and 128, except what is FAI's. FAI: grouped queries without a window,
             heads of up to 256; in a cache, blocks of 16 to 512. PFA: everything else
8.3          PFA: everything
===========  ======================================================================================

Sources: CANN's published ops-transformer (GitHub ``mirror-cann/ops-transformer``), tags v8.5.0,
v9.0.0 and v9.1.0.pre and branch 9.1.0: ``RouteToFia``, ``CheckSpecConditions``, ``IsUsingFAI`` and
``CheckFAISinglePara`` for the choice and for FAI; ``CheckFeatureHeadDim``,
``CheckFeatureNoquantBlockSize`` and ``ValidateNoRopeLayoutDim`` for V3;
``CheckInputShapeWhenLayoutIsTND``, ``CheckPAWhenBaseApi`` and ``checkPABlockSizeAndBlockTable`` for
PFA. For 8.3: GitHub ``hicann/ops-transformer``, commit b8cad11 of October 2025, which calls itself
8.3: ``RouteToFia`` takes calls with rope alone, and PFA checks what it checks in 8.5;
vllm-project/vllm-ascend saw the same (5425, 7729, 9632). No test runs 8.3. Start-up, ``doctor``
and the split of batches read this table; nothing was run on hardware.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

MAX_LENGTHS = 4096
"""The most requests of a call of PFA, and by the documentation of every kernel."""


class Form(StrEnum):
    """How the plugin calls the operator. Encoders call another operator."""

    PROMPT = "prompts"  # fresh K and V, sparse_mode 3
    CHUNK = "chunks of prompts"  # in the cache, sparse_mode 3
    DECODE = "decodes"  # in the cache, sparse_mode 0, no mask
    WINDOW = "prompts with a window"  # fresh K and V, sparse_mode 4
    PAGED_WINDOW = "steps with a window"  # in the cache, sparse_mode 4

    @property
    def is_paged(self) -> bool:
        """Return whether K and V are in the cache."""
        return self not in (Form.PROMPT, Form.WINDOW)

    @property
    def has_window(self) -> bool:
        return self in (Form.WINDOW, Form.PAGED_WINDOW)


class Kernel(StrEnum):
    """The kernels behind the operator, by the names in CANN's sources."""

    FAI = "FAI"
    V3 = "V3"
    PFA = "PFA"


@dataclass(frozen=True)
class FusedCall:
    """What decides which kernel a call reaches.

    The numbers of heads are those of one rank, `block_size` is in tokens, and `dtype` is that of
    query, key and value as torch prints it: ``torch.bfloat16``.
    """

    form: Form
    dtype: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int


def _fits_fai(call: FusedCall) -> bool:
    blocks_fit = call.block_size % 16 == 0 and call.block_size <= 512
    return call.head_size <= 256 and (blocks_fit or not call.form.is_paged)


def _of_83(call: FusedCall) -> Kernel:
    return Kernel.PFA


def _of_85(call: FusedCall) -> Kernel:
    is_grouped = call.num_heads != call.num_kv_heads
    is_fai = is_grouped and not call.form.has_window and _fits_fai(call)
    leaves_to_fai = is_fai and (call.block_size == 128 or not call.form.is_paged)
    if not leaves_to_fai and call.head_size in (64, 128):
        return Kernel.V3
    return Kernel.FAI if is_fai else Kernel.PFA


def _of_90(call: FusedCall) -> Kernel:
    return Kernel.FAI if _fits_fai(call) else Kernel.V3


@dataclass(frozen=True)
class Release:
    """A release of CANN, or several releases that choose kernels alike.

    `first` is its first version, as major and minor number, and `kernel_of` returns the kernel that
    a call reaches.
    """

    name: str
    first: tuple[int, int]
    kernel_of: Callable[[FusedCall], Kernel]
    head_sizes_of_v3: tuple[int, ...] = ()


RELEASES = (
    Release("9.0", (9, 0), _of_90, (64, 128, 192)),
    Release("8.5", (8, 5), _of_85, (64, 128)),
    Release("8.3", (8, 3), _of_83),
)
"""The known releases, the newest first; a newer version counts as the newest."""

OLDEST = RELEASES[-1]


def version_of(text: str) -> tuple[int, int] | None:
    """Return the major and minor number of a version; None if the text has none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def release_of(version: str) -> Release | None:
    """Return the release of a version of CANN; None if it is older than `OLDEST`.

    The version is as CANN reports it, such as ``8.5.0``; an unknown one counts as the newest
    release.
    """
    numbers = version_of(version)
    if numbers is None:
        return RELEASES[0]
    return next((release for release in RELEASES if numbers >= release.first), None)


@dataclass(frozen=True)
class FusedRules:
    """Which calls the installed operator takes.

    Attributes
    ----------
    documented
        Whether calls also have to keep what only the documentation demands: blocks of 128 tokens,
        at most `MAX_LENGTHS` requests, and a cache with room for all blocks of a batch, where
        shared blocks are counted for each request.
    """

    release: Release
    documented: bool = False

    def refusal(self, call: FusedCall) -> str | None:
        """Return what the operator takes instead, to follow "takes" in a message; None if it takes
        it."""
        if call.head_size > 256:
            return "heads of up to 256"
        kernel, size, paged = self.release.kernel_of(call), call.block_size, call.form.is_paged
        if kernel is Kernel.PFA:
            return self._refusal_of_pfa(call)
        if kernel is Kernel.V3 and call.head_size not in self.release.head_sizes_of_v3:
            return "blocks of 16 to 512 tokens for these heads"
        if kernel is Kernel.V3 and paged:
            # With several query tokens a head size of 192 also has blocks of up to 1024.
            largest = 1024 if call.head_size in (64, 128) else 512
            if size % 16 or size > largest:
                return f"blocks of 16 to {largest} tokens for these heads"
        if self.documented and paged and size != 128:
            return "blocks of 128 tokens, by its documentation"
        return None

    def _refusal_of_pfa(self, call: FusedCall) -> str | None:
        if self.release is OLDEST and call.head_size in (64, 128):
            sizes_fit = True
        else:
            sizes_fit = call.head_size == 192 and call.num_heads == call.num_kv_heads
        if call.form.has_window and call.head_size not in (64, 128):
            return "windows for heads of 64 and 128"
        if not sizes_fit:
            return "heads of 64, 128 and 192, and others where several query heads share K and V"
        if call.dtype != "torch.bfloat16":
            return "bfloat16 for these heads"
        if call.form.is_paged and (call.block_size % 128 or call.block_size > 1024):
            return "blocks of 128 to 1024 tokens, in steps of 128, for these heads"
        if self.documented and call.form.is_paged and call.block_size != 128:
            return "blocks of 128 tokens, by its documentation"
        return None

    def limits_batches(self, calls: Iterable[FusedCall]) -> bool:
        """Return whether a call may have at most `MAX_LENGTHS` requests, whose blocks together are
        at most those of the cache, where shared blocks are counted for each request."""
        return self.documented or any(self.release.kernel_of(call) is Kernel.PFA for call in calls)
