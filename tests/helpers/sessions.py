"""Sessions: requests whose input comes in parts, each of which is answered before the next."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers.engine import greedy
from tests.helpers.huggingface import greedy_tokens
from tests.helpers.prompts import prompts_of

if TYPE_CHECKING:
    from vllm import SamplingParams

MOST = 12
"""Tokens of an answer."""


@dataclass
class Session:
    """Parts of one session, and what transformers answers to each: token ids.

    An answer ends with a token that it doesn't hold before, which is no part of what follows.
    """

    parts: list[list[int]]
    answers: list[list[int]] = field(default_factory=list)


def sessions_of(folder: Path, seed: int, lengths: list[list[int]]) -> list[Session]:
    """Sessions with parts of these lengths, whose answers end early and late."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    sessions = []
    for number, of_parts in enumerate(lengths):
        session, text = Session(prompts_of(seed + number, of_parts)), []
        for turn, part in enumerate(session.parts):
            text += part
            (tokens,) = greedy_tokens(network, [text], MOST)
            most = MOST - (5 * number + 3 * turn) % 10
            end = max(at for at, token in enumerate(tokens[:most]) if token not in tokens[:at])
            session.answers.append(tokens[: end + 1])
            text += tokens[:end]
        sessions.append(session)
    return sessions


def send_part(
    llm: Any, name: str, part: list[int] | None, params: "SamplingParams", adapter: Any = None
) -> None:
    """Send a session's next part to an engine of this process; None tells that there is none.

    It goes to the engine's core: in one process, vLLM's frontend extends the very prompt that the
    scheduler extends.
    """
    engine = llm.llm_engine
    request = engine.input_processor.process_inputs(
        name,
        {"prompt_token_ids": [2] if part is None else list(part)},
        params,
        supported_tasks=engine.get_supported_tasks(),
        lora_request=adapter,
        resumable=part is not None,
    )
    request.external_req_id = name
    engine.engine_core.add_request(request)


def converse(llm: Any, sessions: list[Session], waits: list[int]) -> list[list[list[int]]]:
    """An engine's answers to each part of sessions that go on at the same time.

    After so many steps (`waits`) from the end of its answer a session's next part comes; -1: all
    parts come at once, before the first answer.
    """
    core, answers = llm.llm_engine.engine_core, [[[]] for _ in sessions]

    def send(number: int, turn: int) -> None:
        session = sessions[number]
        ends = turn == len(session.parts)
        params = greedy(MOST, stop_token_ids=None if ends else session.answers[turn][-1:])
        send_part(llm, f"session-{number}", None if ends else session.parts[turn], params)

    due: dict[int, tuple[int, int]] = {}  # by session: step and turn
    for number, wait in enumerate(waits):
        for turn in range(len(sessions[number].parts) + 1 if wait < 0 else 1):
            send(number, turn)
    step = 0
    while core.engine_core.scheduler.requests:
        for number, (when, turn) in list(due.items()):
            if when <= step:
                send(number, turn)
                del due[number]
        for output in core.get_output().outputs:
            number = int(output.request_id.rpartition("-")[2])
            answers[number][-1] += output.new_token_ids
            if output.finish_reason is not None:
                turn = len(answers[number])
                answers[number].append([])
                if waits[number] >= 0:
                    due[number] = (step + 1 + waits[number], turn)
        step += 1
        assert step < 500, "the engine goes on for ever"
    return [[answer for answer in each if answer] for each in answers]
