"""Which steps exchange tokens with experts on other ranks (MC2), and with which mask; no rank."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, set_forward_context

from vllm_npu_prep.device import communicator as module
from vllm_npu_prep.device.communicator import NPUCommunicator
from vllm_npu_prep.device.mc2 import (
    A2,
    A2_8_5,
    A3,
    MC2,
    ExpertSizes,
    Mc2,
    buffer_bytes,
    limits_of,
    tokens_that_fit,
    tokens_to_exchange,
    why_not_taken,
)
from vllm_npu_prep.errors import PrepError
from vllm_npu_prep.runner import exchange

DEEPSEEK = ExpertSizes(experts=256, top_k=8, width=7168)
MB = 1 << 20


class Manager:
    """Stands in for vLLM's, and says what it was asked for."""

    def __init__(self, sizes, place):
        self.sizes = sizes
        self.group = SimpleNamespace(rank_in_group=place, all_gatherv=lambda mine, **_: mine)

    def _get_comm_group(self, is_sequence_parallel):
        return self.group

    def _get_sizes(self, num_tokens, group):
        return self.sizes

    def combine(self, hidden_states, *args):
        return "scattered"

    def dispatch_router_logits(self, *args):
        return "gathered"


@pytest.fixture
def rank():
    """Make a rank's communicator by the tokens of all ranks, in a forward pass with a mask."""
    passes = []

    def make(sizes, place, is_padding):
        made = NPUCommunicator.__new__(NPUCommunicator)
        made.device = torch.device("cpu")
        made.all2all_manager = Manager(sizes, place)
        made.mc2 = Mc2("experts", place, len(sizes), 4, "")
        passes.append(set_forward_context(None, VllmConfig(), is_padding=is_padding))
        passes[-1].__enter__()
        return made

    yield make
    for each in passes:
        each.__exit__(None, None, None)


def tensors(num_tokens):
    return torch.arange(2.0 * num_tokens).view(-1, 2) + 1, torch.ones(num_tokens, 3)


def test_a_small_step_keeps_its_tokens_and_masks_the_padding(rank):
    """Up to the rank with the most tokens; what comes back is not scattered once more."""
    mine = rank([4, 2], 1, torch.tensor([False, True]))
    x, logits = tensors(2)
    rows, scores = mine.dispatch_router_logits(x, logits)
    assert torch.equal(rows, torch.cat([x, torch.zeros(2, 2)])) and scores.shape == (4, 3)
    context = get_forward_context()
    exchange = context.additional_kwargs[MC2]
    assert exchange.active.tolist() == [True, False, False, False]
    assert context.is_padding.tolist() == [False, True, True, True]
    mine.dispatch_router_logits(x, logits)  # the next layer's
    assert context.additional_kwargs[MC2] is exchange
    assert torch.equal(mine.combine(rows), x)


def test_without_a_mask_the_tokens_that_fill_up_are_left_out(rank):
    mine = rank([1, 3], 0, None)
    mine.dispatch_router_logits(*tensors(1))
    assert get_forward_context().additional_kwargs[MC2].active.tolist() == [True, False, False]


def test_a_step_that_is_large_on_any_rank_is_gathered(rank):
    mine = rank([1, 5], 0, torch.tensor([False]))
    assert mine.dispatch_router_logits(*tensors(1)) == "gathered"
    assert MC2 not in get_forward_context().additional_kwargs
    assert mine.combine(tensors(6)[0]) == "scattered"


@pytest.mark.parametrize("tensor_rank", [0, 1])
def test_each_rank_has_the_mask_of_its_part_of_a_step(rank, tensor_rank, monkeypatch):
    """Tensor-parallel ranks divide five tokens, the last of which is padding, in parts of three."""
    monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: tensor_rank)
    mine = rank([3, 3, 3, 3], tensor_rank, torch.tensor([False] * 4 + [True]))
    mine.dispatch_router_logits(*tensors(3), is_sequence_parallel=True)
    active = get_forward_context().additional_kwargs[MC2].active
    assert active.tolist() == [[True, True, True], [True, False, False]][tensor_rank]


def test_chips_and_releases_take_different_numbers_of_ranks():
    assert limits_of("Ascend910B1", (9, 1)) is limits_of("Ascend910B3", None) is A2
    assert limits_of("Ascend910B1", (8, 5)) is A2_8_5
    assert limits_of("Ascend910_9391", (8, 5)) is A3 and limits_of("Ascend310P3", None) is None
    assert [why_not_taken(each, DEEPSEEK, 16) for each in (A2, A2_8_5, A3)] == [""] * 3
    assert why_not_taken(A2, DEEPSEEK, 12) == "12 ranks"
    assert why_not_taken(A2_8_5, DEEPSEEK, 8) == "256 experts on 8 ranks"
    assert why_not_taken(A3, DEEPSEEK._replace(experts=250), 4) == "250 experts on 4 ranks"
    assert why_not_taken(A3, DEEPSEEK._replace(width=512), 4) == "rows of 512 numbers"
    assert why_not_taken(A2, DEEPSEEK._replace(top_k=17), 4) == "17 experts for each token"


def test_a_buffer_holds_what_the_documentation_says():
    """As its formulas have it for 16 ranks, worked out by hand."""
    assert buffer_bytes(A2, DEEPSEEK, 16, 256) == 2 * (256 * 16 * 8 * 7168 * 2 + 2 * MB)
    assert buffer_bytes(A3, DEEPSEEK, 16, 32) == 2 * (16 * 32 * 16 * 14848 + 8 * 32 * 14336)
    for limits in (A2, A3):
        fit = tokens_that_fit(limits, DEEPSEEK, 16, 200 * MB)
        sizes = [buffer_bytes(limits, DEEPSEEK, 16, fit + more) for more in (0, 1)]
        assert sizes[0] <= 200 * MB < sizes[1]
    assert tokens_that_fit(A2, DEEPSEEK, 16, 4 * MB - 1) == 0


def engine(graphs=(), max_num_seqs=64, tensor=1, data=16):
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=list(graphs), max_cudagraph_capture_size=max(graphs, default=0)
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor, data_parallel_size=data),
        uniform_decode_query_len=2,
    )


@pytest.fixture
def chosen(monkeypatch):
    """A function that returns the exchange that is chosen for one more model of an engine."""
    communicator = SimpleNamespace(mc2=None, may_exchange=True)
    group = SimpleNamespace(device_communicator=communicator, ranks=range(16), world_size=16)
    options = SimpleNamespace(mc2="auto")
    asked = SimpleNamespace(options=options, functions_missing_for=lambda *_: {})
    stand_ins = {
        "RequestedEngine": lambda *_: asked,
        "exchanges_tokens": lambda _: True,
        "beside_mc2": lambda _: [],
        "mc2_limits": lambda _: A3,
        "sizes_of_experts": lambda sizes: {sizes},
        "get_ep_group": lambda: group,
        "join": lambda _: ("experts", 0),
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(exchange, name, value)
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)

    def choose(sizes):
        exchange.choose_exchange(sizes, engine())
        return communicator.mc2

    return choose


def test_tokens_are_those_of_graphs_or_decodes_that_fit(monkeypatch):
    monkeypatch.setenv("HCCL_BUFFSIZE", "8000")
    by = [tokens_to_exchange(each, A3, {DEEPSEEK}, False)[0] for each in (
        engine(graphs=(8, 256)), engine(), engine(tensor=2, data=8), engine(max_num_seqs=1000),
    )]  # fmt: skip
    assert by == [256, 128, 64, 512]
    monkeypatch.setenv("HCCL_BUFFSIZE", "")
    assert tokens_to_exchange(engine(), A3, {DEEPSEEK}, False) == (26, "")
    few = DEEPSEEK._replace(experts=128)  # 16 on each of 8 ranks
    why = "8 ranks on A2, where vllm-ascend gathers"
    assert tokens_to_exchange(engine(data=8), A2, {few}, False) == (0, why)
    assert tokens_to_exchange(engine(max_num_seqs=8, data=8), A2, {few}, True) == (16, "")


@pytest.mark.parametrize(("width", "tokens"), [(1024, 26), (8192, 23)])
def test_a_model_and_its_drafter_exchange_as_much_as_both_can(chosen, width, tokens):
    assert chosen(DEEPSEEK).max_tokens == 26
    assert chosen(DEEPSEEK._replace(width=width)).max_tokens == tokens


@pytest.mark.parametrize("widths", [(DEEPSEEK.width, 512), (512, DEEPSEEK.width)])
def test_nobody_exchanges_if_some_experts_can_not(chosen, widths):
    """The model comes first, and then its drafter."""
    of_model, of_both = (chosen(DEEPSEEK._replace(width=width)) for width in widths)
    assert (of_model is None) == (widths[0] == 512) and of_both is None


def test_ranks_that_do_not_come_are_told_in_one_line(chosen, monkeypatch):
    def join(_):
        raise RuntimeError("HCCL function error: HcclCommInit, error code is 9\nIts report")

    monkeypatch.setattr(exchange, "join", join)
    with pytest.raises(PrepError, match=r"^16 ranks .* error code is 9\); the first") as refused:
        chosen(DEEPSEEK)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("limits", "sizes", "says"),
    [
        (A3, DEEPSEEK, r"need HCCL_BUFFSIZE=956 or more, 200 MB are given"),
        (A2, DEEPSEEK._replace(width=7169), "A2 does not take rows of 7169 numbers"),
    ],
)
def test_what_was_asked_for_and_is_not_taken_is_refused(limits, sizes, says, monkeypatch):
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    with pytest.raises(PrepError, match=says) as refused:
        tokens_to_exchange(engine(), limits, {sizes}, True)
    assert "\n" not in str(refused.value)
