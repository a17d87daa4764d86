"""Sessions among the requests of `tests.soak`: their input comes in parts, at once or in time.

Each answer ends at a random token, and its last token is no part of what follows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.engine import greedy
from tests.helpers.prompts import VOCAB
from tests.helpers.sessions import send_part
from tests.helpers.traffic import Traffic
from tests.soak.adapters import Adapters, Use
from tests.soak.kinds import MAX_TOKENS

AT_ONCE = -1
"""In place of a number of steps between an answer and the next part."""


@dataclass
class Session:
    adapter: Use
    parts: list[list[int]]  # that were not sent yet
    wait: int  # steps from an answer to the next part, or `AT_ONCE`
    sent: list[Any] = field(default_factory=list)  # and not answered; None: there is no other
    text: list[int] = field(default_factory=list)  # that was answered, and what is kept of answers
    answer: list[int] = field(default_factory=list)  # that came since
    due: float = math.inf  # step in which the next part is sent


class Sessions:
    """Sessions of one engine in this process, whose parts begin as other requests' prompts do.

    `look` is given text, adapter and tokens of each answer, whole or begun.
    """

    def __init__(
        self,
        llm: Any,
        traffic: Traffic,
        prompts: list[list[int]],
        adapters: Adapters,
        look: Callable[[list[int], Use, list[int]], None],
    ) -> None:
        self._llm, self._prompts, self._adapters, self._look = llm, prompts, adapters, look
        self._draw, self.count, self._begun, self._step = traffic, traffic.count, 0, 0
        self._open: dict[str, Session] = {}
        self._core = llm.llm_engine.engine_core
        self._room = llm.llm_engine.vllm_config.model_config.max_model_len
        self._get_output = self._core.get_output
        self._core.get_output = self._get_outputs

    def step(self, begin: bool) -> None:
        """Before each step of the engine: begin a session if one may, go on with some, drop one."""
        self._step += 1
        if begin and self._draw.chance(0.3):
            self._begin()
        for name, session in list(self._open.items()):
            if session.due <= self._step:
                self._send(name)
            elif self._draw.chance(0.01, "aborted sessions"):
                self._core.abort_requests([name])
                self._judge(self._open.pop(name))

    def _begin(self) -> None:
        draw, number = self._draw, self._draw.number(2, 4)
        longest = (self._room - number * MAX_TOKENS) // number
        parts = [draw.pick(*self._prompts)[: draw.number(1, longest)] for _ in range(number)]
        wait = AT_ONCE if draw.chance(0.5) else draw.number(0, 3)
        adapter = self._adapters.use(draw.number(0, len(self._adapters) - 1))
        session = Session(adapter, parts, wait)
        name, self._begun = f"session-{self._begun}", self._begun + 1
        self._open[name] = session
        for _ in range(number + 1 if wait == AT_ONCE else 1):
            self._send(name)

    def _send(self, name: str) -> None:
        """Send the next part, or that there is none."""
        session = self._open[name]
        part = session.parts.pop(0) if session.parts else None
        params = greedy(MAX_TOKENS, stop_token_ids=self._draw.tokens(VOCAB // 4))
        send_part(self._llm, name, part, params, session.adapter.request)
        session.sent.append(part)
        session.due = math.inf
        self._drop_if_over(name)

    def _drop_if_over(self, name: str) -> None:
        if self._open[name].sent == [None]:
            del self._open[name]
            self.count["sessions"] += 1

    def _get_outputs(self) -> Any:
        outputs = self._get_output()
        for output in outputs.outputs:
            if (session := self._open.get(output.request_id)) is None:
                continue
            session.answer += output.new_token_ids
            if output.finish_reason is not None:
                self._judge(session)
                session.text += session.sent.pop(0) + session.answer[:-1]
                session.answer = []
                self.count["parts of sessions"] += 1
                if session.wait != AT_ONCE:
                    session.due = self._step + 1 + session.wait
                self._drop_if_over(output.request_id)
        return outputs

    def _judge(self, session: Session) -> None:
        if session.answer:
            self._look(session.text + session.sent[0], session.adapter, session.answer)
