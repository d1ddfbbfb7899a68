"""Names to models: folders, GGUF files, packaged models; and everything that does not load."""

import json
import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from adafuse_engine import (
    Engine,
    InvalidArgumentError,
    LoadError,
    MemberConfig,
    ModelFormatError,
    ModelNotFoundError,
    TokenizerError,
)
from adafuse_engine.members.local import gguf, loading
from adafuse_engine.members.local.loading import load, source_of
from tests.support import tiny


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ADAFUSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save("llama", tmp_path_factory.mktemp("llama"))


def test_a_local_folder_loads_in_float32_on_a_cpu(folder):
    loaded = load(MemberConfig(model=str(folder), device="cpu"), progress=False)
    assert loaded.model.dtype == torch.float32
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert not loaded.model.training


def test_dtype_and_model_arguments_pass_through(folder):
    config = MemberConfig(
        model=str(folder), device="cpu", dtype="bfloat16", model_kwargs={"attn_implementation": "eager"}
    )
    loaded = load(config, progress=False)
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.model.config._attn_implementation == "eager"


def test_both_attention_implementations_answer_alike(folder):
    texts = []
    for kind in ("sdpa", "eager"):
        config = MemberConfig(model=str(folder), device="cpu", model_kwargs={"attn_implementation": kind})
        with Engine.from_models([config], progress=False) as engine:
            texts.append(engine.generate("The ferry leaves", max_tokens=20).text)
    assert texts[0] == texts[1]


def test_lower_precision_answers_too(folder):
    config = MemberConfig(model=str(folder), device="cpu", dtype="bfloat16")
    with Engine.from_models([config], progress=False) as engine:
        assert engine.generate("The ferry", max_tokens=5).usage.completion_tokens > 0


def test_an_engine_of_two_folders_answers(folder, tmp_path):
    other = tiny.save("gemma", tmp_path / "gemma")
    with Engine.from_models([str(folder), str(other)], progress=False, threshold=0.4) as engine:
        done = engine.generate("The ferry", max_tokens=10)
    assert [m.name for m in done.usage.members] == [folder.name, "gemma"]


def test_what_grammars_need_is_made_with_the_model_or_with_the_first_of_them(folder):
    for early in (True, False):
        with Engine.from_models([str(folder)], progress=False, prepare_grammars=early) as engine:
            guides = engine._members[0].model.vocabulary.guides
            assert (guides._tokenizer is not None) == early
            assert engine.generate("x", grammar='start: "yes"').text == "yes"
            assert guides._tokenizer is not None


def test_compiling_is_asked_for_and_changes_no_answer(folder, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiled.append(options) or f)
    with Engine.from_models([str(folder)], progress=False) as engine:
        expected = engine.generate("The ferry", max_tokens=8).text
    assert compiled == []
    with Engine.from_models([MemberConfig(model=str(folder), compile=True)], progress=False) as engine:
        assert engine.generate("The ferry", max_tokens=8).text == expected
    assert compiled == [{"dynamic": True}]


def test_members_of_one_model_are_loaded_once(folder, monkeypatch):
    from adafuse_engine.members.local import member

    loads = []
    monkeypatch.setattr(member, "load", lambda c, progress: loads.append(c) or load(c, progress=progress))
    models = [MemberConfig(model=str(folder), name=n) for n in ("a", "b")]
    with Engine.from_models(models, progress=False):
        assert len(loads) == 1


def test_shared_engines_are_one_per_configuration(folder):
    from adafuse_engine import EngineConfig

    config = EngineConfig(members=[str(folder)], progress=False)
    one = Engine.shared(config)
    try:
        assert Engine.shared(config) is one
        assert Engine.shared(EngineConfig(members=[str(folder)], decoding={"threshold": 0.1})) is one
        assert not one.closed
        one.close()
        two = Engine.shared(config)
        assert two is not one
        two.close()
    finally:
        one.close()


def test_threads_that_load_at_once_all_get_their_model(folder):
    done = []

    def go():
        done.append(load(MemberConfig(model=str(folder), device="cpu"), progress=False))

    threads = [threading.Thread(target=go) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=60)
    assert len(done) == 4


def test_threads_that_load_in_different_precisions_do_not_mix_them(folder):
    together = threading.Barrier(4)

    def go(dtype):
        together.wait(timeout=60)
        config = MemberConfig(model=str(folder), device="cpu", dtype=dtype)
        return {p.dtype for _ in range(3) for p in load(config, progress=False).model.parameters()}

    wanted = ["float32", "bfloat16", "float32", "float16"]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(go, wanted)) == [{getattr(torch, name)} for name in wanted]
    assert torch.get_default_dtype() == torch.float32


@pytest.fixture
def asked(monkeypatch):
    """What ``from_pretrained`` of the model was asked for; it ends the load."""
    calls = []

    class Model:
        @staticmethod
        def from_pretrained(source, **arguments):
            calls.append(arguments)
            raise RuntimeError("enough")

    monkeypatch.setattr(loading, "AutoModelForCausalLM", Model)
    return calls


@pytest.mark.parametrize(
    ("fields", "dtype", "device_map"),
    [
        ({"device": "cpu"}, torch.float32, None),
        ({"device": "cuda:1"}, torch.bfloat16, {"": "cuda:1"}),
        ({"device": "cuda:1", "dtype": "float16"}, torch.float16, {"": "cuda:1"}),
        ({"device_map": "auto"}, torch.bfloat16, "auto"),
        ({"device_map": {"": "cpu"}}, torch.float32, {"": "cpu"}),
        ({"device_map": {"model": 0, "lm_head": "cpu"}}, torch.bfloat16, {"model": 0, "lm_head": "cpu"}),
        ({"device": "cpu", "model_kwargs": {"device_map": "auto", "dtype": "auto"}}, "auto", "auto"),
    ],
)
def test_device_and_dtype_reach_transformers(folder, asked, fields, dtype, device_map):
    with pytest.raises(LoadError, match="enough"):
        load(MemberConfig(model=str(folder), **fields), progress=False)
    (arguments,) = asked
    assert arguments["dtype"] == dtype
    assert arguments.get("device_map") == device_map
    assert arguments["use_safetensors"] is True
    assert arguments["trust_remote_code"] is False


@pytest.mark.parametrize(
    ("options", "kind", "bits"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "BitsAndBytesConfig", "load_in_4bit"),
        ({"quant_method": "bitsandbytes_8bit", "load_in_8bit": True}, "BitsAndBytesConfig", "load_in_8bit"),
        ({"quant_method": "quanto", "weights": "int8"}, "QuantoConfig", "weights"),
    ],
)
def test_quantisation_reaches_transformers_as_its_own_kind_of_config(folder, asked, options, kind, bits):
    with pytest.raises(LoadError, match="enough"):
        load(MemberConfig(model=str(folder), device="cpu", quantization=options), progress=False)
    (arguments,) = asked
    assert type(arguments["quantization_config"]).__name__ == kind
    assert getattr(arguments["quantization_config"], bits) == options[bits]
    assert arguments["device_map"] == {"": "cpu"}


def test_tokenizer_may_come_from_another_place(folder, tmp_path):
    tiny.sentencepiece().save_pretrained(tmp_path)
    loaded = load(MemberConfig(model=str(folder), tokenizer=str(tmp_path)), progress=False)
    assert loaded.tokenizer.bos_token == "<bos>"
    with pytest.raises(ModelNotFoundError, match=r"no folder \./nowhere"):
        load(MemberConfig(model=str(folder), tokenizer="./nowhere"), progress=False)


def test_loading_is_logged_where_no_terminal_is(folder, caplog):
    with caplog.at_level(logging.INFO, "adafuse_engine"):
        load(MemberConfig(model=str(folder), name="mine"))
    assert caplog.messages[0] == "mine: loading ..."
    assert caplog.messages[1].startswith("mine: loading: done in")


def test_quiet_load_shows_nothing(folder, caplog, capfd):
    with caplog.at_level(logging.INFO, "adafuse_engine"):
        load(MemberConfig(model=str(folder)), progress=False)
    assert caplog.messages == []
    assert capfd.readouterr() == ("", "")


# ---- what does not load


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/none/at/all", "no.gguf", "a/b/c"])
def test_a_path_that_leads_nowhere_is_said_at_once(name):
    with pytest.raises(ModelNotFoundError, match="check the path"):
        source_of(name)


def test_a_missing_path_does_not_reach_for_the_hub(monkeypatch):
    monkeypatch.setattr(loading, "AutoTokenizer", None)
    with pytest.raises(ModelNotFoundError):
        load(MemberConfig(model="./nowhere"))


def test_a_hub_model_that_cannot_be_reached_says_what_to_check():
    with pytest.raises(ModelNotFoundError, match="HF_TOKEN"):
        load(MemberConfig(model="nobody/no-such-model"), progress=False)


def test_pickled_weights_are_refused(tmp_path):
    tiny.save("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelFormatError, match="safetensors"):
        load(MemberConfig(model=str(tmp_path)), progress=False)


def test_pickled_weights_cannot_be_asked_for(folder):
    with pytest.raises(InvalidArgumentError, match="use_safetensors"):
        load(MemberConfig(model=str(folder), model_kwargs={"use_safetensors": False}), progress=False)


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / "model.safetensors").unlink(),
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-1]),
        lambda f: (f / "model.safetensors").write_bytes(b"nonsense"),
        lambda f: (f / "config.json").write_text("{"),
        lambda f: (f / "config.json").write_text("{}"),
        lambda f: (f / "config.json").unlink(),
    ],
    ids=["no weights", "cut short", "nonsense", "half a config", "empty config", "no config"],
)
def test_a_folder_that_cannot_be_read_is_a_format_error_with_its_cause(tmp_path, damage):
    tiny.save("llama", tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelFormatError, match=tmp_path.name) as caught:
        load(MemberConfig(model=str(tmp_path)), progress=False)
    assert caught.value.__cause__ is not None


def test_weights_that_transformers_would_make_up_are_refused(tmp_path):
    tiny.save("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFormatError, match=r"lacks 1 of the weights of LlamaForCausalLM, e\.g\. lm_head"):
        load(MemberConfig(model=str(tmp_path)), progress=False)


def test_code_that_comes_with_a_model_is_not_run_unless_trusted(tmp_path):
    tiny.save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(LoadError, match="trust_remote_code"):
        load(MemberConfig(model=str(tmp_path)), progress=False)
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_no_gguf_is_refused(tmp_path, own_cache):
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelFormatError, match="is no GGUF file"):
        source_of(str(tmp_path / "x.gguf"))
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelFormatError, match=r"no \.gguf"):
        source_of(str(tmp_path / "weights.bin"))


def test_a_gguf_that_is_cut_short_is_refused_and_leaves_nothing(tmp_path, own_cache):
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x00" * 20)
    with pytest.raises(ModelFormatError, match="could not be read as GGUF"):
        source_of(str(tmp_path / "x.gguf"), progress=False)
    assert not list((own_cache / "converted").glob("*/config.json"))


def test_a_tokenizer_that_does_not_round_trip_is_refused_by_name(tmp_path):
    from tests.local.test_tokens import whole_words

    tiny.save("llama", tmp_path)
    whole_words().save_pretrained(tmp_path)
    with pytest.raises(TokenizerError, match=f"{tmp_path.name}: its tokenizer does not round-trip"):
        Engine.from_models([str(tmp_path)], progress=False)


@pytest.mark.parametrize("options", [{"quant_method": "none-such"}, {"quant_method": "bitsandbytes", "x": 1}, {}])
def test_a_quantisation_that_makes_no_sense_is_refused(folder, options):
    config = MemberConfig(model=str(folder), quantization=options or {"load_in_8bit": True})
    with pytest.raises((InvalidArgumentError, LoadError)):
        load(config, progress=False)


def test_a_failed_load_frees_what_was_loaded_before(folder):
    before = threading.active_count()
    with pytest.raises(ModelNotFoundError):
        Engine.from_models([str(folder), "./nowhere"], progress=False)
    assert threading.active_count() == before


# ---- GGUF


def test_a_changed_file_is_converted_again(tmp_path, own_cache):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF one")
    first = gguf._key(path)
    assert gguf._key(path) == first
    path.write_bytes(b"GGUF two, longer")
    assert gguf._key(path) != first


@pytest.mark.real_models
@pytest.mark.parametrize("name", ["bundled:smollm2-135m-instruct", "bundled:gemma-3-270m"])
def test_a_packaged_model_is_as_its_file_says(name):
    loaded = load(MemberConfig(model=name, device="cpu"), progress=False)
    tokenizer, model = loaded.tokenizer, loaded.model
    ids = tokenizer("hello").input_ids
    if "gemma" in name:
        assert ids.count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id
        assert set(model.generation_config.eos_token_id) == {1, 106}
        assert model.config.sliding_window == 512
    else:
        assert tokenizer.bos_token_id not in ids
        names = tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id)
        assert set(names) == {"<|im_end|>", "<|endoftext|>"}
        assert tokenizer.chat_template
    assert model.dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.real_models
def test_a_gemma_prompt_past_its_window_keeps_the_tree_exact():
    from adafuse_engine.members.local.member import LocalModel
    from adafuse_engine.members.local.plain import plain_logits
    from adafuse_engine.members.local.runner import Feed, Tree, Want

    config = MemberConfig(model="bundled:gemma-3-270m", device="cpu")
    model = LocalModel(config, load(config, progress=False))
    tree = Tree(Want(2, False, False))
    text = model.tokenizer("The ferry leaves the harbour at seven. " * 80).input_ids
    assert len(text) > 600
    model.runner.open(tree, text)
    for start in range(0, len(text), 512):
        model.runner.run([Feed(tree, (), text[start : start + 512], prefill=True)])
    model.runner.run([Feed(tree, (0, 0, 2), (818, 236764, 496))])
    for node, path in ((1, [818]), (3, [236764, 496])):
        plain = torch.log_softmax(plain_logits(model.runner.model, text + path, model.runner.device), 0)
        mine = torch.log_softmax(tree.rows[node].logits, 0)
        seen = torch.isfinite(mine) & (plain > -12)
        assert (mine - plain)[seen].abs().max() < 1e-3


def test_importing_the_engine_does_not_import_torch():
    code = "import sys, adafuse_engine, adafuse_engine.cli.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_check_at_load_that_runs_out_of_memory_is_an_error_and_no_verdict_on_the_model(monkeypatch):
    from adafuse_engine.members.local import selfcheck
    from adafuse_engine.members.local.runner import Runner

    runner = tiny.local_model("llama").runner

    def full(self, feeds):
        raise MemoryError

    monkeypatch.setattr(Runner, "run", full)
    with pytest.raises(MemoryError):
        selfcheck.tree_attention_works(runner)


def test_torchao_kinds_may_be_named(monkeypatch):
    import types

    from adafuse_engine.members.local.loading import _quantization

    kinds = types.ModuleType("torchao.quantization")
    kinds.Int8WeightOnlyConfig = type("Int8WeightOnlyConfig", (), {})
    package = types.ModuleType("torchao")
    package.quantization = kinds
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.quantization", kinds)
    seen = {}

    def config(**options):
        seen.update(options)

    from transformers.quantizers import auto

    monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "torchao", config)
    _quantization({"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"})
    assert isinstance(seen["quant_type"], kinds.Int8WeightOnlyConfig)
    for wrong in ("int8", "NoSuchConfig"):
        with pytest.raises(InvalidArgumentError, match="Int8WeightOnlyConfig"):
            _quantization({"quant_method": "torchao", "quant_type": wrong})


def test_a_missing_quantisation_package_is_named(monkeypatch):
    from adafuse_engine.members.local.loading import _quantization

    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(LoadError, match="pip install torchao"):
        _quantization({"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"})
