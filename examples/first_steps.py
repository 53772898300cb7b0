"""The shortest use of vkattn: NumPy arrays in, attention on the Vulkan device, NumPy arrays out."""

import numpy as np

import vkattn

rng = np.random.default_rng(0)
query = rng.standard_normal((1, 9, 100, 64), dtype=np.float32)  # batch, query heads, tokens, head_dim
key = rng.standard_normal((1, 3, 100, 64), dtype=np.float32)  # 3 KV heads: each serves 3 query heads
value = rng.standard_normal((1, 3, 100, 64), dtype=np.float32)

out = vkattn.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

expected = vkattn.oracle.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
print(f"{out.dtype} {out.shape} from {vkattn.default_device().info.name}; error against the oracle {error:.0e}")
