from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from eval_helpers import REAL_DATA, needs_gsm8k, real_source

from evalsuite import cli_data
from evalsuite.errors import ConfigError
from evalsuite.tasks import data
from evalsuite.tasks.base import DataSource, Row


def test_the_user_folder_beats_the_environment_and_the_environment_beats_the_cache() -> None:
    environ = {"HOME": "/home/u", "EVALSUITE_GSM8K_DIR": "/data/a"}
    assert data.source_from(environ, Path("/data/b")).data_dir == Path("/data/b")
    assert data.source_from(environ).data_dir == Path("/data/a")
    plain = data.source_from({"HOME": "/home/u"})
    assert plain.data_dir is None
    assert plain.cache_dir == Path("/home/u/.cache/evalsuite")
    assert plain.hub_cache == Path("/home/u/.cache/huggingface/hub")
    moved = data.source_from({"HOME": "/h", "XDG_CACHE_HOME": "/x", "HF_HOME": "/f"})
    assert (moved.cache_dir, moved.hub_cache) == (Path("/x/evalsuite"), Path("/f/hub"))
    assert data.source_from({"HF_HUB_CACHE": "/hub"}).hub_cache == Path("/hub")


def test_another_file_of_that_name_is_refused_with_both_checksums(tmp_path: Path) -> None:
    content = b'{"question": "q", "answer": "#### 1"}\n'
    (tmp_path / "test.jsonl").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        data.gsm8k_rows("test", DataSource(data_dir=tmp_path))
    assert hashlib.sha256(content).hexdigest() in str(caught.value)
    assert data.GSM8K_SHA256["test"] in str(caught.value)
    assert str(tmp_path / "test.jsonl") in str(caught.value)


def test_a_bad_row_is_named_by_file_and_line() -> None:
    good = '{"question": "a\u2028b", "answer": "#### 1"}\n'.encode()
    assert data.parse_rows(good + b"\n", "f") == (Row("a\u2028b", "#### 1"),)
    for bad in (b"{", b"[]", b'{"question": "q"}'):
        with pytest.raises(ConfigError, match=r"f:2: "):
            data.parse_rows(good + bad + b"\n", "f")


@needs_gsm8k
def test_the_hubs_parquet_file_serves_as_well_and_is_checked(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the hub's form needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "datasets--openai--gsm8k" / "snapshots" / "abc" / "main"
    folder.mkdir(parents=True)
    lines = (Path(REAL_DATA) / "test.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    path = folder / "test-00000-of-00001.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    source = DataSource(hub_cache=tmp_path)
    assert data.gsm8k_rows("test", source) == data.gsm8k_rows("test", real_source())
    data._read.cache_clear()
    parquet.write_table(arrow.Table.from_pylist(rows[:-1]), path)
    with pytest.raises(ConfigError, match="sha256"):
        data.gsm8k_rows("test", source)


def test_half_a_hub_download_is_named_and_the_remedy_given(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet", reason="the hub's form needs pyarrow")
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "datasets--openai--gsm8k" / "snapshots" / "abc" / "main"
    folder.mkdir(parents=True)
    path = folder / "test-00000-of-00001.parquet"
    parquet.write_table(arrow.Table.from_pylist([{"prompt": "q", "answer": "a"}]), path)
    whole = path.read_bytes()
    for content in (whole, whole[:-20], b""):
        path.write_bytes(content)
        data._read.cache_clear()
        with pytest.raises(ConfigError, match=r"is no table of GSM8K: .*evalsuite data get gsm8k"):
            data.gsm8k_rows("test", DataSource(hub_cache=tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text("x")
    path.chmod(0)
    with pytest.raises(ConfigError, match=r"test\.jsonl: error: cannot be read .Permission"):
        data.gsm8k_rows("test", DataSource(data_dir=tmp_path))


@contextlib.contextmanager
def web(folder: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Nothing on the terminal."""

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()


@needs_gsm8k
def test_data_get_fetches_checks_and_caches_once(tmp_path: Path) -> None:
    source = DataSource(cache_dir=tmp_path / "cache")
    said: list[str] = []
    with web(Path(REAL_DATA)) as url:
        paths = cli_data.data_get("gsm8k", source, url=url, say=said.append)
    assert [path.name for path in paths] == ["test.jsonl", "train.jsonl"]
    assert paths[0].read_bytes() == (Path(REAL_DATA) / "test.jsonl").read_bytes()
    assert sum(line.startswith("fetching") for line in said) == 2
    # There now: the second time needs no network.
    assert cli_data.data_get("gsm8k", source, url="http://127.0.0.1:9/") == paths
    assert len(data.gsm8k_rows("test", source)) == 1319
    assert sorted(path.name for path in paths[0].parent.iterdir()) == ["test.jsonl", "train.jsonl"]


def test_what_is_not_the_data_set_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "test.jsonl").write_text("<html>please log in</html>")
    source = DataSource(cache_dir=tmp_path / "cache")
    with web(tmp_path / "web") as url, pytest.raises(ConfigError, match="sha256"):
        cli_data.data_get("gsm8k", source, url=url)
    assert not (tmp_path / "cache").exists()


def test_half_a_file_from_the_web_is_not_kept(tmp_path: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            line, _ = listener.accept()
            with line:
                line.recv(65536)
                line.sendall(head + b'{"question"')

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        with pytest.raises(
            ConfigError, match=r"cannot be fetched .IncompleteRead.*copy test\.jsonl"
        ):
            cli_data.data_get("gsm8k", DataSource(cache_dir=tmp_path / "cache"), url=url)
    assert not (tmp_path / "cache").exists()


@needs_gsm8k
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    source = DataSource(cache_dir=tmp_path / "cache")
    with (
        web(Path(REAL_DATA)) as url,
        pytest.raises(ConfigError, match=r"test\.jsonl cannot be written .*--data-dir"),
    ):
        cli_data.data_get("gsm8k", source, url=url)


def test_without_a_network_it_says_what_to_do(tmp_path: Path) -> None:
    source = DataSource(cache_dir=tmp_path)
    with pytest.raises(ConfigError) as caught:
        cli_data.data_get("gsm8k", source, url="http://127.0.0.1:9/")
    message = str(caught.value)
    assert "http://127.0.0.1:9/test.jsonl cannot be fetched" in message
    assert str(tmp_path / "gsm8k" / "test.jsonl") in message
    assert "EVALSUITE_GSM8K_DIR" in message
    with pytest.raises(ConfigError, match="'gsm8'; did you mean 'gsm8k'"):
        cli_data.data_get("gsm8", source)
