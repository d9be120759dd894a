"""One request of `flashqsa ab`: what is measured of a stream, and what is said of one that goes wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("httpx_sse")
pytest.importorskip("tomlkit")
pytest.importorskip("uvicorn")

from flashqsa.cli.ab_acceptance import Counters, between, counters_in, in_timings
from flashqsa.cli.ab_prompts import Ask
from flashqsa.cli.ab_requests import Answer, Talk, new_client
from tests.ab_server import SLOW_S, App, free_port, in_thread

ASK = Ask("one", "decode", "prose", "a text of thirty-one characters", 5)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, App]]:
    with in_thread() as found:
        yield found


def talk(address: str, model: str | None = None, timeout_s: float = 20.0, metrics: str | None = None) -> Talk:
    return Talk(new_client(), f"{address}/v1", model, {"top_k": 1}, timeout_s, metrics)


def test_a_stream_is_taken_apart(server: tuple[str, App]) -> None:
    address, app = server
    answer = talk(address).ask(ASK)
    assert answer.error is None
    assert answer.text == "31 characters more more end."
    assert answer.words == ["31", "characters", "more", "more", "end."]
    assert (answer.chunks, answer.prompt_tokens, answer.answer_tokens, answer.finish) == (5, 7, 5, "length")
    assert answer.first_s is not None
    assert answer.last_s is not None
    assert 0 < answer.first_s < answer.last_s < answer.wall_s
    body = app.bodies[-1]
    assert body["messages"] == [{"role": "user", "content": ASK.text}]
    assert (body["max_tokens"], body["temperature"], body["stream"], body["top_k"]) == (5, 0.0, True, 1)
    assert body["stream_options"] == {"include_usage": True}
    assert not {"model", "seed"} & set(body)


def test_a_draw_has_its_seed_its_temperature_and_its_own_keys(server: tuple[str, App]) -> None:
    address, app = server
    talk(address, "good").ask(Ask("draw", "probe", "probe", "text", 2, temperature=0.7, seed=3, body={"top_k": 9}))
    body = app.bodies[-1]
    assert (body["model"], body["temperature"], body["seed"], body["top_k"]) == ("good", 0.7, 3, 9)


def test_the_first_token_is_the_first_content(server: tuple[str, App]) -> None:
    answer = talk(server[0], "slow").ask(ASK)
    assert answer.first_s is not None
    # The chunk with the role comes at once and holds no content; the server waits after it.
    assert answer.first_s >= SLOW_S


def test_reasoning_counts_as_content_and_is_kept_apart(server: tuple[str, App]) -> None:
    answer = talk(server[0], "thinks").ask(ASK)
    assert (answer.thought, answer.text, answer.chunks) == ("Well, ", "31 characters more more end.", 6)
    assert answer.words[0] == "Well,"


def test_a_server_that_will_not_be_asked_for_usage_is_asked_again_without(server: tuple[str, App]) -> None:
    address, app = server
    strict, before = talk(address, "strict"), len(app.bodies)
    assert strict.ask(ASK).error is None
    assert strict.ask(ASK).answer_tokens == 5
    assert ["stream_options" in body for body in app.bodies[before:]] == [True, False, False]


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        ("elsewhere", "HTTP 307: it leads to http://localhost/there, and is not followed", ""),
        ("500", 'HTTP 500: {"error": {"message": "out of luck', ""),
        ("cut", "the stream was cut after 2 chunks", "31 characters "),
        ("open", "the stream was cut after 5 chunks: no reason to finish, and no end", "31 characters more more end."),
        ("error", 'the stream holds an error: {"error": {"message": "out of memory"}}', ""),
        ("rubbish", "the stream holds what is not JSON: {rubbish", ""),
        ("digits", "the stream holds what is not JSON", ""),
        ("nested", "the stream holds what is not JSON", ""),
        ("object", 'the stream holds an error: {"object": "error", "message": "out of memory"}', ""),
        ("abort", "the server gave the answer up", "a"),
        ("whole", 'HTTP 200: no stream of events but application/json: {"choices": []}', ""),
    ],
)
def test_what_goes_wrong_is_said_and_what_came_is_kept(
    server: tuple[str, App], model: str, error: str, text: str
) -> None:
    answer = talk(server[0], model).ask(ASK)
    assert answer.error is not None
    assert answer.error.startswith(error)
    assert len(answer.error) < 400
    assert answer.text == text


def test_a_silent_server_is_not_waited_for_forever(server: tuple[str, App]) -> None:
    answer = talk(server[0], "silent", timeout_s=0.3).ask(ASK)
    assert answer.error == "nothing came for 0.3 s, after 0 chunks"


@pytest.mark.parametrize("model", ["pings", "chunks"])
def test_a_stuck_server_that_keeps_its_connection_is_not_waited_for_forever(
    server: tuple[str, App], model: str
) -> None:
    answer = talk(server[0], model, timeout_s=0.3).ask(ASK)
    assert answer.error == "nothing was said for 0.3 s in an open stream, after 0 chunks"


def test_an_answer_without_an_end_is_ended(server: tuple[str, App]) -> None:
    answer = talk(server[0], "endless").ask(ASK)
    assert answer.error == "the answer is longer than the 5 tokens that were asked: 75 chunks"
    assert answer.words == ["more"] * 75


def test_a_stream_is_over_with_its_last_event(server: tuple[str, App]) -> None:
    answer = talk(server[0], "lingers", timeout_s=5.0).ask(ASK)
    assert (answer.error, answer.answer_tokens) == (None, 5)
    assert talk(server[0], "lines").ask(ASK).text == "a\u2028b"


def test_halves_of_characters_are_joined_and_can_be_written(server: tuple[str, App]) -> None:
    answer = talk(server[0], "halves").ask(ASK)
    assert (answer.error, answer.text) == (None, "a\U0001f600b\ufffd")


def test_proxies_of_the_environment_are_passed_by(server: tuple[str, App], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://localhost:{free_port()}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert talk(server[0]).ask(ASK).error is None


def test_an_absent_server_is_an_error() -> None:
    answer = talk(f"http://localhost:{free_port()}").ask(ASK)
    assert answer.error is not None
    assert answer.error.startswith("ConnectError")


def test_an_empty_answer_is_an_answer(server: tuple[str, App]) -> None:
    answer = talk(server[0], "empty").ask(ASK)
    assert (answer.error, answer.words, answer.first_s) == (None, [], None)


def test_words_stand_between_blanks_alone() -> None:
    answer = Answer("a", "long", "29k", True, None, "one\x1etwo\x85 three\n\tfour\r\n", "", 1.0, 2.0, 3, 4.0)
    assert answer.words == ["one\x1etwo\x85", "three", "four"]


def test_acceptance_comes_from_metrics_or_timings(server: tuple[str, App]) -> None:
    address = server[0]
    assert talk(address, metrics=f"{address}/metrics").ask(ASK).acceptance == 2.5
    assert talk(address, "llama", metrics=f"{address}/metrics").ask(ASK).acceptance == 3.0
    assert talk(address, metrics=f"{address}/nowhere").ask(ASK).acceptance is None
    assert talk(address).ask(ASK).acceptance is None


def test_counters_are_summed_over_engines_and_lengths_are_not() -> None:
    page = (
        "# TYPE vllm:spec_decode_num_drafts_total counter\n"
        'vllm:spec_decode_num_drafts_total{engine="0"} 3.0\nvllm:spec_decode_num_drafts_total{engine="1"} 4.0\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 5.0\n'
        'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9\n'
        'sglang:spec_accept_length{tp_rank="0"} 2.0\nsglang:spec_accept_length{tp_rank="1"} 4.0\n'
    )
    assert counters_in(page) == Counters(7, 5, 3.0)
    assert between(Counters(7, 5), Counters(7, 5)) is None
    assert between(None, Counters(7, 5)) is None
    assert between(Counters(), Counters(length=2.5)) == 2.5
    assert in_timings({"predicted_n": 5}) is None
