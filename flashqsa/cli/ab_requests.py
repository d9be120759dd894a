"""One request to an OpenAI-compatible server, streamed, and what came when."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import httpx
from httpx_sse import connect_sse

from flashqsa.cli.ab_acceptance import between, in_timings, read_counters
from flashqsa.cli.ab_prompts import Ask

SAID_CHARACTERS, READ_CHARACTERS = 300, 4096
"""How much of a server's refusal is kept, and read."""

GIVEN_UP = ("abort", "error")
"""Reasons to finish that say that the server has given an answer up, as vLLM and SGLang name them."""

MOST_CHUNKS, MORE_CHUNKS = 2, 64
"""A chunk holds a token or more, so an answer of n tokens has n chunks at most. Beyond these times n, and these more,
the server does not keep to what it was asked."""

CONNECT_S = 10.0
STREAMED = "text/event-stream"


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
    """A stream as it comes in.

    started, said  when the request was sent, and when something was said last, by `time.perf_counter`
    """

    started: float = field(default_factory=time.perf_counter)
    said: float = field(default_factory=time.perf_counter)
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

    def restart(self) -> None:
        """The request is sent now."""
        self.started = self.said = time.perf_counter()

    @property
    def silent_s(self) -> float:
        """Seconds since something was said: content, or that it is over."""
        return time.perf_counter() - self.said

    def event(self, data: str) -> str | None:
        """Takes one event; returns what is wrong with it, or None."""
        now = time.perf_counter() - self.started
        if data.strip() == "[DONE]":
            self.done = True
            return None
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            return f"the stream holds what is not JSON: {_short(data)}"
        if not isinstance(content, dict) or content.get("error") or content.get("object") == "error":
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
                self.said = self.started + now
            reason = choice.get("finish_reason")
            if isinstance(reason, str) and reason:
                self.finish, self.said = reason, self.started + now
            if self.finish in GIVEN_UP:
                return f"the server gave the answer up: {_short(data)}"
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
            _joined(self.text),
            _joined(self.thought),
            self.first_s,
            self.last_s,
            self.chunks,
            time.perf_counter() - self.started,
            self.prompt_tokens,
            self.answer_tokens,
            None if self.finish is None else _joined([self.finish]),
            self.acceptance,
        )


def new_client() -> httpx.Client:
    """A client for servers of this machine, without the environment's proxies.

    Every request has a connection of its own: one that is kept can be closed by the server just as it is used again.
    """
    return httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


class SilentError(Exception):
    """A server keeps a stream open and says nothing in it, at most that it is there."""


@dataclass
class Spoken(httpx.SyncByteStream):
    """The bytes of a stream for as long as they say something.

    A read that times out tells of a server that sends nothing. One that is stuck and sends comments to keep the
    connection, or chunks without content, is told by this. Raises SilentError.
    """

    stream: httpx.SyncByteStream
    heard: Heard
    timeout_s: float

    def __iter__(self) -> Iterator[bytes]:
        for part in self.stream:
            if self.heard.silent_s > self.timeout_s:
                raise SilentError
            yield part

    def close(self) -> None:
        """Closes what it reads."""
        self.stream.close()


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
    timeout_s  how long the server may say nothing
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
        except SilentError:
            error = f"nothing was said for {self.timeout_s:g} s in an open stream, after {heard.chunks} chunks"
        except httpx.RemoteProtocolError as cut:
            error = f"the stream was cut after {heard.chunks} chunks: {cut}"
        except httpx.HTTPError as failure:
            error = f"{type(failure).__name__}: {failure}"
        answer = heard.answer(ask, error)
        if before is None or answer.acceptance is not None:
            return answer
        return replace(answer, acceptance=between(before, read_counters(self.client, self.metrics)))

    def _hear(self, ask: Ask, heard: Heard) -> str | None:
        timeout = httpx.Timeout(self.timeout_s, connect=CONNECT_S)
        address = f"{self.url.rstrip('/')}/chat/completions"
        content = self._content(ask)
        most = MOST_CHUNKS * ask.new_tokens + MORE_CHUNKS
        heard.restart()
        with connect_sse(self.client, "POST", address, json=content, timeout=timeout) as source:
            response = source.response
            assert isinstance(response.stream, httpx.SyncByteStream), "of a client that is not asynchronous"
            response.stream = Spoken(response.stream, heard, self.timeout_s)
            kind = response.headers.get("content-type", "")
            if response.status_code != httpx.codes.OK or STREAMED not in kind:
                raise NotAnsweredError(response.status_code, _refusal(response, kind))
            for event in _data(source.iter_sse()):
                wrong = heard.event(event)
                if wrong is not None:
                    return wrong
                if heard.chunks > most:
                    return (
                        f"the answer is longer than the {ask.new_tokens} tokens that were asked: {heard.chunks} chunks"
                    )
                if heard.done:
                    # Some servers keep the connection open after it.
                    return None
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


def _refusal(response: httpx.Response, kind: str) -> str:
    """What an answer that is no stream of events says."""
    if response.is_redirect:
        return f"it leads to {response.headers.get('location')}, and is not followed"
    said = ""
    for part in response.iter_text():
        said += part
        if len(said) > READ_CHARACTERS:
            break
    return said if response.status_code != httpx.codes.OK else f"no stream of events but {kind or 'no type'}: {said}"


def _joined(parts: Sequence[str]) -> str:
    """Texts as one, that UTF-8 can hold.

    JSON can hold half a pair of surrogates: it becomes U+FFFD unless the next part begins with the other half.

    >>> [ascii(_joined(parts)) for parts in ([chr(0xD83D), chr(0xDE00)], [chr(0xD83D)])]
    ["'\\\\U0001f600'", "'\\\\ufffd'"]
    """
    return "".join(parts).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _whole(value: object, before: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else before


def printable(text: str) -> str:
    """A line for a terminal: what it would obey or not show is written as Python writes it.

    >>> printable("red: " + chr(27) + "[31m")
    'red: \\\\x1b[31m'
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _short(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= SAID_CHARACTERS else f"{line[:SAID_CHARACTERS]}..."
