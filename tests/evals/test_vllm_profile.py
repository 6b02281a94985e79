"""Level "executed" for vLLM: its profiler is turned on, asked once, and its traces are read."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from fake_server import Action, FakeServer, Request

from evalsuite import engines
from evalsuite.config import EvalConfig
from evalsuite.engines import vllm, vllm_profile
from evalsuite.evidence import contradiction
from evalsuite.jobs import EvalJob, make_job


def job(**keys: object) -> EvalJob:
    values = {
        "model_name": "org/model",
        "accuracy_threshold": 0.9,
        "num_questions": 100,
        "num_fewshot": 5,
        "engine": "vllm",
        "expect_backend": {"name": "triton", "level": "executed"},
        **keys,
    }
    return make_job(Path("configs/suite/name.yaml"), EvalConfig.model_validate(values), None)


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the profiler writes."""
    folder = tmp_path / "traces"
    folder.mkdir()
    monkeypatch.setattr(vllm_profile, "folder_of", lambda _: folder)
    return folder


def write_trace(path: Path, names: Counter[str], category: str = "kernel") -> None:
    events = [{"cat": category, "name": name} for name in names.elements()]
    # What else is in a trace names no kernel.
    events += [{"cat": "python_function", "name": "fused_moe_kernel"}, {"ph": "M"}]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


@pytest.mark.parametrize(
    ("version", "is_flag"),
    [("0.12.1", False), ("0.13.0", True), ("0.26.0", True), ("1.0.0rc1", True), ("", True)],
)
def test_the_profiler_is_turned_on_as_the_version_wants_it(
    version: str, is_flag: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm.Vllm, "version", lambda _: version)
    spec = engines.get("vllm").launch_spec(job())
    assert ("--profiler-config" in spec.argv) is is_flag
    assert ("VLLM_TORCH_PROFILER_DIR" in spec.env) is not is_flag
    if is_flag:
        given = json.loads(spec.argv[spec.argv.index("--profiler-config") + 1])
        assert given["torch_profiler_dir"] == str(vllm_profile.folder_of(job()))


@pytest.mark.parametrize(
    "keys",
    [
        {"expect_backend": "triton"},
        {"expect_backend": None},
        {"server_args": '--profiler-config {"profiler":"torch"}'},
        {"env": {"VLLM_TORCH_PROFILER_DIR": "/elsewhere"}},
    ],
)
def test_without_the_level_or_beside_a_profiler_of_the_files_own_nothing_is_added(
    keys: dict[str, object],
) -> None:
    config = job(**keys)
    before = list(config.config.server_args)
    spec = engines.get("vllm").launch_spec(config)
    assert [word for word in spec.argv if word == "--profiler-config"] == [
        word for word in before if word == "--profiler-config"
    ]
    found = engines.get("vllm").evidence(config, "http://127.0.0.1:1", "")
    assert (found.executed, found.detail) == ("", {})


@pytest.mark.parametrize(
    ("ranks", "executed", "is_fine"),
    [
        ([Counter({"fused_moe_kernel": 96, "aten::mm": 4})] * 2, "triton", True),
        ([Counter({"fused_moe_kernel": 96}), Counter({"void moeGemm<bf16>": 96})],
         "flashinfer_cutlass+triton", False),
        ([Counter({"_C::cpu_fused_moe": 16})], "cpu", False),
        ([Counter({"aten::mm": 900})], "", False),
    ],
)  # fmt: skip
def test_one_request_is_profiled_and_every_rank_counts(
    traces: Path, ranks: list[Counter[str]], executed: str, is_fine: bool
) -> None:
    paths = []

    def script(request: Request) -> Action:
        paths.append(request.route)
        if request.route == "/stop_profile":
            for number, names in enumerate(ranks):
                write_trace(traces / f"rank{number}.pt.trace.json.gz", names)
            write_trace(traces / "front.async_llm.pt.trace.json.gz", Counter())
        return Action(payload=b"{}")

    config = job()
    with FakeServer(script) as server:
        found = engines.get("vllm").evidence(config, server.url, "")
    assert paths == ["/start_profile", "/v1/completions", "/stop_profile"]
    assert found.executed == executed
    assert not traces.exists()
    assert (contradiction(found, config.config.expect_backend) == "") is is_fine
    if is_fine:
        assert found.detail["profiled"] == {
            f"rank{number}.pt.trace.json.gz": "triton" for number in range(2)
        }


def test_a_server_without_a_profiler_leaves_the_level_unknown(traces: Path) -> None:
    with FakeServer(lambda _: Action(status=404, payload=b"Not Found")) as server:
        found = engines.get("vllm").evidence(job(), server.url, "")
    assert found.executed == ""
    assert found.detail == {"profiler": "/start_profile answers 404: Not Found"}
    text = contradiction(found, job().config.expect_backend)
    assert "level 'executed' and it is not known" in text
    gone = engines.get("vllm").evidence(job(), "http://127.0.0.1:1", "")
    assert "ConnectionRefusedError" in str(gone.detail["profiler"])
