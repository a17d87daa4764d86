"""Whether the experts of several ranks exchange tokens by MC2, and up to how many in a step."""

from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_ep_group
from vllm.logger import init_logger

from vllm_npu_prep.attention.families import REFERENCE
from vllm_npu_prep.device import NPU_KIND
from vllm_npu_prep.device.mc2 import OPERATORS, ExpertSizes, Mc2, join, tokens_to_exchange
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.ops.moe_method import sizes_of_experts
from vllm_npu_prep.progress import log_while_waiting
from vllm_npu_prep.startup.asked import RequestedEngine
from vllm_npu_prep.startup.subjects.ranks import beside_mc2, exchanges_tokens, mc2_limits
from vllm_npu_prep.wording import counted

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own only


def choose_exchange(model: torch.nn.Module, vllm_config: VllmConfig) -> None:
    """Let the experts of a model, made but not loaded, exchange the tokens of small steps by MC2,
    if they may; all ranks decide the same.

    Raises
    ------
    PrepError
        If the option ``mc2`` is ``on``, and they can't, or if HCCL makes no group of the ranks.
    """
    asked = RequestedEngine(vllm_config, REFERENCE, NPU_KIND)
    option, sizes, limits = asked.options.mc2, sizes_of_experts(model), mc2_limits(asked)
    if option == "off" or not exchanges_tokens(asked) or beside_mc2(asked):
        return
    if sizes is None or limits is None:
        return
    layers = {ExpertSizes(*each) for each in sizes}
    tokens, why = tokens_to_exchange(vllm_config, limits, layers, option == "on")
    if lacks := asked.functions_missing_for(*OPERATORS):
        why = f"the installed CANN has no {', '.join(lacks.values())}"
    group: Any = get_ep_group()
    communicator = group.device_communicator
    if not why and not communicator.may_exchange:
        why = "a model and its drafter exchange alike, and MC2 does not take the other's experts"
    if why:
        logger.info("Experts get gathered tokens; MC2 is not used: %s.", why)
        communicator.mc2, communicator.may_exchange = None, False
        return
    if communicator.mc2 is not None:  # a drafter's experts share it
        tokens = min(tokens, communicator.mc2.max_tokens)
        communicator.mc2 = replace(communicator.mc2, max_tokens=tokens)
        return
    ranks = counted(group.world_size, "rank")
    try:
        with log_while_waiting(f"Joining {ranks} that have experts", logger.info):
            name, rank = join(group.ranks)
    except RuntimeError as error:
        logger.error("HCCL made no group for MC2. Its report:\n%s", error)
        raise PrepError(
            f"{ranks} that have experts could not join for MC2 ({str(error).partition(chr(10))[0]})"
            '; the first error of the log says why, and {"npu_prep": {"mc2": "off"}} needs no group'
        ) from error
    communicator.mc2 = Mc2(name, rank, group.world_size, tokens, limits.comm_alg)
    logger.info("Experts exchange tokens by MC2 in steps of up to %d tokens a rank.", tokens)
