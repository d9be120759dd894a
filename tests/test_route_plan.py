"""Routes and plans: which kernels serve which call where, pins that are used or refused, and sizes that hold."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashqsa
from flashqsa import (
    Call,
    DeviceFacts,
    InputError,
    KnobError,
    NoRouteError,
    Plan,
    QsaSpec,
    Route,
    choose_route,
    reference,
    route,
)
from flashqsa.config import MAX_GROUP_ROWS, AttendConfig, attend_config, config_refusal
from flashqsa.device import KNOWN_DEVICES, facts_of, kernel_sets_for
from flashqsa.plan import SelectPlan, make_plan, plan_select
from flashqsa.route import ATTEND_CANDIDATES, CANDIDATES, PINS, SELECT_CANDIDATES
from flashqsa.testing import compare
from flashqsa.testing.cases import named
from flashqsa.testing.inputs import Inputs, build

CPU = DeviceFacts.named("cpu")
SPEC = QsaSpec()
PREFILL = Call(SPEC, rows=1616, requests=1, max_position=24239)
DECODE = Call(SPEC, rows=16, requests=16, max_position=24239)
SHORT = Call(SPEC, rows=100, requests=1, max_position=99)
NOTHING = Call(SPEC, rows=0, requests=0, max_position=-1)

CAPABILITIES = [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)]


def stub(capability: tuple[int, int]) -> DeviceFacts:
    """A GPU of that capability which is not there."""
    return DeviceFacts("cuda", "stub", capability, 80, 96 << 10, kernel_sets=kernel_sets_for(capability))


def modes(call: Call, facts: DeviceFacts = CPU, pin: str | None = None) -> tuple[str, str]:
    """The routes of both stages."""
    return str(choose_route("select", call, facts, pin).route), str(choose_route("attend", call, facts, pin).route)


# Devices.


def test_known_devices_have_every_capability_in_the_table() -> None:
    assert {facts.capability for facts in KNOWN_DEVICES.values()} == {None, *CAPABILITIES}
    for facts in KNOWN_DEVICES.values():
        assert facts.kernel_sets == kernel_sets_for(facts.capability)
        if facts.capability is not None:
            assert facts.arch == f"sm_{facts.capability[0]}{facts.capability[1]}"
            assert facts.shared_memory_bytes >= 64 << 10


def test_devices_are_found_by_any_spelling() -> None:
    assert DeviceFacts.named("RTX 4090") is DeviceFacts.named("rtx-4090") is KNOWN_DEVICES["rtx4090"]
    with pytest.raises(KeyError):
        DeviceFacts.named("voodoo2")


def test_facts_of_this_cpu() -> None:
    facts = facts_of(torch.device("cpu"))
    assert (facts.kind, facts.arch, facts.capability) == ("cpu", "cpu", None)
    assert facts.kernel_sets == {"cpu", "reference"}
    assert facts.multiprocessors >= 1
    assert facts_of(torch.device("meta")).kernel_sets == {"reference"}


# The dispatch table. A capability gets what was built for it; all else is left to the reference, if pinned.

OLD_OR_UNKNOWN: dict[tuple[int, int], set[str]] = {
    capability: {"reference"} for capability in [(5, 0), (6, 1), (13, 0)]
}
IMAGES: dict[tuple[int, int], set[str]] = {
    **OLD_OR_UNKNOWN,
    **{capability: {"reference", "sm7x"} for capability in [(7, 0), (7, 2), (7, 5)]},
    **{capability: {"reference", "smxx"} for capability in [*CAPABILITIES, (11, 0), (12, 2)] if capability >= (8, 0)},
    (9, 0): {"reference", "sm90", "smxx"},
}


@pytest.mark.parametrize(("capability", "sets"), IMAGES.items(), ids=[str(capability) for capability in IMAGES])
def test_kernel_sets_match_capabilities_exactly(capability: tuple[int, int], sets: set[str]) -> None:
    assert kernel_sets_for(capability) == sets


@pytest.mark.parametrize("capability", OLD_OR_UNKNOWN, ids=str)
@pytest.mark.parametrize("call", [PREFILL, DECODE, SHORT, NOTHING], ids=["prefill", "decode", "short", "nothing"])
def test_a_device_without_images_is_told_why_for_every_candidate(call: Call, capability: tuple[int, int]) -> None:
    for stage, candidates in CANDIDATES.items():
        with pytest.raises(NoRouteError) as caught:
            choose_route(stage, call, stub(capability))
        text, refused = str(caught.value), caught.value.refused
        assert [refusal.route for refusal in refused] == [candidate.route for candidate in candidates]
        for refusal in refused:
            assert f"{refusal.route}: {refusal.reason}" in text
        arch = f"sm_{capability[0]}{capability[1]}"
        assert f"no route serves {call.rows} rows on stub ({arch})" in text
        assert any(f"the cpu kernels have no image for stub ({arch})" in refusal.reason for refusal in refused)
    assert modes(call, stub(capability), "reference") == ("reference", "reference")


@pytest.mark.parametrize("name", KNOWN_DEVICES)
def test_the_reference_can_be_planned_everywhere(name: str) -> None:
    plan = make_plan(PREFILL, DeviceFacts.named(name), "reference")
    assert str(plan.attend_decision.route) == "reference"
    assert plan.workspace_bytes > 0


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (PREFILL, ("cpu:plain", "cpu:grouped")),
        (DECODE, ("cpu:plain", "cpu:xqa")),
        (SHORT, ("cpu:everything", "cpu:dense")),
        (NOTHING, ("cpu:everything", "cpu:dense")),
        (replace(SHORT, max_position=2050), ("cpu:everything", "cpu:dense")),  # 512 blocks and a tail of 3
        (replace(SHORT, max_position=2051), ("cpu:plain", "cpu:grouped")),  # 513 blocks
        (replace(DECODE, rows=17), ("cpu:plain", "cpu:grouped")),  # one request has two rows
        (replace(PREFILL, cache_dtype=torch.float8_e4m3fn), ("cpu:plain", "cpu:grouped")),
        (replace(PREFILL, spec=replace(SPEC, top_blocks=2048)), ("cpu:plain", "cpu:grouped")),
    ],
)
def test_the_cpu_routes(call: Call, wanted: tuple[str, str]) -> None:
    assert modes(call) == wanted


def test_a_decision_says_why_each_other_candidate_did_not_run() -> None:
    assert choose_route("attend", DECODE, CPU).lines() == [
        "attend: cpu:xqa",
        "  not sm90:dense, sm90:splitk, sm90:grouped, sm90:xqa: the sm90 kernels have no image for CPU (cpu)",
        "  not smxx:dense, smxx:splitk, smxx:grouped, smxx:xqa: the smxx kernels have no image for CPU (cpu)",
        "  not sm7x:dense, sm7x:splitk, sm7x:grouped, sm7x:xqa: the sm7x kernels have no image for CPU (cpu)",
        "  not cpu:dense: rows see up to 6060 blocks and select 512",
        "  not cpu:grouped: 16 rows of 16 requests: no more rows than requests",
        "  not reference: cpu:xqa comes first",
    ]
    assert "only when pinned" in str(choose_route_error(PREFILL, {"reference"}))


def choose_route_error(call: Call, sets: set[str]) -> NoRouteError:
    with pytest.raises(NoRouteError) as caught:
        choose_route("attend", call, replace(CPU, kernel_sets=frozenset(sets)))
    return caught.value


# Pins.

CALLS = st.builds(
    Call,
    spec=st.sampled_from([SPEC, QsaSpec(q_heads=6, kv_heads=1, top_blocks=8)]),
    rows=st.integers(0, 70_000),
    requests=st.integers(0, 300),
    max_position=st.sampled_from([-1, 0, 99, 2050, 2051, 262_143, (1 << 20) - 1]),
    q_dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)


@given(CALLS, st.sampled_from(sorted(PINS)), st.sampled_from(["cpu", "gtx1080"]))
@settings(max_examples=60)
def test_a_pin_is_used_or_refused_never_replaced(call: Call, pin: str, device: str) -> None:
    facts = DeviceFacts.named(device) if device == "cpu" else stub((6, 1))
    for stage, candidates in CANDIDATES.items():
        named_here = [candidate.route for candidate in candidates if candidate.route.answers_to(pin)]
        allowed = named_here or [candidate.route for candidate in candidates]
        served = [r for r in allowed if can_serve(r, call, facts, pinned=bool(named_here))]
        if not served:
            with pytest.raises(NoRouteError) as caught:
                choose_route(stage, call, facts, pin)
            assert [refusal.route for refusal in caught.value.refused] == [candidate.route for candidate in candidates]
            continue
        decision = choose_route(stage, call, facts, pin)
        assert decision.route == served[0]
        listed = [*(refusal.route for refusal in decision.refused), decision.route, *decision.unused]
        assert sorted(map(str, listed)) == sorted(str(candidate.route) for candidate in candidates)
        assert all(
            r.reason == f"{pin} is pinned" or "no image" in r.reason for r in decision.refused if r.route not in allowed
        )


def can_serve(candidate: Route, call: Call, facts: DeviceFacts, pinned: bool) -> bool:
    """Whether a candidate may be taken, by the words of its own rule."""
    if candidate.kernel_set not in facts.kernel_sets:
        return False
    below_budget = call.max_position < 4 * call.spec.top_blocks + 3
    long_chunk = call.rows_per_request >= 64 and call.max_position >= 4 * 8192 - 1
    return {
        "fused": pinned or long_chunk,
        "everything": below_budget,
        "dense": below_budget,
        "grouped": call.rows > call.requests,
        "reference": pinned,
    }.get(candidate.mode, True)


@given(CALLS)
@settings(max_examples=40)
def test_without_a_pin_the_first_candidate_that_can_serve_is_taken(call: Call) -> None:
    for stage, candidates in CANDIDATES.items():
        able = [
            c.route
            for c in candidates
            if c.route.kernel_set == "cpu" and c.refusal(call, CPU) is None and c.passed_over(call, CPU) is None
        ]
        assert choose_route(stage, call, CPU).route == able[0]


@pytest.mark.parametrize(
    ("pin", "call", "wanted"),
    [
        ("xqa", PREFILL, ("cpu:plain", "cpu:xqa")),
        ("cpu:xqa", SHORT, ("cpu:everything", "cpu:xqa")),
        ("grouped", PREFILL, ("cpu:plain", "cpu:grouped")),
        ("plain", SHORT, ("cpu:plain", "cpu:dense")),
        ("cpu:plain", SHORT, ("cpu:plain", "cpu:dense")),
        ("cpu", PREFILL, ("cpu:fused", "cpu:grouped")),
        ("cpu:plain", replace(PREFILL, max_position=99_999), ("cpu:plain", "cpu:grouped")),
        ("cpu", SHORT, ("cpu:everything", "cpu:dense")),
        ("reference", DECODE, ("reference", "reference")),
    ],
)
def test_pins_of_one_stage_leave_the_other_free(pin: str, call: Call, wanted: tuple[str, str]) -> None:
    assert modes(call, CPU, pin) == wanted


@pytest.mark.parametrize(
    ("pin", "call", "reason"),
    [
        ("dense", PREFILL, "rows see up to 6060 blocks and select 512"),
        ("everything", PREFILL, "rows see up to 6060 blocks and select 512"),
        ("grouped", DECODE, "no more rows than requests"),
        ("cpu:grouped", NOTHING, "0 rows of 0 requests"),
    ],
)
def test_a_pinned_route_that_cannot_serve_is_refused(pin: str, call: Call, reason: str) -> None:
    with pytest.raises(NoRouteError, match=reason):
        make_plan(call, CPU, pin)


def test_every_route_answers_to_its_mode_its_set_and_both() -> None:
    for candidate in (*SELECT_CANDIDATES, *ATTEND_CANDIDATES):
        assert {candidate.route.mode, candidate.route.kernel_set, str(candidate.route)} <= PINS
    assert not Route("attend", "grouped", "cpu").answers_to("group")


def outcome(inputs: Inputs, **how: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Selection, output and lse of the public calls."""
    selection = flashqsa.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec, **how)  # type: ignore[arg-type]
    output, lse = flashqsa.sparse_attention(
        inputs.q,
        inputs.kv_cache,
        selection,
        inputs.rows,
        inputs.spec,
        inputs.gate,
        True,
        **how,  # type: ignore[arg-type]
    )
    return selection.blocks, output, lse


def test_the_environment_pins_what_the_argument_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(named("decode-16"))
    monkeypatch.setenv("FLASHQSA_ROUTE", "grouped")
    with pytest.raises(NoRouteError, match="grouped"):
        outcome(inputs)
    blocks, _, _ = outcome(inputs, route="cpu")
    assert compare.same_bits(blocks, outcome(inputs, route="reference")[0])
    monkeypatch.setenv("FLASHQSA_ROUTE", "")
    assert compare.same_bits(outcome(inputs)[1], outcome(inputs, route="xqa")[1])


# Plans.


def plan_for(inputs: Inputs, **changes: object) -> Plan:
    arguments = {"rows": inputs.rows, "spec": inputs.spec, "index_cache": inputs.index_cache, **changes}
    return flashqsa.plan_batch(**arguments)  # type: ignore[arg-type]


def test_a_plan_serves_its_batch_and_shorter_ones() -> None:
    inputs = build(named("verify-5"))
    plan = plan_for(inputs, kv_cache=inputs.kv_cache)
    wanted = outcome(inputs)
    assert all(compare.same_bits(a, b) for a, b in zip(outcome(inputs, plan=plan), wanted, strict=True))
    far = replace(inputs.rows, max_position=140)
    longer = plan_for(inputs, kv_cache=inputs.kv_cache, index_cache=None, rows=far)
    assert all(compare.same_bits(a, b) for a, b in zip(outcome(inputs, plan=longer), wanted, strict=True))


@pytest.mark.parametrize("field", ["rows", "requests", "spec", "max_position"])
def test_a_plan_of_another_batch_is_refused(field: str) -> None:
    inputs = build(named("verify-5"))
    changes: dict[str, object] = {
        "rows": {"rows": inputs.rows.slice(0, 12)},
        "requests": {"index_cache": replace(inputs.index_cache, page_table=inputs.index_cache.page_table[:1])},
        "spec": {"spec": replace(inputs.spec, top_blocks=7)},
        "max_position": {"rows": replace(inputs.rows, max_position=129)},
    }
    other = plan_for(inputs, **changes[field])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="plan: wanted a plan of 13 rows of 2 requests, positions to 130"):
        outcome(inputs, plan=other)


def select_plan(call: Call, limit: int) -> SelectPlan:
    """The CPU's sizes of the select stage where scores are kept."""
    return plan_select(call, choose_route("select", call, CPU, "plain"), CPU, limit)


@given(CALLS, st.integers(1, 64 << 20))
@settings(max_examples=60)
def test_score_chunks_fit_the_workspace_and_cover_the_rows(call: Call, limit: int) -> None:
    plan = select_plan(call, limit)
    assert plan.width_blocks == max((call.max_position + 1) // 4, 1)
    one_row = plan.width_blocks * (call.spec.index_heads + 1) * 4
    assert plan.workspace_bytes == plan.chunk_rows * one_row
    assert plan.workspace_bytes <= limit or plan.chunk_rows == 1
    # The largest chunk that fits, though no more than the rows there are.
    assert plan.chunk_rows == max(call.rows, 1) or plan.workspace_bytes + one_row > limit
    if call.rows // plan.chunk_rows < 100_000:
        chunks = list(plan.chunks(call.rows))
        assert [start for start, _ in chunks] == [0, *(stop for _, stop in chunks[:-1])][: len(chunks)]
        assert (chunks[-1][1] if chunks else 0) == call.rows
        assert all(0 < stop - start <= plan.chunk_rows for start, stop in chunks)


@given(CALLS)
@settings(max_examples=40)
def test_attention_tiles_fit_the_workspace(call: Call) -> None:
    plan = make_plan(call, CPU)
    assert plan.attend.config.tile_tokens >= call.spec.block_tokens
    assert plan.attend.workspace_bytes <= 128 << 20
    assert plan.workspace_bytes == max(plan.select.workspace_bytes, plan.attend.workspace_bytes)
    assert plan.call == call


@pytest.mark.parametrize("name", ["disjoint", "near", "prefill", "verify-1-to-12", "first-tokens-of-a-request"])
def test_no_group_has_more_entries_than_planned(name: str) -> None:
    inputs = build(named(name))
    plan = plan_for(inputs, kv_cache=inputs.kv_cache)
    selection = inputs.selection or flashqsa.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec)
    largest = plan.attend.config.group_rows[-1]
    work = reference.worklist(selection, inputs.rows, inputs.spec, largest)
    entries = work.group_entries[1:] - work.group_entries[:-1]
    assert int(entries.max()) <= plan.attend.max_entries


def test_a_small_workspace_changes_no_bit_of_a_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build(named("far"))
    wanted, _, _ = outcome(inputs)
    plan = plan_for(inputs)
    narrow = replace(plan, select=select_plan(plan.call, 50_000))
    assert narrow.select.chunk_rows == 2
    assert compare.same_bits(outcome(inputs, plan=narrow)[0], wanted)
    monkeypatch.setenv("FLASHQSA_WORKSPACE_MIB", "1")
    assert compare.same_bits(outcome(inputs)[0], wanted)
    large = make_plan(replace(PREFILL, max_position=262_143), CPU, "plain")
    assert large.workspace_bytes <= 65536 * 5 * 4  # one row of scores is already more than the limit
    assert large.select.chunk_rows == 1


@pytest.mark.parametrize("text", ["0", "-1", "2.5", "many"])
def test_a_workspace_that_is_no_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHQSA_WORKSPACE_MIB", text)
    with pytest.raises(KnobError, match="FLASHQSA_WORKSPACE_MIB: wanted a whole number, at least 1"):
        make_plan(PREFILL, CPU)


def test_score_offsets_of_a_very_large_call_are_chunked() -> None:
    # 4 heads x 8,192 rows x 65,536 blocks are 2^31 products: never held at once, so never indexed by 32 bits.
    plan = select_plan(Call(SPEC, rows=8192, requests=1, max_position=262_143), 128 << 20)
    assert plan.chunk_rows * plan.width_blocks * SPEC.index_heads < 2**31


# Configurations.


@pytest.mark.parametrize("mode", ["dense", "grouped", "xqa"])
def test_the_table_holds_legal_configurations(mode: str) -> None:
    assert config_refusal(attend_config(mode, CPU), CPU) is None


def test_illegal_configurations_say_why() -> None:
    good = attend_config("grouped", CPU)

    def refusal(**fields: object) -> str:
        found = config_refusal(replace(good, **fields), CPU)  # type: ignore[arg-type]
        assert found is not None
        return found

    assert "must ascend" in refusal(group_rows=())
    assert "must ascend" in refusal(group_rows=(2, 1))
    assert "1 to 64 rows" in refusal(group_rows=(0, 1))
    assert "1 to 64 rows" in refusal(group_rows=(1, 2 * MAX_GROUP_ROWS))
    assert "divide" in refusal(group_rows=(2, 3))
    assert "at least one token" in refusal(tile_tokens=0)
    assert isinstance(good, AttendConfig)


# Lines in the log.


def test_each_route_and_each_refusal_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "_announced", set())
    decode, verify = build(named("decode-16")), build(named("verify-5"))
    with caplog.at_level(logging.INFO, logger="flashqsa"):
        outcome(decode)
        first = [record.getMessage() for record in caplog.records]
        outcome(decode)
        outcome(build(named("decode-16-fp8")))
        assert len(caplog.records) == len(first)
        outcome(verify)
    second = [record.getMessage() for record in caplog.records][len(first) :]
    where = f"on cpu ({facts_of(torch.device('cpu')).name}), first for 16 rows of 16 requests, positions to 377"
    assert first == [
        f"select takes cpu:plain {where}",
        f"select refuses cpu:everything {where}: rows see up to 94 blocks and select 8",
        f"select refuses cpu:fused {where}: scores in full are faster below 64 rows per request, got 1",
        f"attend takes cpu:xqa {where}",
        f"attend refuses cpu:dense {where}: rows see up to 94 blocks and select 8",
        f"attend refuses cpu:grouped {where}: 16 rows of 16 requests: no more rows than requests",
    ]
    assert [line.split(" on ")[0] for line in second] == ["attend takes cpu:grouped"]


def test_logging_is_quiet_by_default(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "_announced", set())
    outcome(build(named("decode-1")))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_pin_that_no_route_has_is_no_pin() -> None:
    with pytest.raises(ValueError, match=r"pin: wanted one of .*; got 'gruoped'"):
        choose_route("attend", PREFILL, DeviceFacts.named("cpu"), "gruoped")


def test_a_route_is_announced_when_logging_is_turned_on_late(caplog: pytest.LogCaptureFixture) -> None:
    facts = DeviceFacts.named("cpu")
    decision = choose_route("attend", PREFILL, facts)
    device = torch.device("cpu", 7)  # of no other test
    with caplog.at_level(logging.WARNING, "flashqsa"):
        route.announce(decision, PREFILL, facts, device)
    assert not caplog.messages
    with caplog.at_level(logging.INFO, "flashqsa"):
        route.announce(decision, PREFILL, facts, device)
        route.announce(decision, PREFILL, facts, device)
    assert [line.split(" on ")[0] for line in caplog.messages] == [
        "attend takes cpu:grouped",
        "attend refuses cpu:dense",
    ]


def test_a_plan_is_for_devices_like_its_own() -> None:
    case = named("decode-1")
    inputs = build(case)
    plan = flashqsa.plan_batch(inputs.rows, inputs.spec, index_cache=inputs.index_cache)
    assert plan.fits_device(torch.device("cpu"))
    elsewhere = replace(plan, facts=DeviceFacts.named("h200"))
    with pytest.raises(InputError, match="plan: wanted one for cpu; got one for H200"):
        flashqsa.select_blocks(inputs.index_q, inputs.index_cache, inputs.rows, inputs.spec, plan=elsewhere)
