"""Reports about budgets of thinking tokens."""

from tests.reports.engines import THINKS, UNTHINKS
from tests.reports.report import Ask, report, words

THINKING = [*words(20), THINKS, 50, 51]
"""A prompt that ends within a thought."""

REPORTS = (
    report(
        "vllm#51890",
        "a budget stays with its request when the batch is put in order",
        "hybrid, thinks",
        *(Ask(f"plain{n}", [*words(30 + n, n + 2), THINKS, 60], 30, at=n) for n in range(3)),
        Ask("thinks", THINKING, 24, at=2, params={"thinking_token_budget": 3}),
        Ask("ends", THINKING, 4, at=5, params={"thinking_token_budget": 0}),
        Ask("late", [*words(40, 9), THINKS, 61], 20, at=6),
        expect={"thinks": {(1, 3): UNTHINKS}},
    ),
    report(
        "vllm#54906",
        "a budget is kept beside drafts",
        "eagle, thinks",
        Ask("one", THINKING, 16, params={"thinking_token_budget": 3}),
        Ask("plain", [*words(30, 2), THINKS, 60], 24),
        Ask("many", [*words(9, 3), THINKS], 24, params={"thinking_token_budget": 9}),
        expect={"one": {(1, 3): UNTHINKS}, "many": {(9, 11): UNTHINKS}},
    ),
    report(
        "vllm#43708",
        "a thought that begins anew has no other budget",
        "eagle, thinks",
        Ask(
            "again",
            THINKING,
            24,
            params={
                "thinking_token_budget": 3,
                "allowed_token_ids": [THINKS, *UNTHINKS, 60],
            },
        ),
    ),
)
