"""A bundle is refused when anything it depends on differs, and whole or absent on disk."""

import json
import zipfile

import jax
import numpy as np
import pytest

from engine import EngineConfig, SamplingParams
from engine.aot_bundle import Bundle, BundleError, source_digest, write_bundle
from engine.compile_cache import CompileCounter, prepare_cache_dir
from engine.core import EngineCore


@pytest.fixture
def path(tmp_path):
    compiled = jax.jit(lambda x: x * 3).lower(np.ones(4, np.float32)).compile()
    path = tmp_path / "folder" / "steps.zip"
    write_bundle(path, "program", {"triple": compiled})
    return path


def _edit(path, **changes):
    """Rewrites the manifest's environment."""
    with zipfile.ZipFile(path) as bundle:
        entries = {name: bundle.read(name) for name in bundle.namelist()}
    manifest = json.loads(entries["manifest.json"])
    manifest["environment"].update(changes)
    entries["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as bundle:
        for name, data in entries.items():
            bundle.writestr(name, data)


def test_runs_what_was_compiled(path):
    triple = Bundle(path, "program").load("triple")
    counter = CompileCounter()
    np.testing.assert_array_equal(triple(np.arange(4, dtype=np.float32)), [0, 3, 6, 9])
    assert counter.count == 0


@pytest.mark.parametrize("name", ["jax", "jaxlib", "cpu", "device", "xla_flags", "machine"])
def test_another_environment_is_refused(path, name):
    _edit(path, **{name: "other"})
    with pytest.raises(BundleError, match=rf"compiled for {name} 'other'.*--aot_bundle"):
        Bundle(path, "program")


def test_another_program_is_refused(path):
    with pytest.raises(BundleError, match="another model"):
        Bundle(path, "something else")


def test_damage_is_refused(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(BundleError, match="cannot be read"):
        Bundle(path, "program")
    path.write_bytes(b"")
    with pytest.raises(BundleError, match="cannot be read"):
        Bundle(path, "program")


def test_missing_entry(path):
    with pytest.raises(BundleError, match="entry other"):
        Bundle(path, "program").load("other")


def test_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(AttributeError):
        write_bundle(tmp_path / "steps.zip", "program", {"bad": object()})
    assert list(tmp_path.iterdir()) == []


def test_source_digest_sees_every_package():
    digests = {source_digest(p) for p in ("engine", "models", "pallas_kernels")}
    assert len(digests) == 3


def _generate(core):
    core.add_request("r", [5, 6, 7], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    tokens = []
    while core.has_unfinished():
        for output in core.step():
            tokens += output.token_ids
    return tokens


@pytest.fixture
def settings(tiny_settings):
    return {**tiny_settings, "max_num_seqs": 2, "max_num_batched_tokens": 16}


def test_engine_starts_from_a_bundle_without_compiling(settings, tmp_path):
    settings = {**settings, "aot_bundle": str(tmp_path / "steps.zip"), "compile_cache_dir": ""}
    first = EngineCore(EngineConfig(**settings), progress=False)
    expected = _generate(first)
    # The sizes' own small programs (allocation) are compiled by now; only steps could be new.
    counter = CompileCounter()
    second = EngineCore(EngineConfig(**settings), progress=False)
    assert _generate(second) == expected
    assert counter.count == 0
    other = {**settings, "max_num_seqs": 4}
    with pytest.raises(BundleError, match="other limits"):
        EngineCore(EngineConfig(**other), progress=False)


def test_corrupt_cache_costs_a_warning(settings, tmp_path, caplog):
    settings = {**settings, "compile_cache_dir": str(tmp_path)}
    expected = _generate(EngineCore(EngineConfig(**settings), progress=False))
    (cached,) = tmp_path.glob("steps-*.zip")
    cached.write_bytes(b"not a zip file")
    assert _generate(EngineCore(EngineConfig(**settings), progress=False)) == expected
    assert "compiling anew" in caplog.text
    caplog.clear()
    assert _generate(EngineCore(EngineConfig(**settings), progress=False)) == expected
    assert not caplog.records


def test_unwritable_cache_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert prepare_cache_dir(str(tmp_path / "file" / "cache")) is None
    assert "--compile_cache_dir" in caplog.text
