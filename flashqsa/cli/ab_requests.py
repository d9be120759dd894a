"""One request to an OpenAI-compatible server, streamed, and what came when."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import httpx
from httpx_sse import SSEError, connect_sse

from flashqsa.cli.ab_acceptance import between, in_timings, read_counters
from flashqsa.cli.ab_prompts import Ask

SAID_CHARACTERS = 300
"""How much of a server's refusal is kept."""

CONNECT_S = 10.0


@dataclass(frozen=True)
class Answer:
    """What one request got.

    error          what went wrong, None where nothing did
    text           the content, joined; `thought` likewise for reasoning that a server streams apart
    first_s        from the request to the first chunk with content (or reasoning) in it; None where none came
    last_s         to the last such chunk
    chunks         how many there were
    wall_s         to the end of the stream
    prompt_tokens  as the server reports it, None where it does not; `answer_tokens` likewise
    acceptance     tokens per step, where the server drafts and reports it
    """

    name: str
    kind: str
    group: str
    counted: bool
    error: str | None
    text: str
    thought: str
    first_s: float | None
    last_s: float | None
    chunks: int
    wall_s: float
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    finish: str | None = None
    acceptance: float | None = None

    @property
    def words(self) -> list[str]:
        """Everything that was said, word by word.

        Words stand between blanks, tabs and ends of lines. Python's own split would take other bytes for space too,
        among them what a random model says.
        """
        return re.findall(r"[^ \t\r\n]+", f"{self.thought} {self.text}")

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass
class Heard:
    """A stream as it comes in."""

    started: float = field(default_factory=time.perf_counter)
    text: list[str] = field(default_factory=list)
    thought: list[str] = field(default_factory=list)
    first_s: float | None = None
    last_s: float | None = None
    chunks: int = 0
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    finish: str | None = None
    acceptance: float | None = None
    done: bool = False

    def event(self, data: str) -> str | None:
        """Takes one event; returns what is wrong with it, or None."""
        now = time.perf_counter() - self.started
        if data.strip() == "[DONE]":
            self.done = True
            return None
        try:
            content = json.loads(data)
        except json.JSONDecodeError:
            return f"the stream holds what is not JSON: {_short(data)}"
        if not isinstance(content, dict) or content.get("error"):
            return f"the stream holds an error: {_short(data)}"
        if isinstance(content.get("timings"), dict):
            self.acceptance = in_timings(content["timings"])
        usage = content.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = _whole(usage.get("prompt_tokens"), self.prompt_tokens)
            self.answer_tokens = _whole(usage.get("completion_tokens"), self.answer_tokens)
        choices = content.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                return f"the stream holds a choice that is none: {_short(data)}"
            delta = choice.get("delta")
            said = delta if isinstance(delta, dict) else {}
            # Engines differ in what they call it.
            thought = str(said.get("reasoning_content") or said.get("reasoning") or "")
            text = str(said.get("content") or "")
            if text or thought:
                self.text.append(text)
                self.thought.append(thought)
                self.first_s = now if self.first_s is None else self.first_s
                self.last_s = now
                self.chunks += 1
            self.finish = choice.get("finish_reason") or self.finish
        return None

    def answer(self, ask: Ask, error: str | None) -> Answer:
        """What it amounts to."""
        if error is None and not self.done and self.finish is None:
            error = f"the stream was cut after {self.chunks} chunks: no reason to finish, and no end"
        return Answer(
            ask.name,
            ask.kind,
            ask.group,
            ask.counted,
            error,
            "".join(self.text),
            "".join(self.thought),
            self.first_s,
            self.last_s,
            self.chunks,
            time.perf_counter() - self.started,
            self.prompt_tokens,
            self.answer_tokens,
            self.finish,
            self.acceptance,
        )


def new_client() -> httpx.Client:
    """A client for servers of this machine, without the environment's proxies.

    Every request has a connection of its own: one that is kept can be closed by the server just as it is used again.
    """
    return httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


class NotAnsweredError(Exception):
    """A server refused a request, with its status and what it said."""

    def __init__(self, status: int, said: str) -> None:
        self.status, self.said = status, said
        super().__init__(f"HTTP {status}: {_short(said)}")


@dataclass
class Talk:
    """Requests to one server, one at a time.

    url        what `/chat/completions` follows
    model      None where requests do not name it
    body       more keys of every request's body
    timeout_s  how long the server may be silent
    metrics    a page of metrics, or None
    """

    client: httpx.Client
    url: str
    model: str | None
    body: dict[str, Any]
    timeout_s: float
    metrics: str | None = None
    asks_for_usage: bool = True

    def ask(self, ask: Ask) -> Answer:
        """Sends one request and hears it out; what goes wrong is in the answer."""
        heard, before = Heard(), read_counters(self.client, self.metrics)
        try:
            error = self._hear(ask, heard)
            if error is None and ask.new_tokens and not heard.chunks and heard.done and heard.finish is None:
                error = "the stream ended without a chunk"
        except NotAnsweredError as refused:
            if self.asks_for_usage and refused.status in (400, 422) and "stream_options" in refused.said:
                # Transformers' server reports usage without being asked, and refuses to be asked.
                self.asks_for_usage = False
                return self.ask(ask)
            error = str(refused)
        except httpx.TimeoutException:
            error = f"nothing came for {self.timeout_s:g} s, after {heard.chunks} chunks"
        except httpx.RemoteProtocolError as cut:
            error = f"the stream was cut after {heard.chunks} chunks: {cut}"
        except (httpx.HTTPError, SSEError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        answer = heard.answer(ask, error)
        if before is None or answer.acceptance is not None:
            return answer
        return replace(answer, acceptance=between(before, read_counters(self.client, self.metrics)))

    def _hear(self, ask: Ask, heard: Heard) -> str | None:
        timeout = httpx.Timeout(self.timeout_s, connect=CONNECT_S)
        address = f"{self.url.rstrip('/')}/chat/completions"
        content = self._content(ask)
        heard.started = time.perf_counter()
        with connect_sse(self.client, "POST", address, json=content, timeout=timeout) as source:
            if source.response.status_code != httpx.codes.OK:
                raise NotAnsweredError(source.response.status_code, source.response.read().decode(errors="replace"))
            for event in _data(source.iter_sse()):
                wrong = heard.event(event)
                if wrong is not None:
                    return wrong
        return None

    def _content(self, ask: Ask) -> dict[str, Any]:
        content: dict[str, Any] = {
            "messages": [{"role": "user", "content": ask.text}],
            "max_tokens": ask.new_tokens,
            "temperature": ask.temperature,
            "stream": True,
        }
        if self.asks_for_usage:
            content["stream_options"] = {"include_usage": True}
        if self.model is not None:
            content["model"] = self.model
        if ask.seed is not None:
            content["seed"] = ask.seed
        return {**content, **self.body, **ask.body}


def _data(events: Iterator[Any]) -> Iterator[str]:
    """The data of events; what carries none (a comment, a ping) is passed over."""
    return (event.data for event in events if event.data)


def _whole(value: object, before: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else before


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SAID_CHARACTERS else f"{line[:SAID_CHARACTERS]}..."
