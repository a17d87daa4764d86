"""One address for servers that compute prompts and servers that decode them, over Mooncake.

    python examples/prefill_decode_proxy.py --port 8000 \
        --prefill http://localhost:8100 http://localhost:8998 --decode http://localhost:8200

--prefill takes a server's address and that of its bootstrap server (VLLM_MOONCAKE_BOOTSTRAP_PORT);
both options may be given several times, and requests go round. A prompt is computed by the one
server, and its K and V are fetched by the other one, which answers. Where the first one is gone,
or a request can't be divided, the decoding server does all of it.
"""

import argparse
import asyncio
import itertools
import json
import uuid
from collections.abc import Iterator
from typing import Any

import aiohttp
from aiohttp import web

DIVIDED = ("/v1/completions", "/v1/chat/completions")
HOP_BY_HOP = {"connection", "content-encoding", "content-length", "date", "host", "server"}
HOP_BY_HOP |= {"keep-alive", "transfer-encoding"}
GONE = aiohttp.ClientConnectionError, asyncio.TimeoutError


class Proxy:
    """Takes requests to one server that computes prompts and one that decodes."""

    def __init__(self, prefill: list[tuple[str, str]], decode: list[str]) -> None:
        self._prefill: Iterator[tuple[str, str]] = itertools.cycle(prefill)
        self._decode: Iterator[str] = itertools.cycle(decode)

    async def connect(self, app: web.Application) -> Any:
        """Keep connections to the servers for as long as the proxy runs."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._session:
            yield

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Answer a request that needs no prompt, or that one server answers."""
        return await self._answer(request, await request.read())

    async def divide(self, request: web.Request) -> web.StreamResponse:
        """Answer a request whose prompt the one server computes, and which the other one decodes.

        An error of the first one, such as that of a prompt that is too long, is the answer.
        """
        data = await request.read()
        try:
            body = json.loads(data)
        except ValueError:
            body = None  # the server has the words for it
        if not is_divisible(body):
            return await self._answer(request, data)
        url, bootstrap = next(self._prefill)
        transfer = {"transfer_id": uuid.uuid4().hex}
        try:
            async with self._session.get(f"{bootstrap}/query") as response:
                (engine,) = (await response.json()).values()
            asked = {**only_prompt(body), "kv_transfer_params": to_decode_elsewhere(transfer)}
            path, headers = f"{url}{request.path}", passed_on(request.headers)
            async with self._session.post(path, json=asked, headers=headers) as response:
                answer = await response.read()
                if response.status != 200:
                    shown = passed_on(response.headers)
                    return web.Response(status=response.status, body=answer, headers=shown)
        except GONE as error:
            print(f"{url} is gone ({error}): the decoding server computes the prompt", flush=True)
            return await self._answer(request, data)
        body["kv_transfer_params"] = {
            **transfer,
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": engine["engine_id"],
            "remote_bootstrap_addr": bootstrap,
        }
        return await self._answer(request, json.dumps(body).encode())

    async def _answer(self, request: web.Request, data: bytes) -> web.StreamResponse:
        """Pass on what a decoding server answers, piece by piece."""
        url, headers = f"{next(self._decode)}{request.path_qs}", passed_on(request.headers)
        try:
            sent = self._session.request(request.method, url, data=data, headers=headers)
            async with sent as response:
                shown = passed_on(response.headers)
                answer = web.StreamResponse(status=response.status, headers=shown)
                await answer.prepare(request)
                async for piece in response.content.iter_any():
                    await answer.write(piece)
                await answer.write_eof()
                return answer
        except aiohttp.ClientConnectorError as error:
            message = {"message": f"{url} can't be reached: {error}", "type": "BadGateway"}
            return web.json_response({"error": message | {"code": 502}}, status=502)


def is_divisible(body: Any) -> bool:
    """Tell whether a request has one prompt and one answer, as the transfer of a prompt needs."""
    if not isinstance(body, dict) or body.get("n", 1) != 1 or body.get("use_beam_search"):
        return False
    prompt = body.get("prompt", "")
    return isinstance(prompt, str) or all(isinstance(token, int) for token in prompt)


def only_prompt(body: dict[str, Any]) -> dict[str, Any]:
    """Return the request whose only token ends it, whatever token it is."""
    left_out = "stream_options", "max_completion_tokens", "stop", "stop_token_ids", "min_tokens"
    kept = {key: value for key, value in body.items() if key not in left_out}
    return {**kept, "stream": False, "max_tokens": 1, "ignore_eos": True}


def to_decode_elsewhere(transfer: dict[str, Any]) -> dict[str, Any]:
    return {**transfer, "do_remote_decode": True, "do_remote_prefill": False}


def passed_on(headers: Any) -> dict[str, str]:
    """Return headers but those of one connection alone."""
    return {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}


def main() -> None:
    """Serve until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument(
        "--prefill",
        nargs=2,
        action="append",
        required=True,
        metavar=("URL", "BOOTSTRAP"),
        help="a server that computes prompts, and its bootstrap server",
    )
    parser.add_argument(
        "--decode", action="append", required=True, metavar="URL", help="a server that decodes"
    )
    args = parser.parse_args()
    proxy = Proxy([(url, bootstrap) for url, bootstrap in args.prefill], args.decode)
    app = web.Application(client_max_size=1 << 30)
    app.cleanup_ctx.append(proxy.connect)
    app.add_routes([web.post(path, proxy.divide) for path in DIVIDED])
    app.add_routes([web.route("*", "/{path:.*}", proxy.forward)])
    web.run_app(app, host=args.host, port=args.port, print=None)


if __name__ == "__main__":
    main()
