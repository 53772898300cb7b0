"""The oracle: attention, its passes and its cache in float64 NumPy, written as the formulas read.

It is the definition: kernels, tests and `vkattn check` are compared with it. It shares no code with them beyond
positions (`mask`), layouts and dtypes. Inputs may be float32, float16, bfloat16 (ml_dtypes) or float64 and are
converted exactly; results are float64.
"""

from .attention import attention, attn_weights, magnitude
from .cache import sdpa_with_kv_cache
from .quant import dequantize, quantize
from .sdpa import scaled_dot_product_attention
from .softmax import attn_output, merge_states, softmax
from .tolerance import worst_share

__all__ = [
    "attention",
    "attn_output",
    "attn_weights",
    "dequantize",
    "magnitude",
    "merge_states",
    "quantize",
    "scaled_dot_product_attention",
    "sdpa_with_kv_cache",
    "softmax",
    "worst_share",
]
