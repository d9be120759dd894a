"""A server that speaks OpenAI's protocol and misbehaves as the model that a request names, or its command line, says.

`python tests/ab_server.py --port 8000 --boot stubborn` is a process of its own; `in_thread()` serves tests of requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

Send = Callable[[dict[str, Any]], Awaitable[None]]
SLOW_S, MANY = 0.2, 1000
BOOTS = ("good", "dies", "deaf", "unready", "stubborn", "parent", "daemon", "loud")


def say(text: str) -> None:
    """A line of the log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


WHOLE_STREAMS = {
    "rubbish": "data: {rubbish\n\n",
    "digits": f'data: {{"choices": [], "usage": {{"prompt_tokens": {"9" * 5000}}}}}\n\n',
    "nested": f"data: {'[' * 100_000}\n\n",
    "object": 'data: {"object": "error", "message": "out of memory"}\n\n',
    "abort": 'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": "abort"}]}\n\ndata: [DONE]\n\n',
    "halves": 'data: {"choices": [{"delta": {"content": "a\\ud83d"}}]}\n\n'
    'data: {"choices": [{"delta": {"content": "\\ude00b\\ud83d"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n',
    "lines": ': hi\r\nevent: message\r\nid: 1\r\ndata: {"choices":\r\ndata:[{"delta": {"content": "a\u2028b"}, '
    '"finish_reason": "stop"}]}\r\n\r\n',
}
"""What some models say, whatever they are asked."""


class CutError(Exception):
    """Ends a connection in the middle."""


class App:
    """One server. `last` is what it says at the end of an answer, `unready` what it answers until it is ready."""

    def __init__(self, last: str = "end.", ready: bool = True, flag: Path | None = None) -> None:
        self.last, self.ready, self.flag, self.asked = last, ready, flag, 0
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
        elif scope["path"] == "/health":
            await whole(send, 200 if self.ready else 503, {"ready": self.ready})
        elif scope["path"] == "/metrics":
            page = f"vllm:spec_decode_num_drafts_total {4 * self.asked}\nvllm:spec_decode_num_accepted_tokens_total"
            await whole(send, 200, f"{page} {6 * self.asked}\n")
        elif scope["path"] == "/v1/chat/completions":
            content = b""
            while True:
                part = await receive()
                content += part.get("body", b"")
                if not part.get("more_body"):
                    break
            await self.complete(json.loads(content), send)
        else:
            await whole(send, 404, {"error": "no such page"})

    async def complete(self, body: dict[str, Any], send: Send) -> None:
        """One request, as its model wants it."""
        self.bodies.append(body)
        self.asked += 1
        model, text = body.get("model", "good"), body["messages"][0]["content"]
        say(f"(Worker_TP0 pid=1) \x1b[32mattend\x1b[0m takes cpu:grouped on cpu (CPU), request {self.asked}")
        if model == "500":
            return await whole(send, 500, {"error": {"message": "out of luck " * 100}})
        if model == "busy" and body["max_tokens"] > 1:
            return await whole(send, 429, {"error": "too many requests"})
        if model == "hangs" and body["max_tokens"] > 1:
            # Nothing else is answered meanwhile, as where a GPU has stopped.
            time.sleep(3600)
        if model == "elsewhere":
            return await begin_and_end(send, 307, (b"location", b"http://localhost/there"))
        if model == "strict" and "stream_options" in body:
            return await whole(send, 422, {"error": "Unexpected fields: stream_options"})
        if model == "whole":
            return await whole(send, 200, {"choices": []})
        if model == "dies" and len(text) < 2000:
            say("about to die")
            os._exit(7)
        if model == "silent" or (self.flag is not None and self.flag.exists()):
            say("silence")
            await asyncio.sleep(3600)
        await begin(send, 200, "text/event-stream")
        await event(send, delta={"role": "assistant", "content": ""})
        if model == "slow":
            await asyncio.sleep(SLOW_S)
        if model == "error":
            return await stream(send, 'data: {"error": {"message": "out of memory"}}\n\n')
        if model in WHOLE_STREAMS:
            return await stream(send, WHOLE_STREAMS[model])
        if model in ("pings", "chunks"):
            for _ in range(MANY):
                await stream(send, ": ping\n\n" if model == "pings" else 'data: {"choices": []}\n\n', more=True)
                await asyncio.sleep(0.02)
        if model == "endless":
            for _ in range(MANY):
                await event(send, delta={"content": "more "})
                await asyncio.sleep(0.001)
        if model == "thinks":
            await event(send, delta={"reasoning_content": "Well, "})
        words = [] if model == "empty" else [f"{len(text)} ", "characters ", *["more "] * 60][: body["max_tokens"] - 1]
        for word in [*words, *([] if model == "empty" else [self.last])]:
            await event(send, delta={"content": word})
            # A moment, so that words are chunks of their own and take a time.
            await asyncio.sleep(0.001)
            if model == "cut" and word.startswith("characters"):
                raise CutError
        if model == "open":
            return await stream(send, "", more=False)
        await event(send, delta={}, finish_reason="length")
        prompt_tokens = 10**6 if model == "unlikely" else len(text) // 4
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(words) + 1}
        timings = {"timings": {"predicted_n": 9, "draft_n": 8, "draft_n_accepted": 6}} if model == "llama" else {}
        await stream(send, f"data: {json.dumps({'choices': [], 'usage': usage, **timings})}\n\n", more=True)
        await stream(send, ": bye\n\ndata: [DONE]\n\n", more=model == "lingers")
        if model == "lingers":
            await asyncio.sleep(3600)
        return None


async def begin_and_end(send: Send, status: int, header: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [header]})
    await stream(send, "")


async def begin(send: Send, status: int, kind: str) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode())]})


async def stream(send: Send, text: str, more: bool = False) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


async def event(send: Send, **choice: Any) -> None:
    await stream(send, f"data: {json.dumps({'choices': [{'index': 0, **choice}]})}\n\n", more=True)


async def whole(send: Send, status: int, content: object) -> None:
    await begin(send, status, "text/plain" if isinstance(content, str) else "application/json")
    await stream(send, content if isinstance(content, str) else json.dumps(content))


@contextmanager
def in_thread() -> Iterator[tuple[str, App]]:
    """A server of this process: its address, and itself."""
    port, app = free_port(), App()
    server = uvicorn.Server(uvicorn.Config(app, host="localhost", port=port, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://localhost:{port}", app
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--boot", choices=BOOTS, default="good")
    parser.add_argument("--last", default="end.")
    parser.add_argument("--flag", type=Path)
    parser.add_argument("--pids", type=Path)
    asked = parser.parse_args()
    say(f"boots: {asked.boot}, {os.environ.get('AB_TEST', 'no variable')}, in {os.getcwd()}")
    pids = [os.getpid()]
    if asked.boot == "dies":
        sys.exit("no memory left")
    if asked.boot == "deaf":
        time.sleep(3600)
    if asked.boot == "loud":
        sys.stdout.buffer.write(b"\xff\xfe\x1b[31m\x07" + b"word " * 400_000 + b"\nno memory left\r\n")
        sys.exit(1)
    if asked.boot == "daemon":
        # A child that has left our session and, once we have ended, has us for a parent no more.
        source = "import os, time; os.setsid(); time.sleep(3600)"
        pids = [subprocess.Popen([sys.executable, "-c", source]).pid]
    if asked.boot in ("stubborn", "parent"):
        # One child in our session and one in its own; both outlive us unless someone ends them.
        sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
        pids += [subprocess.Popen(sleep, start_new_session=apart).pid for apart in (False, True)]
    if asked.pids is not None:
        asked.pids.write_text(json.dumps(pids))
    if asked.boot == "daemon":
        return
    server = uvicorn.Server(
        uvicorn.Config(
            App(asked.last, asked.boot != "unready", asked.flag),
            host="localhost",
            port=asked.port,
            log_level="warning",
            timeout_graceful_shutdown=1,
        )
    )
    if asked.boot == "stubborn":
        server.handle_exit = lambda *_: say("I stay")  # type: ignore[method-assign]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server.run()


if __name__ == "__main__":
    main()
