"""The command line: what each command shows, writes and refuses, and its exit codes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flashqsa import __version__, knobs, pipeline
from flashqsa.__main__ import app
from flashqsa.cli import compare, explain, presets, process, prompt, show
from flashqsa.cli import verify as verify_command
from flashqsa.route import CANDIDATES
from flashqsa.testing.verify import CaseResult, verify_case
from flashqsa.values import QsaSpec, Rows, Selection

transformers = pytest.importorskip("transformers")

COMMANDS = ("run", "serve", "ab", "doctor", "explain", "verify", "bench", "build", "capture", "replay", "stats")
TINY = ["run", "--device", "cpu", "--preset", "tiny", "--tokens", "150", "--chunk", "64", "--decode", "3"]


def invoke(*arguments: str, text: str | None = None) -> Any:
    """Runs a command; an exception that is no exit is raised here."""
    result = CliRunner().invoke(app, list(arguments), input=text)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def told(result: Any) -> dict[str, Any]:
    """The JSON on standard output, which must hold nothing else."""
    content = json.loads(result.stdout)
    assert isinstance(content, dict)
    return content


def refused(result: Any, message: str) -> None:
    """Exit code 2, and one line of error."""
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_the_program_lists_its_commands() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert all(command in result.stdout for command in COMMANDS)
    assert invoke("--version").stdout == f"flashqsa {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_its_help(command: str) -> None:
    import typer.main

    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    assert found.help
    assert invoke(command, "--help").exit_code == 0
    for parameter in found.params:
        assert parameter.help or parameter.name == "help", parameter.name


def test_threads_are_told_to_sleep_before_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import sys, flashqsa.__main__, flashqsa.cli.show; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    invoke("explain", "--device", "cpu")
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    invoke("explain", "--device", "cpu")
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


# run


def test_a_run_beside_the_stock_layer_agrees_and_says_so(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    result = invoke(*TINY, "--compare", "stock", "--json", str(target))
    assert result.exit_code == 0, result.output
    content = json.loads(target.read_text())
    compared, ours, stock = content["comparison"], content["flashqsa"], content["stock"]
    assert compared["agrees_in_fp32"] is True
    assert compared["rows"] == 150
    assert compared["rows_compared"] + compared["rows_selecting_otherwise"] == 150
    assert compared["rows_compared"] > 130
    assert compared["max_difference_compared"] <= 1e-4
    assert compared["same_tokens"] <= compared["new_tokens"] == 3
    assert ours["prompt_tokens"] == stock["prompt_tokens"] == 150
    assert len(ours["chunks_s"]) == len(stock["chunks_s"]) == 3
    assert sum(ours["chunks_s"]) == pytest.approx(ours["time_to_first_token_s"])
    assert ours["prefill_tokens_per_s"] == pytest.approx(150 / ours["time_to_first_token_s"])
    for side in (ours, stock):
        assert 0 < side["indexer_s"] < side["sparse_layers_s"] < side["time_to_first_token_s"]
        assert side["decode_tokens_per_s"] == pytest.approx(2 / side["decode_s"])
    ratio = stock["time_to_first_token_s"] / ours["time_to_first_token_s"]
    assert compared["first_token_speedup"] == pytest.approx(ratio)
    routes = {(use["phase"], use["stage"]): use for use in content["routes"]}
    assert routes["prefill", "attend"]["route"] == "cpu:grouped"
    assert (routes["prefill", "attend"]["calls"], routes["prefill", "attend"]["rows"]) == (3, 150)
    assert routes["decode", "attend"]["route"] == "cpu:xqa"
    assert (routes["decode", "attend"]["calls"], routes["decode", "attend"]["rows"]) == (2, 2)
    refused = [refusal["route"] for refusal in routes["decode", "attend"]["refused"]]
    assert [route for route in refused if route.startswith("cpu")] == ["cpu:dense", "cpu:grouped"]
    assert content["hand_overs"] == {}
    assert content["model"]["top_blocks"] == 8
    assert {"flashqsa", "torch", "python", "transformers"} <= set(content["versions"])
    assert len(content["tokens"]) == 3
    for words in ("time to first token", "cpu:grouped", "not cpu:dense", "no more rows than requests", "agree: logits"):
        assert words in result.stdout
    assert "FlashQSA prefill" in result.stderr
    assert "stock prefill" in result.stderr


def test_a_run_leaves_logging_and_the_model_classes_as_they_were() -> None:
    from transformers.models.qwen4_exp import modeling_qwen4_exp

    logger, forward = logging.getLogger("flashqsa"), modeling_qwen4_exp.Qwen4ExpTextAttention.forward
    before = (list(logger.handlers), logger.level)
    assert invoke(*TINY).exit_code == 0
    assert (list(logger.handlers), logger.level) == before
    assert modeling_qwen4_exp.Qwen4ExpTextAttention.forward is forward


def test_the_same_seed_gives_the_same_tokens_whatever_the_chunk() -> None:
    def tokens(*more: str) -> list[int]:
        found = told(invoke(*TINY, "--json", "-", *more))["tokens"]
        assert isinstance(found, list)
        return found

    first = tokens()
    assert tokens("--chunk", "150") == first
    assert tokens("--chunk", "37") == first
    assert tokens("--seed", "1") != first


def test_a_pinned_route_runs_and_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.ROUTE.name, "reference")
    content = told(invoke(*TINY, "--route", "xqa", "--json", "-"))
    routes = {use["route"] for use in content["routes"] if use["stage"] == "attend"}
    assert routes == {"cpu:xqa"}
    assert content["settings"]["route"] == "xqa"
    assert {"route": "cpu:grouped", "reason": "xqa is pinned"} in content["routes"][1]["refused"]
    assert knobs.ROUTE.read() == "reference"


def test_a_pin_that_cannot_serve_fails_with_its_reasons() -> None:
    result = invoke(*TINY, "--route", "dense")
    assert result.exit_code == 1
    assert "rows see up to" in result.stderr


def test_half_types_run_and_are_not_judged() -> None:
    result = invoke(*TINY, "--dtype", "bfloat16", "--compare", "stock")
    assert result.exit_code == 0, result.output
    assert "judged in FP32 only" in result.stdout


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = pipeline.KERNEL_SETS["cpu"]
    right = cpu.sparse_attention

    def wrong(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = right(*arguments)
        return output + 0.5, lse

    monkeypatch.setattr(cpu, "sparse_attention", wrong)
    result = invoke(*TINY, "--compare", "stock")
    assert result.exit_code == 1
    assert "DISAGREE" in result.stdout


def test_a_prompt_comes_from_a_file_or_standard_input(tmp_path: Path) -> None:
    text = "Grüße, world. " * 12
    file = tmp_path / "prompt.txt"
    file.write_text(text, encoding="utf-8")
    size = len(text.encode())
    base = ("run", "--preset", "tiny", "--decode", "1", "--json", "-")
    whole = told(invoke(*base, str(file)))
    assert whole["prompt"] == {"source": str(file), "text_bytes": size, "tokens": size}
    assert whole["flashqsa"]["decode_tokens_per_s"] is None
    piped = told(invoke(*base, "-", text=text))
    assert (piped["prompt"]["source"], piped["tokens"]) == ("standard input", whole["tokens"])
    assert told(invoke(*base, str(file), "--tokens", "50"))["prompt"]["tokens"] == 50


def test_the_built_in_text_is_long_and_says_where_it_ends() -> None:
    found = prompt.read_prompt(None, None, presets.encode_bytes)
    assert len(found.tokens) == prompt.DEFAULT_TOKENS == 8192
    assert found.text_bytes > 400_000
    refused(invoke("run", "--preset", "tiny", "--tokens", "10000000"), f"has {found.text_bytes:,} tokens")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-file.txt"], "No such file"),
        (["."], "directory"),
        (["--tokens", "0"], "--tokens: wanted whole numbers such as 1616,7.5k; got '0'"),
        (["--layers", "3"], "--layers: wanted at least 4, of which one is sparse; got 3"),
        (["--draft", "luck"], "--draft: wanted lookup; got 'luck'"),
        (["--graph", "never"], "--graph: wanted auto, on, off; got 'never'"),
        (["--graph", "on", "--device", "cpu"], "--graph on: wanted a GPU; got a CPU"),
        (["--device", "tpu"], "--device"),
        (["--model", ".", "--layers", "4"], "--layers: wanted with a preset"),
        (["--chunk", "0"], "--chunk: wanted at least 1"),
        (["--decode", "0"], "--decode: wanted at least 1"),
        (["--threads", "0"], "--threads: wanted at least 1"),
        (["--dtype", "int8"], "wanted one of float32, float16, bfloat16"),
        (["--compare", "vllm"], "--compare: wanted stock"),
        (["--route", "fastest"], "route: wanted one of"),
        (["--json", "no/such/folder/run.json"], "not a file in an existing folder"),
        (["--model", "no-such-folder"], "no such folder"),
        (["--model", ".", "--preset", "tiny"], "got both"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    base = [] if "--model" in arguments else ["--preset", "tiny"]
    refused(invoke("run", *base, *arguments), message)


def test_an_unknown_preset_is_told_the_known_ones() -> None:
    known = "demo, demo-2x, demo-apart, tiny, released, released-64"
    refused(invoke("run", "--preset", "huge"), f"wanted one of {known}; got 'huge'")


def test_an_empty_prompt_is_refused(tmp_path: Path) -> None:
    refused(invoke("run", "--preset", "tiny", "-", text=""), "prompt from standard input is empty")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    refused(invoke("run", "--preset", "tiny", str(latin)), "not UTF-8 text")


def test_a_prompt_shorter_than_asked_is_refused_not_repeated(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("abc")
    refused(invoke("run", "--preset", "tiny", str(file), "--tokens", "4"), "ask for at most 3 or give a longer prompt")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "has no config.json"),
        ("{", "config.json cannot be read"),
        ("[]", "wanted a model of type"),
        ('{"model_type": "llama"}', "wanted a model of type qwen4_exp or qwen4_exp_text; got 'llama'"),
        ('{"model_type": "qwen4_exp_text"}', "wanted the indexer fields indexer_n_heads"),
        ('{"model_type": "qwen4_exp_text", "layer_types": ["sliding_attention"]}', "config.layer_types: wanted"),
        ('{"model_type": "qwen4_exp", "text_config": {"layer_types": ["linear_attention"]}}', "one sparse layer"),
        ('{"model_type": "qwen4_exp_text", "hidden_size": "wide"}', "Field 'hidden_size' expected int"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(config: str | None, message: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    refused(invoke("run", "--model", str(tmp_path)), message)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a byte-level tokenizer, as `save_pretrained` leaves them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    loaded = presets.load_preset("tiny", torch.float32, 0)
    loaded.model.save_pretrained(folder)
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def test_a_model_folder_runs_with_its_own_tokenizer(model_folder: Path) -> None:
    result = invoke(
        "run", "--model", str(model_folder), "--tokens", "100", "--chunk", "64", "--decode", "4", "--compare", "stock"
    )
    assert result.exit_code == 0, result.output
    assert "agree: logits" in result.stdout
    assert "text: " in result.stdout


# explain


def test_explain_shows_every_candidate_of_a_call() -> None:
    result = invoke("explain", "--rows", "1", "--device", "cpu", "--json", "-")
    content = told(result)
    assert result.exit_code == 0
    assert content["routes"]["attend"]["route"] == "cpu:xqa"
    assert content["routes"]["select"]["route"] == "cpu:plain"
    for stage, candidates in CANDIDATES.items():
        found = content["routes"][stage]
        names = [found["route"], *(refusal["route"] for refusal in found["refused"]), *found["unused"]]
        assert sorted(names) == sorted(str(candidate.route) for candidate in candidates)
    assert content["plan"]["width_blocks"] == 8192
    assert "workspace" in invoke("explain", "--rows", "1", "--device", "cpu").stdout


@pytest.mark.parametrize("device", ["v100", "h200"])
def test_explain_answers_for_gpus_that_are_not_here(device: str) -> None:
    result = invoke("explain", "--device", device, "--dtype", "fp16", "--cache-dtype", "fp8", "--json", "-")
    content = told(result)
    served = all(content["routes"][stage]["route"] for stage in CANDIDATES)
    assert result.exit_code == (0 if served else 1)
    assert content["call"]["cache_dtype"] == "float8_e4m3fn"
    assert content["device"]["kind"] == "cuda"
    for stage, candidates in CANDIDATES.items():
        found = content["routes"][stage]
        told_of = len(found["refused"]) + len(found["unused"]) + (found["route"] is not None)
        assert told_of == len(candidates)
        assert all(refusal["reason"] for refusal in found["refused"])


@pytest.mark.parametrize(
    ("requests", "more", "fewest"), [("1", (), 64), ("4", (), 64), ("4", ("--batch-invariant",), None)]
)
def test_explain_says_from_where_on_cublas_scores(requests: str, more: tuple[str, ...], fewest: int | None) -> None:
    asked = ("explain", "--device", "rtx8000", "--dtype", "fp16", "--rows", "1616", "--requests", requests, *more)
    asked += ("--context", "184000", "--heads", "12/1")
    assert told(invoke(*asked, "--json", "-"))["plan"]["fewest_product_rows"] == fewest
    assert ("cuBLAS scores" in invoke(*asked).stdout) == (fewest is not None)


def test_explain_keeps_a_pin() -> None:
    content = told(invoke("explain", "--device", "cpu", "--route", "xqa", "--json", "-"))
    assert content["routes"]["attend"]["route"] == "cpu:xqa"
    refusals = {refusal["route"]: refusal["reason"] for refusal in content["routes"]["attend"]["refused"]}
    assert refusals["cpu:grouped"] == "xqa is pinned"
    result = invoke("explain", "--device", "cpu", "--route", "dense")
    assert result.exit_code == 1
    assert "No route serves this call" in result.stdout
    for device in ("cpu", "v100"):
        assert invoke("explain", "--device", device, "--route", "reference").exit_code == 0


def test_explain_here_is_this_machine() -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert explain.facts_named("here").kind == kind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "24"], "--heads: wanted"),
        (["--heads", "24/5"], "spec.q_heads: wanted a multiple of kv_heads = 5"),
        (["--rows", "0"], "--rows: wanted at least 1"),
        (["--rows", "11", "--context", "10"], "--rows: wanted at most requests x context = 10"),
        (["--context", "2000000"], "--context: wanted 1 to 1048576"),
        (["--page-tokens", "6"], "--page-tokens: wanted a multiple of 4"),
        (["--top-blocks", "4096"], "spec.top_blocks: wanted at most 2048"),
        (["--dtype", "fp8"], "dtype: wanted one of float32, float16, bfloat16"),
        (["--cache-dtype", "fp4"], "float8_e4m3fn; got 'fp4'"),
        (["--device", "abacus"], "--device: wanted here, cpu"),
        (["--route", "abacus"], "route: wanted one of"),
    ],
)
def test_explain_refuses_what_makes_no_call(arguments: list[str], message: str) -> None:
    refused(invoke("explain", *arguments), message)


# verify


def test_verify_runs_cases_against_the_reference() -> None:
    result = invoke("verify", "--case", "decode-1", "--case", "verify-5", "--json", "-")
    content = told(result)
    assert result.exit_code == 0, result.output
    assert content["passed"] is True
    assert [case["name"] for case in content["cases"]] == ["decode-1", "verify-5"]
    assert all(case["passed"] and case["routes"] and case["failures"] == [] for case in content["cases"])


def test_verify_fails_where_a_case_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any) -> CaseResult:
        return replace(verify_case(*arguments), failures=("row 3: selects [1] and leaves out [2]",))

    monkeypatch.setattr(verify_command, "verify_case", wrong)
    result = invoke("verify", "--case", "decode-1")
    assert result.exit_code == 1
    assert "row 3: selects [1]" in result.stdout
    assert "0 of 1 cases pass" in result.stdout


def test_verify_tells_of_a_pin_that_cannot_serve() -> None:
    result = invoke("verify", "--case", "decode-1", "--route", "dense")
    assert result.exit_code == 1
    assert "refused: attend: no route serves" in " ".join(result.stdout.split())
    result = invoke("verify", "--case", "decode-1", "--case", "prefill", "--route", "grouped")
    assert result.exit_code == 0
    assert "1 of 1 cases pass; 1 are not for grouped" in result.stdout


def test_verify_lists_its_cases() -> None:
    smoke = told(invoke("verify", "--list", "--tag", "smoke", "--json", "-"))["cases"]
    assert smoke
    assert all("smoke" in case["tags"] for case in smoke)
    assert invoke("verify", "--device", "meta").exit_code == 2
    content = told(invoke("verify", "--list", "--json", "-"))
    assert {"decode-1", "prefill"} <= {case["name"] for case in content["cases"]}
    assert all(case["call"] for case in content["cases"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "nothing"], "no case is called 'nothing'"),
        (["--tag", "nothing"], "no case has 'nothing'; tags are"),
        (["--device", "abacus"], "--device abacus"),
        (["--case", "decode-1", "--route", "abacus"], "route: wanted one of"),
    ],
)
def test_verify_refuses_what_is_not_there(arguments: list[str], message: str) -> None:
    refused(invoke("verify", *arguments), message)


# capture and replay


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both calls of the last chunk of a tiny prefill."""
    folder = tmp_path_factory.mktemp("captures") / "out"
    result = invoke("capture", str(folder), "--preset", "tiny", "--tokens", "150", "--chunk", "64", "--json", "-")
    assert result.exit_code == 0, result.output
    content = told(result)
    assert content["source"] == "tiny, tokens 128 to 149"
    assert [call["function"] for call in content["captures"]] == ["select_blocks", "sparse_attention"]
    return folder


@pytest.mark.parametrize("name", ["select_blocks", "sparse_attention"])
def test_replay_verifies_a_capture(name: str, captured: Path) -> None:
    content = told(invoke("replay", str(captured / name), "--rows", "7", "--json", "-"))
    assert content["verdict"]["failures"] == []
    assert content["verdict"]["rows"] == 7
    assert content["rows"] == 22
    assert content["route"]["route"] == content["captured_route"]
    assert invoke("replay", str(captured / name), "--rows", "0").exit_code == 0


def test_replay_finds_a_wrong_result(captured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    select, attend = pipeline.select_blocks, pipeline.sparse_attention

    def other_blocks(*arguments: Any, **more: Any) -> Selection:
        found = select(*arguments, **more)
        blocks = found.blocks.clone()
        blocks[:, 0] = 0
        blocks[:, 1] = 1
        return Selection(blocks, found.count)

    def other_output(*arguments: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = attend(*arguments, **more)
        return output * 1.001, lse

    monkeypatch.setattr(pipeline, "select_blocks", other_blocks)
    monkeypatch.setattr(pipeline, "sparse_attention", other_output)
    for name in ("select_blocks", "sparse_attention"):
        result = invoke("replay", str(captured / name))
        assert result.exit_code == 1, name
        assert "WRONG: row " in result.stdout


def test_replay_times_and_takes_a_pin(captured: Path) -> None:
    folder = str(captured / "sparse_attention")
    content = told(invoke("replay", folder, "--time", "3", "--route", "xqa", "--json", "-"))
    assert len(content["seconds"]["all"]) == 3
    assert content["seconds"]["median"] == sorted(content["seconds"]["all"])[1]
    assert (content["route"]["route"], content["captured_route"]) == ("cpu:xqa", "cpu:grouped")


def test_a_chunk_and_a_case_can_be_captured(tmp_path: Path) -> None:
    base = ("capture", str(tmp_path), "--preset", "tiny", "--tokens", "100", "--chunk", "16")
    assert told(invoke(*base, "--chunk-index", "1", "--json", "-"))["source"] == "tiny, tokens 16 to 31"
    # The first 32 tokens are 8 blocks, all of which are taken: nothing is selected.
    assert [path.name for path in tmp_path.iterdir()] == ["sparse_attention"]
    assert invoke("capture", str(tmp_path), "--case", "decode-1").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "select_blocks",
        "sparse_attention",
        "sparse_attention-2",
    ]
    refused(invoke(*base, "--chunk-index", "7"), "--chunk-index: wanted 0 to 6; got 7")
    refused(invoke("capture", str(tmp_path), "--tokens", "0"), "--tokens: wanted at least 1")


def test_replay_refuses_a_pin_of_the_other_stage(captured: Path) -> None:
    for name, pin in (("select_blocks", "grouped"), ("sparse_attention", "plain")):
        result = invoke("replay", str(captured / name), "--route", pin)
        assert result.exit_code == 2
        assert "--route: wanted one of the" in result.output


def test_replay_refuses_what_is_no_capture(captured: Path, tmp_path: Path) -> None:
    refused(invoke("replay", str(captured)), "holds captures, name one of them")
    refused(invoke("replay", str(tmp_path)), "holds no capture")
    refused(invoke("replay", str(captured / "select_blocks"), "--time", "-1"), "--time: wanted at least 0")
    (tmp_path / "call.json").write_text("{}")
    refused(invoke("replay", str(tmp_path)), "is not one of flashqsa-capture")


# parts


def test_rows_are_compared_in_two_steps() -> None:
    spec = QsaSpec(q_heads=1, kv_heads=1, head_dim=4, top_blocks=2)
    values = torch.tensor([[3.0, 1.0, 1.0, 2.0], [3.0, 2.0, 1.0, 0.0], [9.0, 9.0, 9.0, 9.0]])
    cuts = compare.cuts_of(values, torch.tensor([3, 4, 2]), spec)
    assert cuts.last.tolist()[:2] == [1.0, 2.0]
    assert cuts.next.tolist()[:2] == [1.0, 1.0]
    assert bool(cuts.last[2:].isnan().all())
    rows = Rows.from_lengths([2], [13])
    selection = Selection(torch.tensor([[0, 1], [2, -1]], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32))
    blocks = compare.blocks_of_selection(selection, rows, spec)
    assert blocks.tolist() == [[True, True, False], [False, False, True]]
    assert compare.blocks_of_selection(None, rows, spec).tolist() == [[True, True, True]] * 2
    tokens = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1]], dtype=torch.bool)
    assert compare.blocks_of_mask(tokens, 4).tolist() == [[True, False]]


def test_rows_without_a_selection_of_both_sides_are_not_compared() -> None:
    spec = QsaSpec(q_heads=1, kv_heads=1, head_dim=4, top_blocks=2)
    rows = Rows.from_lengths([3], [7])
    ours, stock = compare.Choices([None]), compare.StockChoices([None], 4)
    ours.chosen[0].append(compare._Chosen(None, rows, spec))
    states = (torch.zeros(5, 2), torch.tensor([[0.0, 0], [0, 0], [0, 0.5], [2, 0], [3, 0]]))
    head = torch.nn.Identity()

    def found() -> compare.Agreement:
        return compare.agreement(ours, stock, states, head, ([1, 2], [1, 3]), last_layer_mixes=False)

    assert (found().rows_compared, found().rows_selecting_otherwise) == (0, 5)
    stock.chosen[0].append(compare.blocks_of_selection(None, rows, spec))
    assert (found().rows_compared, found().rows_selecting_otherwise) == (3, 2)
    assert (found().max_difference_compared, found().max_difference) == (0.5, 3.0)
    assert (found().same_tokens, found().new_tokens) == (1, 2)
    assert not found().holds
    # A difference where every row takes all it sees can be no tie.
    stock.chosen[0][0] = ~stock.chosen[0][0]
    assert found().widest_miss == float("inf")


def test_figures_read_well() -> None:
    assert [show.seconds(value) for value in (12.34, 1.234, 0.0012, 5e-7)] == ["12.3 s", "1.23 s", "1.20 ms", "0.50 us"]
    assert show.mebibytes(3 << 20) == "3 MiB"
    assert presets.decode_bytes([72, 105, 256]) == "Hi\ufffd"
    assert process.peak_bytes() >= process.resident_bytes() // 2 > 0


def test_presets_keep_the_released_geometry() -> None:
    fields = presets.PRESETS["demo"].fields()
    assert (fields["num_attention_heads"], fields["num_key_value_heads"], fields["head_dim"]) == (24, 2, 256)
    assert (fields["indexer_n_heads"], fields["indexer_head_dim"], fields["indexer_budget"]) == (4, 128, 2048)
    assert fields["rope_parameters"]["mrope_section"] == [11, 11, 10]
    for preset in presets.PRESETS.values():
        kinds = preset.fields()["layer_types"]
        assert [index for index, kind in enumerate(kinds) if kind == "full_attention"] == [*range(3, len(kinds), 4)]
