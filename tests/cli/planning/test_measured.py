"""Compare planned times with the measurements in the documentation."""

import re
from functools import cache
from pathlib import Path

import pytest

from lorax_server.cli.planning.capacity import AdapterMix, Planner, Popularity, ReplicaSettings, Traffic
from lorax_server.cli.planning.model_sizes import ModelSizes, make_llama_sizes
from lorax_server.cli.planning.step_time import (
    ADAPTER_STEP_TIMES,
    API_TOKENS_PER_S,
    BASE_STEP_TIMES,
    GPUS,
    MEASURED_ADAPTER_BYTES,
    MEASURED_CONTEXT_TOKENS,
    MEASURED_LAYERS,
    MEASURED_TOKEN_BYTES,
    MEASURED_WEIGHT_BYTES,
    Gpu,
    decode_step_ms,
    prefill_tokens_per_s,
    read_ms,
)

DOCS = Path(__file__).parents[3] / "docs"
H200 = GPUS["H200"]
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOLERANCE = 0.15


@cache
def sizes() -> ModelSizes:
    return make_llama_sizes(LLAMA_8B)


def count_read(weights: float, adapters: float, cache: float) -> dict[str, float]:
    return {"weights": weights, "adapters": adapters, "cache": cache}


def read_table(page: str, after: str) -> list[list[str]]:
    """Return the cells of the first table after a text."""
    text = (DOCS / page).read_text().split(after)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert lines is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()[2:]]


STEPS = read_table("kernels.md", "### Decode steps")


def adapters_of(case: str) -> float:
    """Return the adapter bytes for a table row, from its first cell."""
    model = sizes()
    if "ranks 8-64" in case:  # benchmarks/gpu_decode.py, MIXED
        ranks = {8: 30, 16: 16, 32: 10, 64: 6, 512: 1}
        partial = model.adapter_bytes(16, ("q_proj", "v_proj"))
        return partial + sum(count * model.adapter_bytes(rank, ALL) for rank, count in ranks.items())
    number = re.search(r"/ (\d+)", case)
    return int(number[1]) * model.adapter_bytes(16, ALL, "DoRA" in case) if number else 0


@pytest.mark.parametrize("row", STEPS, ids=lambda row: row[0])
def test_step_times_match_measurements(row: list[str]) -> None:
    case, ms, floor = row[0], float(row[1]), float(row[2])
    rows = int(case.split()[0])
    read = count_read(
        sizes().count_bytes_read(rows), adapters_of(case), rows * MEASURED_CONTEXT_TOKENS * sizes().token_bytes
    )
    assert read_ms(H200, sum(read.values())) == pytest.approx(floor, rel=0.01)
    assert sum(decode_step_ms(H200, rows, read, MEASURED_LAYERS).values()) == pytest.approx(ms, rel=TOLERANCE)


def test_constants_match_documentation() -> None:
    measured = {row[0]: float(row[1]) for row in STEPS}
    assert len(measured) == 12
    assert dict(BASE_STEP_TIMES) == {rows: measured[f"{rows} / 0"] for rows in (1, 64, 256)}
    own = {rows: measured[f"{rows} / {rows}"] for rows in (1, 16, 64, 256)}
    assert dict(ADAPTER_STEP_TIMES) == own
    model = sizes()
    assert (model.count_bytes_read(1), model.token_bytes, model.layers) == (
        MEASURED_WEIGHT_BYTES,
        MEASURED_TOKEN_BYTES,
        MEASURED_LAYERS,
    )
    assert model.adapter_bytes(16, ALL) == MEASURED_ADAPTER_BYTES
    assert f"{1e6 / API_TOKENS_PER_S:.0f} us of API process CPU time per token" in (DOCS / "engine.md").read_text()


@pytest.mark.parametrize("row", read_table("kernels.md", "### Prefill"), ids=lambda row: row[0])
def test_prefill_rates_match_measurements(row: list[str]) -> None:
    rate = prefill_tokens_per_s(H200, sizes().prompt_flops(1024), row[0] != "0")
    assert rate == pytest.approx(float(row[1].replace(",", "")), rel=0.02)


def plan_tokens(mix: AdapterMix, traffic: Traffic, max_num_seqs: int, adapter_bytes: int | None = None) -> float:
    settings = ReplicaSettings(host_memory_bytes=128 * 2**30, adapter_bytes=adapter_bytes, max_num_seqs=max_num_seqs)
    tokens_per_s = Planner(sizes(), mix, traffic, H200, settings).plan()["replica"]["tokens_per_s"]
    assert isinstance(tokens_per_s, float)
    return tokens_per_s


@pytest.mark.parametrize(("rows", "measured"), [(64, 7319), (256, 13905)])
def test_replica_throughput_matches_measurements(rows: int, measured: int) -> None:
    """`benchmarks/gpu_serving.py`: streams over HTTP, 64 alternating adapters, prompts of 128 tokens."""
    assert f"{measured:,}" in (DOCS / "engine.md").read_text()
    tokens = plan_tokens(
        AdapterMix.from_ranks(sizes(), [(16, 64)], ALL), Traffic(1, 128, 192, zipf_exponent=0), max_num_seqs=rows
    )
    assert tokens == pytest.approx(measured, rel=TOLERANCE)


def test_throughput_with_1000_adapters_matches_measurement() -> None:
    """`benchmarks/gpu_adapters.py`, which the constants do not use."""
    assert "6,863 and 7,301 tokens/s" in (DOCS / "engine.md").read_text()
    room = 200 * sizes().adapter_bytes(8, ALL)
    mix, traffic = AdapterMix.from_ranks(sizes(), [(8, 1000)], ALL), Traffic(1, 128, 80)
    assert plan_tokens(mix, traffic, max_num_seqs=64, adapter_bytes=room) == pytest.approx(6863, rel=TOLERANCE)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_step_time_grows_with_batch_size(gpu: Gpu) -> None:
    model, times = sizes(), []
    for rows in (1, 2, 16, 64, 200, 256, 512):
        read = count_read(
            model.count_bytes_read(rows),
            rows * MEASURED_ADAPTER_BYTES,
            rows * MEASURED_CONTEXT_TOKENS * MEASURED_TOKEN_BYTES,
        )
        times.append(sum(decode_step_ms(gpu, rows, read, MEASURED_LAYERS).values()))
        assert times[-1] > read_ms(gpu, sum(read.values()))
    assert times == sorted(times)


def test_small_model_step_time_is_limited_by_scheduling() -> None:
    read = count_read(1e6, 0, 1e5)
    assert sum(decode_step_ms(H200, 256, read, 2).values()) == pytest.approx(1.26, rel=0.1)
    assert sum(decode_step_ms(H200, 1, read, 2).values()) < 0.3


def test_popularity_follows_zipf() -> None:
    shares = [1 / k for k in range(1, 5001)]
    popularity = Popularity(5000, 1.0)
    for count in (0, 1, 10, 999, 1000, 3000, 5000, 9000):
        assert popularity.request_share_of_top(count) == pytest.approx(sum(shares[:count]) / sum(shares), abs=1e-3)
    exact = sum(1 - (1 - share / sum(shares)) ** 256 for share in shares)
    assert popularity.expected_distinct_adapters(256) == pytest.approx(exact, rel=1e-3)
    assert Popularity(64, 0).expected_distinct_adapters(1) == pytest.approx(1)
    assert Popularity(1, 1).expected_distinct_adapters(7) == 1
    assert Popularity(10**6, 0.5).expected_distinct_adapters(256) == pytest.approx(256, rel=0.01)
    assert Popularity(0, 1).request_share_of_top(5) == 0
