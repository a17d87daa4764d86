"""One card computes prompts while another one decodes them: two engines that are alive at once.

Each engine is a process with a card of its own. They share a folder of a KV connector, and notes in
another folder, by which they wait for each other: every store stops half-way, between the layers of
the model, until the other engine decodes the prompt before.
"""

import asyncio
import os
import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.helpers.engine import graphs
from tests.helpers.ranks import RankProbe, Ranks, serve_on_ranks
from tests.helpers.waiting import until

BLOCK_SIZE = 16
TOKENS = 24
"""Of each request, so that several decode at once."""
SECONDS = 240
"""Time limit of a wait for the other engine."""


class Board:
    """Notes of processes to each other, in a folder; a failure of one ends the other's waits."""

    FAILED = "failed"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tell(self, note: str, text: str = "") -> None:
        """Leave a note."""
        unfinished = self.folder / f"{note}.{os.getpid()}"
        unfinished.write_text(text)
        unfinished.rename(self.folder / note)

    def has(self, note: str) -> bool:
        """Whether it was left.

        Raises
        ------
        RuntimeError
            If the other process has failed.
        """
        failed = self.folder / self.FAILED
        if failed.exists():
            raise RuntimeError(f"the other engine failed: {failed.read_text()}")
        return (self.folder / note).exists()

    async def heard(self, note: str) -> None:
        """Wait for a note."""
        await until(lambda: self.has(note))

    def wait_for(self, note: str) -> None:
        """The same, where nothing else runs."""
        asyncio.run(self.heard(note))


class HoldingProbe(RankProbe):
    """Stops stores of one prompt half-way."""

    def probe_hold(self, notes: str, prompt: int, until: str) -> None:
        """Store the first layer of the next prompt, and half of the second; wait; store the rest.

        Parameters
        ----------
        notes
            Folder of the `Board`.
        prompt
            Its number, which is told.
        until
            What to wait for.
        """
        from safetensors.torch import save

        from vllm_npu_prep.attention import kv_transfer

        board, upstream, stored = Board(Path(notes)), kv_transfer.save_file, []

        def save_file(tensors: dict[str, Any], path: str) -> None:
            stored.append(path)
            if len(stored) == 2:
                whole = save(tensors)
                Path(path).write_bytes(whole[: len(whole) // 2])
                board.tell(f"half of {prompt} is stored")
                board.wait_for(until)
                kv_transfer.save_file = upstream  # type: ignore[attr-defined]
            upstream(tensors, path)

        kv_transfer.save_file = save_file  # type: ignore[attr-defined]


def with_blocks(prompts: list[list[int]]) -> list[int]:
    """Numbers of the prompts that have a whole block to hand over, in order."""
    return [number for number, prompt in enumerate(prompts) if len(prompt) > BLOCK_SIZE]


def early_one(prompts: list[list[int]]) -> int:
    """The prompt that is asked for while it is half stored."""
    return with_blocks(prompts)[2]


async def compute(ranks: Ranks, prompts: list[list[int]], notes: Path) -> dict[str, Any]:
    """The engine that computes prompts, one after the other, and a token of each."""
    board, tokens, before = Board(notes), {}, None
    await board.heard("begin")
    for number in with_blocks(prompts):
        if before is not None:
            until = f"{before} is decoded"
            await ranks.ask("probe_hold", str(notes), number, until)
        (tokens[number],) = await ranks.generate([prompts[number]], 1)
        board.tell(f"{number} is stored")
        before = number
    await board.heard("end")
    return {"tokens": tokens, "facts": await ranks.ask("probe_facts")}


async def decode(
    ranks: Ranks, prompts: list[list[int]], notes: Path, files: Path
) -> dict[str, Any]:
    """The engine that decodes them, each beside those before and while the next one is stored."""
    board = Board(notes)
    alone = await ranks.generate(prompts, TOKENS)
    shutil.rmtree(files)  # so that nothing is known but what the other engine stores
    assert await ranks.llm.reset_prefix_cache()
    decoder = Decoder(ranks, board)
    board.tell("begin")
    for number in range(len(prompts)):
        if number not in with_blocks(prompts):
            decoder.begin(number, prompts[number])
    order, early = with_blocks(prompts), early_one(prompts)
    for number, after in zip(order, [*order[1:], None]):
        await board.heard(f"{number} is stored")
        if after is not None:
            await board.heard(f"half of {after} is stored")
        if after == early:
            await decoder.begin(early, prompts[early])
        if number != early:
            decoder.begin(number, prompts[number])
    tokens = await decoder.all_tokens()
    counts = await ranks.ask("probe_counts")
    assert await ranks.llm.reset_prefix_cache()
    again = Decoder(ranks, board)
    await again.begin(early, prompts[early])
    board.tell("end")
    return {
        "alone": alone,
        "tokens": [tokens[number] for number in range(len(prompts))],
        "cached": decoder.cached,
        "again": (await again.all_tokens())[early],
        "cached_again": again.cached[early],
        "most": decoder.most,
        "counts": counts,
        "facts": await ranks.ask("probe_facts"),
    }


class Decoder:
    """Requests in flight, what each of them found computed, and how many decoded at once."""

    def __init__(self, ranks: Ranks, board: Board) -> None:
        self._ranks, self._board = ranks, board
        self._tasks: dict[int, asyncio.Task[list[int]]] = {}
        self._decoding: set[int] = set()
        self.cached: dict[int, int] = {}
        self.most = 0

    def begin(self, number: int, prompt: list[int]) -> "asyncio.Task[list[int]]":
        """Ask for a prompt's tokens."""
        self._tasks[number] = asyncio.create_task(self._decode(number, prompt))
        return self._tasks[number]

    async def all_tokens(self) -> dict[int, list[int]]:
        """Those of every request."""
        return {number: await task for number, task in self._tasks.items()}

    async def _decode(self, number: int, prompt: list[int]) -> list[int]:
        tokens: list[int] = []
        async for output in self._ranks.stream(prompt, TOKENS):
            tokens = list(output.outputs[0].token_ids)
            self.cached[number] = output.num_cached_tokens
            self._decoding.add(number)
            self.most = max(self.most, len(self._decoding))
            if len(tokens) == 2:
                self._board.tell(f"{number} is decoded")
        self._decoding.discard(number)
        return tokens


async def _or_tell(talk: Any, notes: Path, ranks: Ranks) -> dict[str, Any]:
    try:
        told: dict[str, Any] = await talk(ranks)
    except BaseException as error:
        if not (notes / Board.FAILED).exists():  # else this is why the other one failed
            Board(notes).tell(Board.FAILED, f"{talk.func.__name__}: {error!r}")
        raise
    return told


def run(model: Path, dtype: str, prompts: list[list[int]]) -> dict[str, Any]:
    """What both engines tell.

    Parameters
    ----------
    model
        Folder of the model, which has two layers.
    dtype
        Of both.
    prompts
        Token ids; one of those that have a block is asked for too early.
    """
    settings: dict[str, Any] = {
        "dtype": dtype,
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 256,
        "enable_chunked_prefill": False,
        "distributed_executor_backend": "uni",
        "worker_extension_cls": "tests.npu.two_cards.HoldingProbe",
        "additional_config": {"npu_prep": {"attention": "fia", "check": "cheap"}},
    }
    with TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        notes, files = Path(folder) / "notes", Path(folder) / "files"
        failed = notes / Board.FAILED
        notes.mkdir()

        def start(role: str, card: int, talk: Any, **more: Any) -> Any:
            transfer = {
                "kv_connector": "ExampleConnector",
                "kv_role": role,
                "kv_connector_extra_config": {"shared_storage_path": str(files)},
            }
            own = {"device_ids": [card], "kv_transfer_config": transfer, **more}
            talk = partial(_or_tell, partial(talk, prompts=prompts, notes=notes), notes)
            engine = pool.submit(serve_on_ranks, model, settings | own, talk, seconds=2 * SECONDS)
            engine.add_done_callback(tell_of_failure)
            return engine

        def tell_of_failure(engine: Any) -> None:  # of one that did not even start
            if engine.exception() is not None and not failed.exists():
                Board(notes).tell(Board.FAILED, repr(engine.exception()))

        pieces = graphs("PIECEWISE", 1, 4, 8, async_scheduling=True)
        computes = start("kv_producer", 0, compute, async_scheduling=False)
        decodes = start("kv_consumer", 1, partial(decode, files=files), **pieces)
        both = {"computes": computes, "decodes": decodes}
        wait(both.values())
        assert not failed.exists(), failed.read_text()
        return {name: engine.result() for name, engine in both.items()}
