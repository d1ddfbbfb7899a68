"""Memory told before loading: estimates from files alone, a clear error, a warning where only KV may not fit."""

import json
import logging

import pytest

from adafuse_engine import Engine, EngineConfig, InsufficientMemoryError, LoadError, MemberConfig
from adafuse_engine.members.local import member as member_module
from adafuse_engine.members.local import memory
from tests.support import tiny


@pytest.fixture
def folder(tmp_path):
    return tiny.save("llama", tmp_path / "one")


def config(*members, **options):
    return EngineConfig(members=list(members), progress=False, **options)


def test_the_estimate_is_what_the_loaded_model_takes(folder):
    model = tiny.llama()
    size = sum(p.numel() for p in model.parameters())
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        found = memory.estimate(MemberConfig(model=str(folder), device="cpu", dtype=dtype), config(str(folder)))
        assert found.weights == size * width
        # Two layers of two heads of eight; 4096 tokens for each of eight requests.
        assert found.kv == 2 * 2 * 2 * 8 * width * 4096 * 8
        assert found.sure


def test_shards_are_counted_once_each(folder, tmp_path):
    sharded = tmp_path / "shards"
    tiny.llama().save_pretrained(sharded, max_shard_size="40KB")
    assert (sharded / "model.safetensors.index.json").is_file()
    one, many = (memory.estimate(MemberConfig(model=str(f)), config(str(f))) for f in (folder, sharded))
    assert one.weights == many.weights


def test_a_short_window_few_requests_and_a_cap_lower_the_kv(folder):
    name = str(folder)
    window = memory.estimate(MemberConfig(model=name, context_window=100), config(name, max_concurrency=1))
    assert window.kv == 2 * 2 * 2 * 8 * 4 * 100
    assert memory.estimate(MemberConfig(model=name), config(name, kv_max_bytes=1000)).kv == 1000


def test_members_on_one_model_count_its_weights_once(folder, monkeypatch, caplog):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**9)
    views = [MemberConfig(model=str(folder), name=n, device="cpu") for n in "ab"]
    with caplog.at_level(logging.INFO, logger="adafuse_engine"):
        memory.check_memory(config(*views))
    [line] = [r.message for r in caplog.records if "weights" in r.message]
    assert line == "a: weights 0.00 GB, KV up to 0.02 GB, 1.00 GB free on cpu"


def test_weights_that_do_not_fit_together_are_an_error_before_anything_is_loaded(folder, tmp_path, monkeypatch):
    other = tiny.save("gemma", tmp_path / "other")
    members = [MemberConfig(model=str(f), device="cpu") for f in (folder, other)]
    weights = [memory.estimate(m, config(m)).weights for m in members]
    monkeypatch.setattr(memory, "free_bytes", lambda device: sum(weights) - 1)
    monkeypatch.setattr(member_module, "load", lambda *args, **kwargs: pytest.fail("loaded"))
    with pytest.raises(InsufficientMemoryError, match=r"on cpu: one 0\.00 GB, other .*bfloat16.*device") as caught:
        Engine(config(*members))
    assert isinstance(caught.value, LoadError)
    assert caught.value.needed == dict(zip(["one", "other"], weights, strict=True))
    assert caught.value.free == sum(weights) - 1


@pytest.mark.parametrize(
    "options",
    [
        {"device_map": {"": "cpu"}},
        {"quantization": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        {"model_kwargs": {"dtype": "float16"}},
    ],
)
def test_members_that_may_be_smaller_or_elsewhere_are_only_logged(folder, monkeypatch, options, caplog):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10)
    with caplog.at_level(logging.INFO, logger="adafuse_engine"):
        memory.check_memory(config(MemberConfig(model=str(folder), **options)))
    assert [r for r in caplog.records if r.message.startswith("one: weights")]


def test_kv_that_may_not_fit_is_a_warning(folder, monkeypatch, caplog):
    found = memory.estimate(MemberConfig(model=str(folder), device="cpu"), config(str(folder)))
    monkeypatch.setattr(memory, "free_bytes", lambda device: found.weights + found.kv - 1)
    with Engine(config(MemberConfig(model=str(folder), device="cpu"))) as engine:
        assert engine.generate("The ferry", max_tokens=2)
    [warning] = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert "kv_max_bytes" in warning


def test_what_cannot_be_known_is_passed_over(folder, monkeypatch):
    assert memory.estimate(MemberConfig(model="nobody/nothing-like-this"), config("x")) is None
    assert memory.free_bytes("mps") is None
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    memory.check_memory(config(str(folder), "nobody/nothing-like-this"))
    (folder / "model.safetensors").write_bytes(b"\x08\x00")
    assert memory.estimate(MemberConfig(model=str(folder)), config("x")) is None


def test_a_hub_model_is_looked_up_in_the_cache(folder, monkeypatch):
    monkeypatch.setattr(memory, "try_to_load_from_cache", lambda *args, **kwargs: str(folder / "config.json"))
    assert memory.estimate(MemberConfig(model="some/model"), config("x")).weights > 0


def test_packed_weights_are_not_taken_for_what_they_will_be(folder):
    spec = json.loads((folder / "config.json").read_text())
    spec["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps(spec))
    assert not memory.estimate(MemberConfig(model=str(folder)), config("x")).sure


def test_a_containers_limit_counts(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    (groups / "memory").mkdir(parents=True)
    assert memory._free_on_cpu(proc, groups) is None
    (proc / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 500 kB\nHugePages_Total: 0\n")
    assert memory._free_on_cpu(proc, groups) == 500 * 1024
    (groups / "memory.max").write_text("max\n")
    assert memory._free_on_cpu(proc, groups) == 500 * 1024
    (groups / "memory.max").write_text("1000\n")
    (groups / "memory.current").write_text("700\n")
    (groups / "memory.stat").write_text("anon 1\ninactive_file 50\n")
    assert memory._free_on_cpu(proc, groups) == 350
